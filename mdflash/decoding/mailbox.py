"""How the host learns a round's outcome: through pinned memory, while the next round is already under way."""

import time

import torch

from .types import Verdict


class Outcome:
    """One round's accepted counts, bonuses and drafts on their way to the host. On a CPU they are there at once."""

    def __init__(self, verdict: Verdict):
        packed = verdict.outcome
        self.host, self.arrived = packed, None
        if packed.is_cuda:
            self.host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self.host.copy_(packed, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(packed.device))

    def read(self, timeout_s: float) -> tuple[list[int], list[int], list[list[int]]]:
        """(accepted [B], bonus [B], drafts [B][n]). RuntimeError when the devices do not get there within timeout_s."""
        began = time.perf_counter()
        while self.arrived is not None and not self.arrived.query():
            if time.perf_counter() - began > timeout_s:
                raise RuntimeError(
                    f"a round was not over within {timeout_s:g} s: a device is stuck or the limit is too low; raise "
                    "drafter_timeout_s or check the devices"
                )
        rows = self.host.tolist()
        return [row[0] for row in rows], [row[1] for row in rows], [row[2:] for row in rows]
