"""DPara: the backbone precomputes every acceptance boundary while the target verifies (docs/method.md)."""

from torch import Tensor

from .drafter_runner import Branches, DrafterRunner
from .head_runner import HeadRunner
from .link import Link, Pending
from .schedule import Noise, Schedule
from .target_runner import TargetRunner
from .types import Draft, Verdict


class DPara(Schedule):
    """Only the head stays on the critical path: T_step = max(T_verify, T_precompute) + T_head.

    link: to the drafting device. head_link: where the heads work, the same link or, with the heads on the target's device,
    `Here`.
    """

    def __init__(
        self, target: TargetRunner, drafter: DrafterRunner, head: HeadRunner, noise: Noise, link: Link, head_link: Link
    ):
        super().__init__(target, drafter, head, noise)
        self.link, self.head_link = link, head_link
        self.coming: Pending | None = None  # the next block's draft

    def round(self) -> Verdict:
        self.receive()
        block = self.block
        # 1. precompute starts on the drafting device: a branch for every r, features < p
        apart = self.head_link is not self.link
        branches = self.link.submit(self.drafter.tree, block.tokens, block.start, block.limit, home=apart)
        # 2. meanwhile the target verifies the same block: r, b, features of t_0..t_d
        verdict = self.target.verify(block, self.noise.verify())
        # 3. barrier; 4. pick branch r and run the head from y_0 = b
        outcome = verdict.accepted, verdict.bonus, self.noise.draft()
        self.coming = self.head_link.submit(self._draft, branches, *outcome, home=True)
        # 5. behind it, append the features; those past t_r lie at or above the next p, where no row sees them
        self.link.submit(self.drafter.append, verdict.features, block.start)
        # 6. next block: (b, y_1..y_d) at p + r + 1
        self.block = block.next(verdict)
        return verdict

    def receive(self) -> None:
        """Put the draft under way into the block."""
        if self.coming is not None:
            (draft, self.fell_back), self.coming = self.coming.wait(), None
            self.block = self.block.holding(draft)

    def fill(self, rows, prompts, seeds) -> Tensor:
        self.receive()
        return super().fill(rows, prompts, seeds)

    def close(self) -> None:
        self.link.close()

    def _draft(self, branches: Branches, accepted: Tensor, bonus: Tensor, noise: Tensor | None) -> tuple[Draft, bool]:
        """The draft, and whether a backbone pass had to start after the barrier for it: a fallback."""
        passes = self.drafter.passes
        draft = self.head.branch(branches, accepted, bonus, noise)
        return draft, self.drafter.passes > passes

    def _aside(self, work, *args):
        return self.link.submit(work, *args, home=True).wait()
