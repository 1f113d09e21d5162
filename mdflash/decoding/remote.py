"""The second transport: the drafting side as another process, on this host or another, over torch.distributed.

Headers travel as JSON over gloo. Tensors follow over NCCL where both sides are on GPUs, over gloo otherwise. The target's
process asks, the drafter's answers what it is asked to send home; nothing is sent to a side that is still to answer, so two
senders never wait for each other.
"""

import atexit
import json
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..drafter import MDFlashModel
from ..drafter.sampling import Sampling
from .drafter_runner import Branches
from .drafting_side import DraftingSide
from .link import Link, Pending
from .types import Draft

PARTS = {"Draft": Draft, "Branches": Branches}
BYE = "bye"


class Channel:
    """One end of a connection of two: whole messages, in order. Raises RuntimeError when the other end is gone or silent for
    timeout_s."""

    def __init__(self, address: str, rank: int, device: torch.device, timeout_s: float):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address={address!r}: use HOST:PORT, the host being the target's")
        if dist.is_initialized():
            raise ValueError(
                "torch.distributed is in use in this process: decode with a remote drafter in one of its own"
            )
        self.address, self.peer, self.device, self.timeout_s = address, 1 - rank, device, timeout_s
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        with self._naming_the_other_end():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"tcp://{address}", rank=rank, world_size=2,
                timeout=timedelta(seconds=timeout_s), device_id=device if on_gpu else None,
            )  # fmt: skip
        self.direct = False
        if rank == 0:  # one end speaks first
            self.send({"gpu": on_gpu})
        theirs = self.receive()
        if rank == 1:
            self.send({"gpu": on_gpu})
        self.direct = theirs["gpu"] and on_gpu

    def send(self, message) -> None:
        """Send a message of plain values, tensors, drafts and branches."""
        tensors: list[Tensor] = []
        header = json.dumps(packed(message, tensors)).encode()
        with self._naming_the_other_end():
            dist.send(torch.tensor([len(header)]), self.peer)
            dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), self.peer)
            for x in tensors:
                dist.send((x if self.direct else x.cpu()).contiguous(), self.peer)

    def receive(self):
        """The next message, its tensors on this end's device."""
        with self._naming_the_other_end():
            length = torch.zeros(1, dtype=torch.long)
            dist.recv(length, self.peer)
            header = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(header, self.peer)
            return unpacked(json.loads(bytes(header.tolist())), self._tensor)

    def close(self) -> None:
        """Leave; the other end's next message fails."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tensor(self, shape: list[int], dtype: str) -> Tensor:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device if self.direct else "cpu")
        dist.recv(x, self.peer)
        return x.to(self.device)

    def _naming_the_other_end(self) -> "NamedFailure":
        return NamedFailure(f"the {'drafter' if self.peer else 'target'} process at {self.address}", self.timeout_s)


class NamedFailure:
    """Inside, a failed transfer becomes a RuntimeError that says who is gone."""

    def __init__(self, who: str, timeout_s: float):
        self.who, self.timeout_s = who, timeout_s

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, json.JSONDecodeError):
            raise RuntimeError(
                f"{self.who} is gone, or gave no answer within {self.timeout_s:g} s: start it again, or raise "
                f"drafter_timeout_s ({str(error).splitlines()[0][:200]})"
            ) from error


class RemoteLink(Link):
    """The target's end: asks the drafter's process for the side's work by name."""

    def __init__(self, channel: Channel):
        self.channel, self.tickets = channel, 0
        self.held: deque[dict] = deque()  # messages that wait for an answer
        self.asked: deque[int] = deque()  # tickets of the answers to come

    def submit(self, work, *args, home=False):
        self.tickets += 1
        message = {"work": work, "ticket": self.tickets, "home": home, "args": args}
        if self.asked:  # the other side is about to send: what comes behind waits its turn
            self.held.append(carried_now(message))
        else:
            self.channel.send(message)
        if home:
            self.asked.append(self.tickets)
        return Pending(self, self.tickets)

    def wait(self, handle):
        assert self.asked.popleft() == handle, "results are waited for in the order in which they were asked for"
        answer = self.channel.receive()
        if "error" in answer:
            raise RuntimeError(f"the drafter process at {self.channel.address} failed: {answer['error']}")
        while self.held and not self.asked:
            self.channel.send(self.held.popleft())
        return answer["result"]

    def close(self):
        while self.asked:  # a draft under way is still sent
            self.wait(self.asked[0])


def carried_now(message: dict) -> dict:
    """The message with tensors of its own: the target may overwrite what it holds."""
    return message | {"args": tuple(x.clone() if isinstance(x, Tensor) else x for x in message["args"])}


def packed(value, tensors: list[Tensor]):
    """A value as JSON, its tensors apart, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, Pending):
        return {"pending": value.handle}
    for name, kind in PARTS.items():
        if isinstance(value, kind):
            return {name: [packed(part, tensors) for part in vars(value).values()]}
    if isinstance(value, tuple):
        return {"tuple": [packed(part, tensors) for part in value]}
    if isinstance(value, dict):
        return {"dict": {key: packed(part, tensors) for key, part in value.items()}}
    return {"plain": value}


def unpacked(coded: dict, tensor):
    """The value again. tensor(shape, dtype) gives the next one; a result of earlier work stays {"pending": ticket}."""
    ((kind, value),) = coded.items()
    if kind == "tensor":
        return tensor(*value)
    if kind in PARTS:
        return PARTS[kind](*(unpacked(part, tensor) for part in value))
    if kind == "tuple":
        return tuple(unpacked(part, tensor) for part in value)
    if kind == "dict":
        return {key: unpacked(part, tensor) for key, part in value.items()}
    return coded if kind == "pending" else value


CONNECTED: dict[str, Channel] = {}  # the target's end, kept for the process's further decodings


def connect(address: str, device: torch.device, timeout_s: float) -> Channel:
    """The target's end of the connection to the drafter process that serves this address; it says goodbye at exit."""
    if address not in CONNECTED:
        CONNECTED[address] = Channel(address, 0, device, timeout_s)
        atexit.register(hang_up, address)
    return CONNECTED[address]


def hang_up(address: str) -> None:
    """End a connection, whatever state it is in."""
    if channel := CONNECTED.pop(address, None):
        with suppress(RuntimeError):
            channel.send({"work": BYE})
        channel.close()


def serve(drafter: MDFlashModel, address: str, timeout_s: float = 120.0) -> None:
    """The drafter process: answer one target's process until it says goodbye. Raises RuntimeError when it vanishes."""
    from .build import build_side

    channel = Channel(address, 1, drafter.norm.weight.device, timeout_s)
    side: DraftingSide | None = None
    results: dict[int, object] = {}
    failed: str | None = None
    try:
        while (message := channel.receive())["work"] != BYE:
            work, home = message["work"], message["home"]
            try:
                args = [
                    results.pop(x["pending"]) if isinstance(x, dict) and "pending" in x else x for x in message["args"]
                ]
                if work == "build":
                    settings = dict(args[0])
                    side = build_side(drafter, Sampling(**settings.pop("sampling")), **settings)
                    results, failed, result = {}, None, True
                else:
                    result = getattr(side, work)(*args)
            except Exception as error:
                failed = failed or f"{type(error).__name__}: {error}"
            if home:
                channel.send({"error": failed} if failed else {"result": result})
            elif not failed:
                results[message["ticket"]] = result
    finally:
        channel.close()


def remote_side(channel: Channel, sampling: Sampling, **settings) -> RemoteLink:
    """A link to a side that the drafter's process builds with these settings (see `build_side`)."""
    link = RemoteLink(channel)
    link.submit("build", {"sampling": asdict(sampling)} | settings, home=True).wait()
    return link
