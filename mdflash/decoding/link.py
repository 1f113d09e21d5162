"""The link to the drafting device: a worker thread, so that precompute and verify really overlap."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import torch


class Link:
    """Runs the backbone on its own thread (and its own device). A failed or stuck drafter ends in a clear error."""

    def __init__(self, device: torch.device, timeout_s: float):
        self.device, self.timeout_s = device, timeout_s
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter")

    def submit(self, work: Callable, *args) -> Future:
        """Start `work(*args)` on the drafting device and return at once."""
        return self._worker.submit(self._on_device, work, args)

    def wait(self, future: Future):
        """The barrier: the work's result, or RuntimeError when the drafter failed or took longer than timeout_s."""
        try:
            return future.result(timeout=self.timeout_s)
        except FutureTimeout:
            raise RuntimeError(
                f"the drafter on {self.device} gave no answer within {self.timeout_s:g} s: it is stuck or the limit is too "
                "low; raise drafter_timeout_s or check that device"
            ) from None
        except Exception as error:
            raise RuntimeError(f"the drafter on {self.device} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let the worker go; a stuck one is abandoned."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _on_device(self, work: Callable, args: tuple):
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return work(*args)
        return work(*args)
