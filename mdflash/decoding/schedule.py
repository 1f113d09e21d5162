"""What the schedules share: a batch's state, its noise, and the loop's interface."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .drafter_runner import DrafterRunner
from .target_runner import TargetRunner
from .types import Block, Verdict


class Noise:
    """A request's uniforms, drawn once from its own generator: [rounds, 2n+1], so that neither the batch it runs in nor a
    schedule's timing can change its tokens. Row t serves round t: n for acceptance, 1 for the bonus, n for the next draft."""

    def __init__(self, seeds: list[int], rounds: int, n: int, device: torch.device):
        self.n = n
        tables = [torch.rand(rounds + 1, 2 * n + 1, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self.table_BtN = torch.stack(tables).to(device)

    def verify(self, t: int) -> Tensor:
        """[B, n+1] for the verification of round t; its last column is the bonus's (and the prefill's, t = 0)."""
        return self.table_BtN[:, t, : self.n + 1]

    def draft(self, t: int) -> Tensor:
        """[B, n] for the draft made in round t."""
        return self.table_BtN[:, t, self.n + 1 :]

    def keep(self, rows: Tensor) -> None:
        """Keep these batch rows only."""
        self.table_BtN = self.table_BtN[rows]


class Schedule(ABC):
    """One way to alternate drafting and verification. `block` is always the block to be verified next."""

    uses_drafter = True

    def __init__(self, target: TargetRunner, drafter: DrafterRunner | None, noise: Noise):
        self.target, self.drafter, self.noise = target, drafter, noise
        self.block: Block
        self.t = 0

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Read the prompts and prepare the first block; returns the first tokens [B]. With a drafter this is the cold
        start: every prompt feature and t_0 are known, so the first draft is one serial k=0 window."""
        block, features = self.target.prefill(prompts, self.noise.verify(0)[:, -1])
        if self.uses_drafter:
            B, T = features.shape[:2]
            self.drafter.append(features, torch.arange(T, device=features.device).expand(B, T))
            draft = self.drafter.head(self.drafter.serial(block), block.first, self.noise.draft(0))
            block = Block(block.first, draft, block.start, block.limit + self.drafter.d)
        self.block = block
        return block.first

    def step(self) -> Verdict:
        """One round: advances the noise, then the schedule's own `round`."""
        self.t += 1
        return self.round()

    @abstractmethod
    def round(self) -> Verdict:
        """Verify `self.block`, put the next one in its place."""

    def keep(self, rows: Tensor) -> None:
        """Drop finished requests: keep these batch rows only."""
        self.target.keep(rows)
        if self.uses_drafter:
            self.drafter.keep(rows)
        self.noise.keep(rows)
        self.block = self.block.keep(rows)

    def close(self) -> None:
        """Release what the schedule holds (threads)."""
