"""The target runner whose verifications take the fast pass, as one CUDA graph a shape. Prefills stay with the eager one."""

from torch import Tensor

from ...target import Target, TargetOutput
from ..target_runner import TargetRunner
from .decoder import FastDecoder
from .graphs import Graphed

MOST_ROWS = 16


class FastTargetRunner(TargetRunner):
    """Answers as TargetRunner does (equal ids in fp32). A verdict's features are the graph's own: read them before the next
    round."""

    def __init__(self, target: Target, *args):
        super().__init__(target, *args)
        decoder = FastDecoder.of(target)
        self.graph = Graphed(lambda ids, start: decoder.forward(ids, start, self.cache.pairs, self.taps))

    def _pass(self, ids_BQ: Tensor, positions_BQ: Tensor, limit: int) -> TargetOutput:
        if ids_BQ.shape[1] > MOST_ROWS:
            return super()._pass(ids_BQ, positions_BQ, limit)
        return TargetOutput(*self.graph(ids_BQ, positions_BQ[:, 0].contiguous()))
