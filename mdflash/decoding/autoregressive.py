"""AR: one token a target pass. The denominator of every speedup."""

from .schedule import Noise, Schedule
from .target_runner import TargetRunner
from .types import Verdict


class Autoregressive(Schedule):
    """A block without drafts: every verification yields the bonus alone."""

    def __init__(self, target: TargetRunner, noise: Noise):
        super().__init__(target, 0, noise)

    def round(self) -> Verdict:
        verdict = self.target.verify(self.block, self.noise.verify())
        self.block = self.block.next(verdict)
        return verdict
