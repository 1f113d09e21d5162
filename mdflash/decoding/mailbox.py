"""How the host learns a round's outcome: through pinned memory, while the next round is already under way."""

import time

import torch
from torch import Tensor

from .types import Verdict


class Arrival:
    """A small tensor on its way to the host. On a CPU it is there at once."""

    def __init__(self, packed: Tensor):
        self.host, self.arrived = packed, None
        if packed.is_cuda:
            self.host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(packed.device))

    def read(self, timeout_s: float) -> list:
        """Its values. RuntimeError when the devices do not get there within timeout_s."""
        began = time.perf_counter()
        while self.arrived is not None and not self.arrived.query():
            if time.perf_counter() - began > timeout_s:
                raise RuntimeError(
                    f"a round was not over within {timeout_s:g} s: a device is stuck or the limit is too low; raise "
                    "drafter_timeout_s or check the devices"
                )
        return self.host.tolist()


class Outcome(Arrival):
    """One round's accepted counts, bonuses, guessed flags and drafts."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict.outcome)

    def read(self, timeout_s: float) -> list[tuple[int, int, bool, list[int]]]:
        """(r, b, guessed, drafts [n]) of every row."""
        return [(r, b, bool(guessed), drafts) for r, b, guessed, *drafts in super().read(timeout_s)]
