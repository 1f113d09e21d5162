"""Decoding's nouns. Shape legend: drafter/tree.py; n drafts of one block (n = d, or 0 for autoregressive)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Drafted tokens [B, n] and q [B, n, V], the fp32 distributions they were drawn from; None when greedy (one-hot). guessed
    [B]: whether the branch had the bonus in its first slot, as a guess; None where none are guessed. alternatives [B, n, F]:
    the likeliest others of every slot, where the next block's guesses are those."""

    tokens: Tensor
    q: Tensor | None = None
    guessed: Tensor | None = None
    alternatives: Tensor | None = None

    def put(self, rows: list[int], other: "Draft") -> "Draft":
        """With another draft in these batch rows, which guessed nothing where it does not say."""
        guessed = self.guessed
        if guessed is not None:
            guessed = replaced(guessed, rows, guessed.new_zeros(len(rows)) if other.guessed is None else other.guessed)
        q, alternatives = (
            mine if mine is None else replaced(mine, rows, theirs)
            for mine, theirs in ((self.q, other.q), (self.alternatives, other.alternatives))
        )
        return Draft(replaced(self.tokens, rows, other.tokens), q, guessed, alternatives)


@dataclass(frozen=True)
class Block:
    """What one verification reads: t_0 (the previous bonus) and the drafts t_1..t_n, starting at position p.

    Attributes: first [B]: t_0. draft: None for autoregressive. start [B]: p of each request. live [B]: rows that hold a
    request; the others stay where they are. limit: a host integer no smaller than any p + n + 1, the slots a pass over this
    block can reach.
    """

    first: Tensor
    draft: Draft | None
    start: Tensor
    live: Tensor
    limit: int

    @property
    def tokens(self) -> Tensor:
        """t_0..t_n, [B, n+1]."""
        first = self.first[:, None]
        return first if self.draft is None else torch.cat([first, self.draft.tokens], dim=1)

    def next(self, verdict: "Verdict", draft: Draft | None = None) -> "Block":
        """The block after a verdict: (b, y_1..y_n) at p + r + 1."""
        start = self.start + (verdict.accepted + 1) * self.live
        return Block(verdict.bonus.clone(), draft, start, self.live, self.limit + verdict.drafts.shape[1] + 1)

    def holding(self, draft: Draft | None) -> "Block":
        """The same block with its draft."""
        return replace(self, draft=draft)

    def within(self, limit: int) -> "Block":
        """The same block with a tighter host-side bound."""
        return replace(self, limit=limit)

    def put(self, rows: list[int], other: "Block") -> "Block":
        """With another block, a new request each, in these batch rows. Nothing is written in place: a device may still read."""
        return Block(
            replaced(self.first, rows, other.first), self.draft and self.draft.put(rows, other.draft),
            replaced(self.start, rows, other.start), replaced(self.live, rows, other.live), self.limit,
        )  # fmt: skip

    def park(self, rows: list[int]) -> "Block":
        """With these rows empty: they repeat position 0, which the next request overwrites."""
        nothing = torch.zeros(len(rows), dtype=torch.long, device=self.start.device)
        start, live = replaced(self.start, rows, nothing), replaced(self.live, rows, nothing.bool())
        return replace(self, start=start, live=live)


def replaced(x_B: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """A copy of x [B, ...] with these batch rows replaced."""
    return x_B.index_put((torch.tensor(rows, device=x_B.device),), values)


@dataclass(frozen=True)
class Verdict:
    """A verification's outcome [B, 3+n] (one tensor, because it travels) and the features [B, n+1, F] of t_0..t_n (None
    without taps)."""

    outcome: Tensor
    features: Tensor | None

    @classmethod
    def of(
        cls, accepted: Tensor, bonus: Tensor, drafts: Tensor, features: Tensor | None, guessed: Tensor | None = None
    ) -> "Verdict":
        """From its parts. guessed: see Draft."""
        guessed = torch.zeros_like(accepted) if guessed is None else guessed
        return cls(torch.cat([torch.stack([accepted, bonus, guessed], dim=1), drafts], dim=1), features)

    @property
    def accepted(self) -> Tensor:
        """r [B]: drafts accepted."""
        return self.outcome[:, 0]

    @property
    def bonus(self) -> Tensor:
        """b [B]: the token that the target adds."""
        return self.outcome[:, 1]

    @property
    def drafts(self) -> Tensor:
        """The drafts judged [B, n]."""
        return self.outcome[:, 3:]


@dataclass(frozen=True)
class Round:
    """One target verification of one request.

    accepted: r, drafts accepted. draft: the ids proposed. bonus: the id the target added. committed: tokens counted, r+1
    less what lies past a stop or `max_new_tokens`. fallback: a drafter pass had to start after the barrier. cold_start: the
    block's draft came from the serial pass after the prefill. guessed: it came from a branch that had guessed the bonus.
    """

    accepted: int
    draft: tuple[int, ...]
    bonus: int
    committed: int
    fallback: bool = False
    cold_start: bool = False
    guessed: bool = False

    @property
    def proposed(self) -> int:
        """Drafts proposed."""
        return len(self.draft)


@dataclass(frozen=True)
class RequestResult:
    """A finished request.

    token_ids: the answer, the stop token included. finish_reason: "stop" or "length". rounds: in order; the prefill's token
    belongs to none. prefill_s, decode_s: seconds that its prefill took (with the requests read in beside it), and from its
    first token to its last, prefills of other rows in between included.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...]
    prompt_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def tau(self) -> float | None:
        """Acceptance length: tokens committed per verification, bonus included; None when nothing was verified."""
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else None
