"""The link to the drafting device: a worker thread, so that precompute and verify really overlap."""

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread

import torch


class Link:
    """Runs the backbone on its own thread (and its own device). A failed or stuck drafter ends in a clear error; the thread
    is a daemon, so that a stuck one does not keep the process alive."""

    def __init__(self, device: torch.device, timeout_s: float):
        self.device, self.timeout_s = device, timeout_s
        self._work: SimpleQueue = SimpleQueue()
        self._thread = Thread(target=self._serve, name="drafter", daemon=True)
        self._thread.start()

    def submit(self, work: Callable, *args) -> Future:
        """Start `work(*args)` on the drafting device and return at once."""
        future = Future()
        self._work.put((future, work, args))
        return future

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
        """Let the worker go once it is done, before the interpreter may end under it; a stuck one is abandoned."""
        self._work.put(None)
        self._thread.join(timeout=0.5)

    def _serve(self) -> None:
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            while (item := self._work.get()) is not None:
                future, work, args = item
                try:
                    future.set_result(work(*args))
                except BaseException as error:  # it reaches the caller through `wait`
                    future.set_exception(error)
