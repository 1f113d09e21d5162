"""From what every request did to the figures of the report.

Shape legend: N requests, R bootstrap resamples, K benchmarks, d draft length. A statistic is a function of request
weights [.., N]: weights of one give its value, the rows of `resample` its bootstrap distribution. Two methods measured
on the same requests are compared under the same weights, which is what pairs them.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mdflash import RequestResult

RESAMPLES = 2000
Statistic = Callable[[np.ndarray], np.ndarray]
Counts = tuple[int, int, int]  # proposed, accepted and committed in a round


@dataclass(frozen=True)
class Record:
    """One request decoded by one method.

    accepted, proposed, committed, fallback, cold_start, guessed: one integer a round (the last three are flags). prefill_s,
    decode_s: seconds to the first token, and from there to the last.
    """

    method: str
    benchmark: str
    id: str
    tokens: int
    finish_reason: str
    accepted: tuple[int, ...]
    proposed: tuple[int, ...]
    committed: tuple[int, ...]
    fallback: tuple[int, ...]
    cold_start: tuple[int, ...]
    guessed: tuple[int, ...]
    prefill_s: float
    decode_s: float
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, method: str, benchmark: str, row_id: str, result: RequestResult) -> "Record":
        """The record of a finished request."""
        fields = {
            name: tuple(int(getattr(r, name)) for r in result.rounds)
            for name in ("accepted", "proposed", "committed", "fallback", "cold_start", "guessed")
        }
        return cls(
            method=method, benchmark=benchmark, id=row_id, tokens=len(result.token_ids), token_ids=result.token_ids,
            finish_reason=result.finish_reason, prefill_s=result.prefill_s, decode_s=result.decode_s, **fields,
        )  # fmt: skip

    @property
    def rounds(self) -> int:
        """Target verifications."""
        return len(self.committed)

    @property
    def key(self) -> tuple[str, str]:
        """What pairs the records of two methods."""
        return self.benchmark, self.id


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95% percentile bootstrap interval."""

    value: float
    ci95: tuple[float, float]


def resample(strata: Sequence[str], seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """How often every request is drawn, [R, N], when each stratum is redrawn with replacement at its own size."""
    generator, labels = np.random.default_rng(seed), np.array(strata)
    weights_RN = np.zeros((resamples, len(labels)))
    for label in dict.fromkeys(strata):
        at = np.flatnonzero(labels == label)
        weights_RN[:, at] = generator.multinomial(len(at), np.full(len(at), 1 / len(at)), size=resamples)
    return weights_RN


def estimate(statistic: Statistic, strata: Sequence[str], seed: int) -> Estimate:
    """A statistic's value on all requests, and its interval over resampled ones."""
    value = statistic(np.ones((1, len(strata))))[0]
    low, high = np.percentile(statistic(resample(strata, seed)), [2.5, 97.5])
    return Estimate(float(value), (float(low), float(high)))


def quotient(numerator_N: np.ndarray, denominator_N: np.ndarray) -> Statistic:
    """Σ numerator / Σ denominator over the weighted requests."""
    return lambda weights: (weights @ numerator_N) / (weights @ denominator_N)


def macro(numerator_N: np.ndarray, denominator_N: np.ndarray, strata: Sequence[str]) -> Statistic:
    """The mean over benchmarks of each one's quotient."""
    member_NK = np.array([[label == other for other in dict.fromkeys(strata)] for label in strata], dtype=float)
    by_benchmark = quotient(numerator_N[:, None] * member_NK, denominator_N[:, None] * member_NK)
    return lambda weights: by_benchmark(weights).mean(-1)


def summarise(records: Sequence[Record], baseline: Sequence[Record] | None, seed: int) -> dict:
    """Every figure of one method over some requests (one benchmark's, or all).

    tau_pooled: Σ committed / Σ rounds, with tau_ci95; tau_macro: mean over benchmarks of that; tau_mean: mean over
    requests. Requests that ended with the prefill's token have no round: they are left out of τ and counted.
    tokens_per_s: decode tokens a second as one request sees them, prefill left out. baseline: the autoregressive
    records; None leaves `speedup` null.
    """
    ran = [record for record in records if record.rounds]
    figures = {"tau_pooled": None, "tau_ci95": None, "tau_macro": None, "tau_macro_ci95": None, "tau_mean": None}
    if ran:
        strata = [record.benchmark for record in ran]
        committed, rounds = totals(ran)
        pooled = estimate(quotient(committed, rounds), strata, seed)
        average = estimate(macro(committed, rounds, strata), strata, seed)
        figures = {
            "tau_pooled": pooled.value,
            "tau_ci95": pooled.ci95,
            "tau_macro": average.value,
            "tau_macro_ci95": average.ci95,
            "tau_mean": float((committed / rounds).mean()),
        }
    seconds = sum(record.decode_s for record in ran)
    return {
        **figures,
        "requests": len(records),
        "requests_without_rounds": len(records) - len(ran),
        "rounds": sum(record.rounds for record in records),
        "tokens": sum(record.tokens for record in records),
        "fallback_rounds": sum(sum(record.fallback) for record in records),
        "cold_starts": sum(sum(record.cold_start) for record in records),
        "guessed_rounds": sum(sum(record.guessed) for record in records),
        "tokens_per_s": sum(record.tokens - 1 for record in ran) / seconds if seconds else None,
        "speedup": speedup(records, baseline, seed) if baseline else None,
        "positions": positions(records),
    }


def totals(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens committed and rounds of every request, [N] each."""
    return np.array([sum(r.committed) for r in records], float), np.array([r.rounds for r in records], float)


def tau_ratio(records: Sequence[Record], others: Sequence[Record], seed: int) -> dict | None:
    """Pooled τ of one method over another's, paired by request; None when no request has rounds in both."""
    pairs = [(a, b) for a, b in paired(records, others) if a.rounds and b.rounds]
    if not pairs:
        return None
    ours, theirs = zip(*pairs, strict=True)
    top, bottom = quotient(*totals(ours)), quotient(*totals(theirs))
    return asdict(estimate(lambda weights: top(weights) / bottom(weights), [a.benchmark for a in ours], seed))


def speedup(records: Sequence[Record], baseline: Sequence[Record], seed: int) -> dict | None:
    """Tokens a second over the baseline's, paired by request; None when no request has rounds in both.

    value, ci95: decode time without prefill. whole_request: prefill and its token included. Rates rather than times,
    because sampled answers differ in length. In a batch a request's time is what it waits for, not its share.
    """
    pairs = [(a, b) for a, b in paired(records, baseline) if a.rounds and b.rounds]
    if not pairs:
        return None
    ours, theirs = zip(*pairs, strict=True)

    def rate(side: Sequence[Record], prefill: bool) -> Statistic:
        tokens = np.array([r.tokens - (not prefill) for r in side], float)
        return quotient(tokens, np.array([r.decode_s + prefill * r.prefill_s for r in side]))

    def gain(prefill: bool) -> Statistic:
        top, bottom = rate(ours, prefill), rate(theirs, prefill)
        return lambda weights: top(weights) / bottom(weights)

    strata = [a.benchmark for a in ours]
    return {
        **asdict(estimate(gain(prefill=False), strata, seed)),
        "whole_request": float(gain(prefill=True)(np.ones((1, len(ours))))[0]),
    }


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The records of two methods, request by request."""
    by_key = {record.key: record for record in others}
    assert by_key.keys() == {record.key for record in records}, "methods were not run on the same requests"
    return [(record, by_key[record.key]) for record in records]


def positions(records: Sequence[Record]) -> dict:
    """By draft position 1..d: rounds that proposed it, tested it (all earlier ones were accepted) and accepted it, and
    its conditional acceptance accepted/tested. Drafts past the request's end count as proposed only."""
    return by_position([counts for record in records for counts in rounds_of(record)])


def by_branch(records: Sequence[Record]) -> dict[int, dict]:
    """The same of the rounds that follow one of r accepted drafts, by r: those of the branch with r+1 anchors. Also how many
    (`rounds`) and the tokens that they commit on average (`tau`)."""
    rounds: dict[int, list[Counts]] = {}
    for record in records:
        for r, counts in zip(record.accepted[:-1], rounds_of(record)[1:], strict=True):
            rounds.setdefault(r, []).append(counts)
    return {
        r: {"rounds": len(rounds[r]), "tau": round(sum(counts[2] for counts in rounds[r]) / len(rounds[r]), 3)}
        | by_position(rounds[r])
        for r in sorted(rounds)
    }


def rounds_of(record: Record) -> list[Counts]:
    """What a request's rounds proposed, accepted and committed."""
    return list(zip(record.proposed, record.accepted, record.committed, strict=True))


def by_position(rounds: Sequence[Counts]) -> dict:
    """`positions` of rounds."""
    proposed_n, accepted_n, committed_n = np.array(rounds, dtype=int).reshape(-1, 3).T
    columns = np.arange(proposed_n.max(initial=0))[None]
    proposed_nd = columns < proposed_n[:, None]
    tested = (proposed_nd & (columns < committed_n[:, None])).sum(0)
    accepted = (columns < np.minimum(accepted_n, committed_n)[:, None]).sum(0)
    return {
        "proposed": proposed_nd.sum(0).tolist(),
        "tested": tested.tolist(),
        "accepted": accepted.tolist(),
        "conditional": [a / t if t else None for a, t in zip(accepted.tolist(), tested.tolist(), strict=True)],
    }


def check_proposed(method: str, records: Sequence[Record]) -> None:
    """A drafter that proposes nothing looks like a slow success: refuse it."""
    if any(record.rounds for record in records) and not any(sum(record.proposed) for record in records):
        raise RuntimeError(f"{method} proposed no draft in {len(records)} requests: it would measure autoregressive")


def lossless(records: Sequence[Record], baseline: Sequence[Record]) -> dict:
    """Greedy answers against autoregressive ones, counted over method x request; each divergence by its first position and
    the two tokens there (None past an answer's end).

    In fp32 every pair must agree. In bf16 a batched verification may round a near-tie the other way.
    """
    answers = {record.key: record.token_ids for record in baseline}
    divergences = [
        {
            "method": record.method,
            "benchmark": record.benchmark,
            "request": record.id,
            "position": position,
            "token": token_at(record.token_ids, position),
            "autoregressive": token_at(answers[record.key], position),
        }
        for record in records
        if (position := first_difference(record.token_ids, answers[record.key])) is not None
    ]
    return {
        "greedy_total": len(records),
        "greedy_identical": len(records) - len(divergences),
        "divergences": divergences,
    }


def token_at(answer: Sequence[int], position: int) -> int | None:
    """The token at a position, None past the end."""
    return answer[position] if position < len(answer) else None


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first index at which two answers differ, an end included; None when they are equal."""
    if tuple(ours) == tuple(theirs):
        return None
    shared = min(len(ours), len(theirs))
    return next((i for i in range(shared) if ours[i] != theirs[i]), shared)
