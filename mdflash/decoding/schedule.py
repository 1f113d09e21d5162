"""What the schedules share: a batch's state, its noise, and the loop's interface."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .target_runner import TargetRunner
from .types import Block, Draft, Verdict


class Noise:
    """Each request's uniforms, drawn once from its own generator: [rounds, 2n+1], so that neither the batch it runs in nor a
    schedule's timing can change its tokens. Row t serves the request's round t: n for acceptance, 1 for the bonus, n for the
    next draft. Greedy decoding draws nothing."""

    def __init__(self, batch: int, rounds: int, n: int, device: torch.device, greedy: bool):
        self.n, self.rounds, self.greedy = n, 0 if greedy else rounds, greedy
        self.table_BtN = torch.zeros(batch, self.rounds + 1, 2 * n + 1, device=device)
        self.t_B = torch.zeros(batch, dtype=torch.long, device=device)

    def fill(self, rows: list[int], seeds: list[int]) -> None:
        """New requests in these batch rows, at their round 0."""
        if self.greedy:
            return
        shape = self.table_BtN.shape[1:]
        tables = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.table_BtN[rows] = torch.stack(tables).to(self.table_BtN.device)
        self.t_B[rows] = 0

    def advance(self) -> None:
        """The next round of every row."""
        if not self.greedy:
            self.t_B = (self.t_B + 1).clamp(max=self.rounds)

    def verify(self) -> Tensor | None:
        """[B, n+1] for this round's verification; its last column is the bonus's (and the prefill's, in round 0)."""
        return self._now(slice(None, self.n + 1))

    def draft(self) -> Tensor | None:
        """[B, n] for the draft made in this round."""
        return self._now(slice(self.n + 1, None))

    def _now(self, part: slice) -> Tensor | None:
        return (
            None if self.greedy else self.table_BtN[torch.arange(len(self.t_B), device=self.t_B.device), self.t_B, part]
        )


class Schedule(ABC):
    """One way to alternate drafting and verification, over a fixed number of batch rows that requests pass through. `block`
    is always the block to be verified next, of n drafts (0: autoregressive); fell_back, whether the last one's draft took a
    pass after the barrier."""

    fell_back = False
    guesses, alternatives = 0, 0  # bonuses guessed for every acceptance boundary; those that a draft names itself

    def __init__(self, target: TargetRunner, n: int, noise: Noise):
        self.target, self.n, self.noise = target, n, noise
        self.block = self._idle_block()

    @property
    def batch(self) -> int:
        """How many batch rows there are."""
        return len(self.noise.t_B)

    def fill(self, rows: list[int], prompts: list[list[int]], seeds: list[int]) -> Tensor:
        """Read new requests into these batch rows and prepare their first block; returns their first tokens. With a drafter
        this is the cold start: every prompt feature and t_0 are known, so the first draft is one serial k=0 window."""
        self.noise.fill(rows, seeds)
        noise, drafting = ((None if x is None else x[rows]) for x in (self.noise.verify(), self.noise.draft()))
        block, features = self.target.prefill(rows, prompts, noise)
        block = block.holding(self._cold_draft(block, features, rows, drafting))
        self.block = self.block.put(rows, block)
        return block.first

    def warm_up(self) -> None:
        """A round of empty rows: compiles and captures what the rounds need before any is timed."""
        self.block = self.block.within(self.n + 1)
        self.step()
        self.block = self._idle_block()

    def step(self) -> Verdict:
        """One round: advances the noise, then the schedule's own `round`."""
        self.noise.advance()
        return self.round()

    @abstractmethod
    def round(self) -> Verdict:
        """Verify `self.block`, put the next one in its place."""

    def close(self) -> None:
        """Release what the schedule holds (threads)."""

    def _cold_draft(self, block: Block, features: Tensor | None, rows: list[int], noise: Tensor | None) -> Draft | None:
        """The serial window behind a prefill; a schedule without drafts has none."""
        return None

    def _idle_block(self) -> Block:
        B, device = self.batch, self.noise.t_B.device
        zero, draft = torch.zeros(B, dtype=torch.long, device=device), None
        if self.n:
            V = self.target.target.config.vocab_size
            q = None if self.noise.greedy else torch.zeros(B, self.n, V, device=device)
            tokens, guessed = zero[:, None].expand(B, self.n).clone(), zero if self.guesses else None
            others = tokens[..., None].expand(B, self.n, self.alternatives).clone() if self.alternatives else None
            draft = Draft(tokens, q, guessed, others)
        return Block(zero, draft, zero, torch.zeros(B, dtype=torch.bool, device=device), 0)
