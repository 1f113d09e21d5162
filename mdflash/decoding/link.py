"""Links to the drafting side: work is submitted in order, its results are waited for where they are needed."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, fields, is_dataclass, replace
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from .drafting_side import DraftingSide


@dataclass(frozen=True)
class Pending:
    """A result under way: a link's own handle on it, and that link."""

    link: "Link"
    handle: object

    def wait(self):
        """The result, ready for the target's device; RuntimeError when the drafting side failed or is stuck."""
        return self.link.wait(self.handle)


class Link(ABC):
    """Runs a side's work in the order of submission, while the caller goes on.

    Arguments may be tensors of the target's device as they stand at submission, results of earlier work (`Pending`), or
    plain values.
    """

    @abstractmethod
    def submit(self, work: str, *args, home: bool = False, after: object = None) -> Pending:
        """Start the side's method of that name and return at once. home: its result travels to the target's device as soon as
        it is there; without, it stays with the side, for later work. after: an event of the target's device behind which
        the arguments stand; None is behind all that is enqueued there."""

    @abstractmethod
    def wait(self, handle: object):
        """See Pending.wait."""

    def close(self) -> None:
        """Release what the link holds."""


class Here(Link):
    """A side that sits with the target: the work runs at once, in the target's own order."""

    def __init__(self, side: DraftingSide):
        self.side = side

    def submit(self, work, *args, home=False, after=None):
        return Pending(
            self, getattr(self.side, work)(*(arg.wait() if isinstance(arg, Pending) else arg for arg in args))
        )

    def wait(self, handle):
        return handle


class ThreadLink(Link):
    """The drafting side on its own thread, for CPUs: precompute and verify really overlap. The thread is a daemon, so that a
    stuck drafter does not keep the process alive."""

    def __init__(self, side: DraftingSide, home: torch.device, device: torch.device, timeout_s: float):
        self.side, self.home, self.device, self.timeout_s = side, home, device, timeout_s
        self._work: SimpleQueue = SimpleQueue()
        self._thread = Thread(target=self._serve, name="drafter", daemon=True)
        self._thread.start()

    def submit(self, work, *args, home=False, after=None):
        future = Future()
        self._work.put((future, work, args, self.home if home else self.device))
        return Pending(self, future)

    def wait(self, handle):
        try:
            return handle.result(timeout=self.timeout_s)
        except FutureTimeout:
            raise RuntimeError(
                f"the drafter on {self.device} gave no answer within {self.timeout_s:g} s: it is stuck or the limit is too "
                "low; raise drafter_timeout_s or check that device"
            ) from None
        except Exception as error:
            raise RuntimeError(f"the drafter on {self.device} failed: {type(error).__name__}: {error}") from error

    def close(self):
        """Let the worker go once it is done, before the interpreter may end under it; a stuck one is abandoned."""
        self._work.put(None)
        self._thread.join(timeout=0.5)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, work, args, device = item
            try:
                args = [arg.handle.result() if isinstance(arg, Pending) else moved(arg, self.device) for arg in args]
                future.set_result(moved(getattr(self.side, work)(*args), device))
            except BaseException as error:  # it reaches the caller through `wait`
                future.set_exception(error)


class StreamLink(Link):
    """The drafting side as a CUDA stream, on another GPU (peer copies) or on the target's own. The host only enqueues: who
    waits for whom is settled on the devices, by events."""

    def __init__(self, side: DraftingSide, home: torch.device, device: torch.device):
        self.side, self.home, self.device, self.shared = side, home, device, home == device
        # streams of their own throughout: a peer copy on a device's default stream would wait for all work of both devices
        self.stream, self.outbox, self.inbox = (torch.cuda.Stream(where) for where in (device, home, home))
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.received = torch.cuda.Event()

    def submit(self, work, *args, home=False, after=None):
        sent = after or torch.cuda.current_stream(self.home).record_event()
        self.stream.wait_event(sent)
        self.outbox.wait_event(sent)
        with torch.cuda.stream(self.outbox), torch.cuda.stream(self.stream):
            own = [arg.handle[0] if isinstance(arg, Pending) else carried(arg, self._receive) for arg in args]
            if not all(isinstance(arg, Pending) for arg in args):
                self.received.record(self.stream)  # from here on the target may overwrite what it sent
            try:
                result = getattr(self.side, work)(*own)
            except Exception as error:
                raise RuntimeError(f"the drafter on {self.device} failed: {type(error).__name__}: {error}") from error
            if not home:
                return Pending(self, (result, None))
            self.inbox.wait_stream(self.stream)
            with torch.cuda.stream(self.inbox):
                result = moved(result, self.home)
                return Pending(self, (result, self.inbox.record_event()))

    def wait(self, handle):
        result, arrived = handle
        here = torch.cuda.current_stream(self.home)
        for event in (arrived, self.received):
            if event is not None:
                here.wait_event(event)
        carried(result, lambda x: x.record_stream(here) or x)
        return result

    def close(self):
        """Let whatever is under way (a round that nobody waits for) end before either device frees or changes what it uses."""
        for device in (self.home, self.device):
            for stream in (self.stream, self.outbox, self.inbox):
                torch.cuda.current_stream(device).wait_stream(stream)

    def _receive(self, x: Tensor) -> Tensor:
        x.record_stream(self.stream if self.shared else self.outbox)
        return x.clone() if self.shared else moved(x, self.device)


def make_link(side: DraftingSide, home: torch.device, device: torch.device, timeout_s: float) -> Link:
    """The link between the target's device and the side's."""
    on_gpus = home.type == device.type == "cuda"
    return StreamLink(side, home, device) if on_gpus else ThreadLink(side, home, device, timeout_s)


def carried(value, move: Callable[[Tensor], Tensor]):
    """A tensor moved, a tuple or dataclass with its tensors moved, anything else as it is."""
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, tuple):
        return tuple(carried(part, move) for part in value)
    if is_dataclass(value):
        return replace(value, **{field.name: carried(getattr(value, field.name), move) for field in fields(value)})
    return value


def moved(value, device: torch.device):
    """`carried` to a device."""
    return carried(value, lambda x: x.to(device, non_blocking=device.type == "cuda"))
