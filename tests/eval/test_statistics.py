"""Statistics against figures worked out by hand."""

import numpy as np
import pytest

from eval.statistics import (
    Record,
    by_branch,
    check_proposed,
    estimate,
    first_difference,
    lossless,
    positions,
    quotient,
    resample,
    speedup,
    summarise,
    tau_ratio,
)
from mdflash import RequestResult, Round


def record(benchmark="a", id="0", committed=(), method="dpara", d=3, decode_s=1.0, prefill_s=1.0, **changes) -> Record:
    """A request whose rounds accepted committed-1 of d drafts each."""
    rounds = len(committed)
    tokens = 1 + sum(committed)
    fields = dict(
        method=method, benchmark=benchmark, id=id, tokens=tokens, finish_reason="stop",
        accepted=tuple(c - 1 for c in committed), proposed=(d,) * rounds, committed=tuple(committed),
        fallback=(0,) * rounds, cold_start=(1,) * bool(rounds) + (0,) * (rounds - 1), guessed=(0,) * rounds,
        prefill_s=prefill_s, decode_s=decode_s, token_ids=tuple(range(tokens)),
    )  # fmt: skip
    return Record(**(fields | changes))


THREE = [
    record("a", "0", (4, 2)),  # τ 3
    record("a", "1", (1, 1, 1, 1)),  # τ 1
    record("b", "0", (4,)),  # τ 4
]


def test_the_three_averages_by_hand():
    figures = summarise(THREE, None, seed=0)
    assert figures["tau_pooled"] == pytest.approx((6 + 4 + 4) / (2 + 4 + 1))
    assert figures["tau_macro"] == pytest.approx((10 / 6 + 4) / 2)
    assert figures["tau_mean"] == pytest.approx((3 + 1 + 4) / 3)
    assert (figures["rounds"], figures["tokens"], figures["cold_starts"], figures["fallback_rounds"]) == (7, 17, 3, 0)
    assert figures["tokens_per_s"] == pytest.approx(14 / 3)
    assert figures["speedup"] is None


def test_requests_without_rounds_are_left_out_of_tau_and_counted():
    with_empty = [*THREE, record("a", "2", (), decode_s=0.0), record("b", "1", (), decode_s=0.0)]
    figures, without = summarise(with_empty, None, seed=0), summarise(THREE, None, seed=0)
    assert (figures["requests"], figures["requests_without_rounds"]) == (5, 2)
    for name in ("tau_pooled", "tau_ci95", "tau_macro", "tau_mean"):
        assert figures[name] == without[name]


def test_only_empty_requests_give_null_figures():
    empty = [record("a", "0", (), decode_s=0.0)]
    figures = summarise(empty, empty, seed=0)
    assert figures["tau_pooled"] is None
    assert figures["speedup"] is None
    assert figures["tokens_per_s"] is None


def test_autoregressive_has_tau_one_and_speedup_one():
    serial = [record("a", str(i), (1,) * (i + 1), "autoregressive", d=0) for i in range(4)]
    figures = summarise(serial, serial, seed=0)
    assert figures["tau_pooled"] == figures["tau_macro"] == figures["tau_mean"] == 1
    assert figures["tau_ci95"] == (1, 1)
    assert figures["speedup"] == {"value": 1, "ci95": (1, 1), "whole_request": 1}
    assert figures["positions"]["proposed"] == []


def test_resampling_keeps_every_stratum_at_its_size():
    weights = resample(["a", "b", "a", "b", "a"], seed=0)
    assert weights.shape == (2000, 5)
    assert (weights[:, [0, 2, 4]].sum(1) == 3).all()
    assert (weights[:, [1, 3]].sum(1) == 2).all()
    assert (weights == resample(["a", "b", "a", "b", "a"], seed=0)).all()
    assert (weights != resample(["a", "b", "a", "b", "a"], seed=1)).any()


def test_the_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(0).normal(5, 2, size=400)
    found = estimate(quotient(values, np.ones(400)), ["a"] * 400, seed=0)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.ci95 == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)


def test_strata_remove_the_spread_between_benchmarks():
    """Requests that agree within their benchmark leave nothing to resample."""
    alike = [record(name, str(i), (c, c)) for name, c in (("a", 1), ("b", 4)) for i in range(5)]
    assert summarise(alike, None, seed=0)["tau_ci95"] == (2.5, 2.5)


def test_ratio_is_paired_by_request():
    """Twice the rounds in every request: the ratio is 2 in every resample, although τ itself varies."""
    slow = [record("a", str(i), (1,) * (4 * (i + 1)), "dpara-untuned") for i in range(6)]
    fast = [record("a", str(i), (2,) * (2 * (i + 1))) for i in range(6)]
    assert tau_ratio(fast, slow[::-1], seed=0) == {"value": 2, "ci95": (2, 2)}


def test_ratio_by_hand():
    others = [record("a", "0", (3, 3)), record("a", "1", (2, 2)), record("b", "0", (1, 1, 1, 1))]
    assert tau_ratio(THREE, others, seed=0)["value"] == pytest.approx((14 / 7) / (14 / 8))


def test_speedup_by_hand():
    """Decode 6 and 4 tokens: 3 s against 10 s; with a prefill (1 s, one token) each: 12 tokens, 5 s against 12 s."""
    ours = [record("a", "0", (4, 2), decode_s=1), record("a", "1", (4,), decode_s=2)]
    serial = [record("a", "0", (1,) * 6, decode_s=6), record("a", "1", (1,) * 4, decode_s=4)]
    found = speedup(ours, serial, seed=0)
    assert found["value"] == pytest.approx(10 / 3)
    assert found["whole_request"] == pytest.approx(12 / 5)
    assert found["ci95"] == pytest.approx((2, 6))  # the two requests alone: 4/2 and 6/1


def test_unpaired_requests_are_a_broken_invariant():
    with pytest.raises(AssertionError, match="same requests"):
        tau_ratio(THREE, THREE[:2], seed=0)


def test_positions_by_hand():
    """d=3: one full acceptance, one rejection at position 2, one stop after the first of three accepted drafts."""
    rounds = record(committed=(4, 2, 1), accepted=(3, 1, 3))
    assert positions([rounds]) == {
        "proposed": [3, 3, 3],
        "tested": [3, 2, 1],
        "accepted": [3, 1, 1],
        "conditional": [1.0, 0.5, 1.0],
    }


def test_rounds_by_branch_by_hand():
    """A request's first round follows none; the branch is what the round before accepted, used up or not."""
    found = by_branch([record(committed=(4, 2, 1), accepted=(3, 1, 3)), record(committed=(2, 3))])
    assert list(found) == [1, 3]
    assert (found[1]["rounds"], found[1]["tau"]) == (2, 2.0)
    assert found[1]["conditional"] == [1.0, 1.0, 0.0]
    assert (found[3]["rounds"], found[3]["tau"], found[3]["accepted"]) == (1, 2.0, [1, 0, 0])


def test_positions_never_tested_have_no_conditional_acceptance():
    assert positions([record(committed=(1, 1))])["conditional"] == [0.0, None, None]


def test_a_drafter_that_proposes_nothing_is_refused():
    with pytest.raises(RuntimeError, match="dpara on a proposed no draft"):
        check_proposed("dpara on a", [record(committed=(1, 1), d=0)])
    check_proposed("dpara on a", [record(committed=(1,), d=0), record(committed=(1,))])
    check_proposed("dpara on a", [record()])


def test_lossless_counts_pairs_and_names_the_first_difference():
    serial = [record("a", "0", token_ids=(5, 6, 7)), record("a", "1", token_ids=(5, 6))]
    ours = [record("a", "0", token_ids=(5, 9, 7)), record("a", "1", token_ids=(5, 6))]
    found = lossless([*ours, *serial], serial)
    assert (found["greedy_total"], found["greedy_identical"]) == (4, 3)
    (difference,) = found["divergences"]
    assert {"method": "dpara", "benchmark": "a", "request": "0", "position": 1}.items() <= difference.items()
    assert difference["token"] != difference["autoregressive"]
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert first_difference((1, 2), (1, 2)) is None


def test_record_of_a_result():
    rounds = (Round(2, (7, 8, 9), 4, 3, cold_start=True), Round(0, (1, 2, 3), 5, 1, fallback=True))
    found = Record.of("dpara", "a", "a-0", RequestResult((1, 7, 8, 4, 5), "stop", rounds, 3, 0.25, 0.5))
    assert (found.accepted, found.proposed, found.committed) == ((2, 0), (3, 3), (3, 1))
    assert (found.fallback, found.cold_start) == ((0, 1), (1, 0))
    assert (found.tokens, found.rounds, found.prefill_s, found.decode_s) == (5, 2, 0.25, 0.5)
