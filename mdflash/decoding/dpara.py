"""DPara: the backbone precomputes every acceptance boundary while the target verifies (docs/method.md)."""

from torch import Tensor

from .link import Link, Pending
from .schedule import Noise, Schedule
from .target_runner import TargetRunner
from .types import Block, Draft, Verdict


class DPara(Schedule):
    """Only the head stays on the critical path: T_step = max(T_verify, T_precompute) + T_head.

    link: to the drafting side. heads: to the side with the heads, the same link unless they sit with the target. in_flight:
    taps of the verify pass behind which precompute starts. guesses: bonuses that are guessed for every r; alternatives: those
    of them that are the last draft's own.
    """

    def __init__(
        self, target: TargetRunner, d: int, noise: Noise, link: Link, heads: Link | None = None, in_flight: int = 0,
        guesses: int = 0, alternatives: int = 0,
    ):  # fmt: skip
        self.in_flight, self.guesses, self.alternatives = in_flight, guesses, alternatives
        super().__init__(target, d, noise)
        self.link, self.heads, self.apart = link, heads or link, heads is not None
        self.guessed: Pending | None = None  # bonuses of the block under verification
        self.branches: Pending | None = None  # and its branches
        self.coming: Pending | None = None  # the next block's draft

    def round(self) -> Verdict:
        self.receive()
        block, given = self.block, (self.block.tokens, self.block.start, self.block.limit)

        # 1. precompute starts on the drafting side: branches for every r, features < p and what is in flight of t_0..t_d
        def guess(in_flight: Tensor | None, after: object) -> None:
            self.guessed = self.link.submit("guess", *given, in_flight, block.draft.alternatives, after=after)

        def precompute(in_flight: Tensor | None, after: object) -> None:
            self.branches = self.link.submit("tree", *given, in_flight, self.guessed, home=self.apart, after=after)

        # 2. meanwhile the target verifies the same block: r, b, features of t_0..t_d
        early = [(self._guess_behind, guess)] * bool(self.guesses) + [(self.in_flight, precompute)]
        verdict = self.target.verify(block, self.noise.verify(), early)
        # 3. barrier; 4. pick branch r (with b in its first slot, where that was guessed) and run the head from y_0 = b
        features = self.link.submit("keep", verdict.features, block.start)
        self.coming = self.heads.submit("draft", self.branches, verdict.outcome, self.noise.draft(), home=True)
        # 5. behind it, append the features; those past t_r lie at or above the next p, where no row sees them
        self.link.submit("append", features)
        # 6. next block: (b, y_1..y_d) at p + r + 1
        self.block = block.next(verdict)
        return verdict

    @property
    def _guess_behind(self) -> int:
        """The tap before the tree's, so that the spine's pass is over when that one comes; a draft's alternatives need none."""
        return 0 if self.alternatives else max(0, self.in_flight - 1)

    def receive(self) -> None:
        """Put the draft under way into the block."""
        if self.coming is not None:
            (draft, self.fell_back), self.coming = self.coming.wait(), None
            self.block = self.block.holding(draft)

    def warm_up(self) -> None:
        super().warm_up()
        self.receive()
        self.block, self.fell_back = self._idle_block(), False

    def fill(self, rows, prompts, seeds) -> Tensor:
        self.receive()
        return super().fill(rows, prompts, seeds)

    def close(self) -> None:
        self.link.close()

    def _cold_draft(self, block: Block, features: Tensor, rows: list[int], noise: Tensor | None) -> Draft:
        given = features, block.first, block.start, block.limit, rows
        hidden = self.link.submit("cold_start", *given, home=self.apart)
        return self.heads.submit("cold_window", hidden, block.first, noise, home=True).wait()
