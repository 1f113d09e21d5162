"""A function of tensors as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UPS = 2


class Graphed:
    """Captures `function` once for each set of input shapes and replays it: inputs are copied into fixed buffers, outputs are
    the graph's own and hold until its next replay. The function must read no host value that changes and allocate nothing
    that outlives it. The first `in_place` inputs are another graph's outputs, read where they are. On a CPU, and with `on`
    unset, it is simply called.
    """

    def __init__(self, function: Callable, on: bool = True, in_place: int = 0):
        self.function, self.on, self.in_place, self.captured = function, on, in_place, {}

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None):
        """The function's result for these inputs, all on one device; None stays None."""
        given = [x for x in inputs if x is not None]
        if not (self.on and given[0].is_cuda):
            return self.function(*inputs)
        there, copied = inputs[: self.in_place], [x for x in inputs[self.in_place :] if x is not None]
        key = tuple(x if x is None else (tuple(x.shape), x.dtype) for x in inputs)
        key += tuple(x.data_ptr() for x in there if x is not None)
        if key not in self.captured:
            self.captured[key] = self._capture(inputs)
        graph, fixed, outputs = self.captured[key]
        torch._foreach_copy_(fixed, copied)
        graph.replay()
        return outputs

    def _capture(self, inputs: tuple[Tensor | None, ...]):
        there, graph = inputs[: self.in_place], torch.cuda.CUDAGraph()
        own = [*there, *(x if x is None else x.clone() for x in inputs[self.in_place :])]
        fixed = [x for x in own[self.in_place :] if x is not None]
        with torch.cuda.device(fixed[0].device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # its own stream on this very device
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):  # with the real inputs: what it writes in place it will write again
                    self.function(*own)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=side):
                outputs = self.function(*own)
        return graph, fixed, outputs
