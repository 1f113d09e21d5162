"""Serial DSpark and DFlash: verify, then draft on fresh features. The drafter works on the target's device."""

from .schedule import Schedule
from .types import Verdict


class Serial(Schedule):
    """The k=0 window every round; a rank-0 checkpoint makes it DFlash."""

    def round(self) -> Verdict:
        block = self.block
        verdict = self.target.verify(block, self.noise.verify())
        self.drafter.append(verdict.features, block.start)
        after = block.next(verdict)
        window = self.drafter.serial(after.first, after.start, after.limit)
        self.block = after.holding(self.head.window(window, after.first, self.noise.draft()))
        return verdict
