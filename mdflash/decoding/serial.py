"""Serial DSpark and DFlash: verify, then draft on fresh features. The drafter works on the target's device."""

from .schedule import Schedule
from .types import Verdict


class Serial(Schedule):
    """The k=0 window every round; a rank-0 checkpoint makes it DFlash."""

    def round(self) -> Verdict:
        block = self.block
        verdict = self.target.verify(block, self.noise.verify())
        self.drafter.append(verdict.features, block.positions)
        window = self.drafter.serial(block.next(verdict, None))
        draft = self.drafter.head(window, verdict.bonus, self.noise.draft())
        self.block = block.next(verdict, draft)
        return verdict
