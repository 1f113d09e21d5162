"""AR: one token a target pass. The denominator of every speedup."""

from .schedule import Schedule
from .types import Verdict


class Autoregressive(Schedule):
    """A block without drafts: every verification yields the bonus alone."""

    uses_drafter = False

    def round(self) -> Verdict:
        verdict = self.target.verify(self.block, self.noise.verify())
        self.block = self.block.next(verdict)
        return verdict
