"""A function of tensors as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 2


class Graphed:
    """Captures `function` once for each set of input shapes and replays it: inputs are copied into fixed buffers, outputs are
    the graph's own and hold until its next replay. The function must read no host value that changes and allocate nothing
    that outlives it. On a CPU it is simply called.
    """

    def __init__(self, function: Callable):
        self.function, self.captured = function, {}

    def __call__(self, *inputs: Tensor):
        """The function's result for these inputs, all on one device."""
        if not inputs[0].is_cuda:
            return self.function(*inputs)
        shapes = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if shapes not in self.captured:
            self.captured[shapes] = self._capture(inputs)
        graph, fixed, outputs = self.captured[shapes]
        torch._foreach_copy_(fixed, list(inputs))
        graph.replay()
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]):
        fixed, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs[0].device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):  # with the real inputs: what it writes in place it will write again
                    self.function(*fixed)
            current.wait_stream(side)
            with torch.cuda.graph(graph):
                outputs = self.function(*fixed)
        return graph, fixed, outputs
