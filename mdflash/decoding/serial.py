"""Serial DSpark and DFlash: verify, then draft on fresh features. The drafter works on the target's device."""

from .drafter_runner import DrafterRunner
from .head_runner import HeadRunner
from .schedule import Noise, Schedule
from .target_runner import TargetRunner
from .types import Verdict


class Serial(Schedule):
    """The k=0 window every round; a rank-0 checkpoint makes it DFlash."""

    def __init__(self, target: TargetRunner, drafter: DrafterRunner, head: HeadRunner, noise: Noise):
        super().__init__(target, drafter.d, noise)
        self.drafter, self.head = drafter, head

    def round(self) -> Verdict:
        block = self.block
        verdict = self.target.verify(block, self.noise.verify())
        self.drafter.append(verdict.features, block.start)
        after = block.next(verdict)
        window = self.drafter.serial(after.first, after.start, after.limit)
        self.block = after.holding(self.head.window(window, after.first, self.noise.draft()))
        return verdict

    def _cold_draft(self, block, features, rows, noise):
        hidden = self.drafter.cold_start(features, block.first, block.start, block.limit, rows)
        return self.head.cold_window(hidden, block.first, noise)
