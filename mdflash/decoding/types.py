"""Decoding's nouns. Shape legend: drafter/tree.py; n drafts of one block (n = d, or 0 for autoregressive)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Drafted tokens [B, n] and q [B, n, V], the fp32 distributions they were drawn from."""

    tokens: Tensor
    q: Tensor

    def to(self, device: torch.device) -> "Draft":
        """The draft on another device."""
        return Draft(self.tokens.to(device), self.q.to(device))

    def put(self, rows: list[int], other: "Draft") -> None:
        """Overwrite these batch rows with another draft's."""
        self.tokens[rows], self.q[rows] = other.tokens, other.q


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
        return first if self.draft is None else torch.cat([first, self.draft.tokens.to(first.device)], dim=1)

    @property
    def positions(self) -> Tensor:
        """p..p+n, [B, n+1]."""
        n = 0 if self.draft is None else self.draft.tokens.shape[1]
        return self.start[:, None] + torch.arange(n + 1, device=self.start.device)

    def next(self, verdict: "Verdict", draft: Draft | None) -> "Block":
        """The block after a verdict: (b, y_1..y_n) at p + r + 1."""
        n = 0 if draft is None else draft.tokens.shape[1]
        start = self.start + (verdict.accepted + 1) * self.live
        return Block(verdict.bonus, draft, start, self.live, self.limit + n + 1)

    def within(self, limit: int) -> "Block":
        """The same block with a tighter host-side bound."""
        return replace(self, limit=limit)

    def put(self, rows: list[int], other: "Block") -> None:
        """Overwrite these batch rows with another block's: a new request in each."""
        self.first[rows], self.start[rows], self.live[rows] = other.first, other.start, True
        if self.draft is not None:
            self.draft.put(rows, other.draft)

    def park(self, rows: list[int]) -> None:
        """These rows hold no request any more: they repeat position 0, which the next request overwrites."""
        self.start[rows], self.live[rows] = 0, False


@dataclass(frozen=True)
class Verdict:
    """A verification's outcome: accepted r [B], bonus b [B], features [B, n+1, F] of t_0..t_n (None without taps)."""

    accepted: Tensor
    bonus: Tensor
    features: Tensor | None


@dataclass(frozen=True)
class Round:
    """One target verification of one request.

    accepted: r, drafts accepted. draft: the ids proposed. bonus: the id the target added. committed: tokens counted, r+1
    less what lies past a stop or `max_new_tokens`. fallback: a drafter pass had to start after the barrier. cold_start: the
    block's draft came from the serial pass after the prefill.
    """

    accepted: int
    draft: tuple[int, ...]
    bonus: int
    committed: int
    fallback: bool = False
    cold_start: bool = False

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
