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

    def keep(self, rows: Tensor) -> "Draft":
        """These batch rows only."""
        rows = rows.to(self.tokens.device)
        return Draft(self.tokens[rows], self.q[rows])


@dataclass(frozen=True)
class Block:
    """What one verification reads: t_0 (the previous bonus) and the drafts t_1..t_n, starting at position p.

    Attributes: first [B]: t_0. draft: None for autoregressive. start [B]: p of each request. limit: a host integer no
    smaller than any p + n + 1, the slots a pass over this block can reach.
    """

    first: Tensor
    draft: Draft | None
    start: Tensor
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
        return Block(verdict.bonus, draft, self.start + verdict.accepted + 1, self.limit + n + 1)

    def within(self, limit: int) -> "Block":
        """The same block with a tighter host-side bound."""
        return replace(self, limit=limit)

    def keep(self, rows: Tensor) -> "Block":
        """These batch rows only."""
        return Block(self.first[rows], self.draft and self.draft.keep(rows), self.start[rows], self.limit)


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
    belongs to none. prefill_s, decode_s: seconds from the batch's start to the first token, and from there to this request's
    last token.
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
