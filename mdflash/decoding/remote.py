"""The second transport: the drafting side as another process, on this host or another, over torch.distributed.

Headers travel as JSON over gloo. Tensors follow over NCCL where both sides are on GPUs, over gloo otherwise. The target's
process asks, the drafter's answers what it is asked to send home; nothing is sent to a side that is still to answer, so two
senders never wait for each other.
"""

import atexit
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
BYE, FOREVER = "bye", timedelta(days=365)
SHAPE = (  # what both processes' drafters must agree on
    "hidden_size", "vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "block_size", "mask_token_id",
    "target_layer_ids", "num_target_layers", "markov_rank", "markov_head_type",
)  # fmt: skip


def parse_address(address: str) -> str:
    """The address itself; ValueError unless it is HOST:PORT."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address={address!r}: use HOST:PORT, the host being the target's and the port 1 to 65535")
    return address


class Channel:
    """One end of a connection of two: whole messages, in order. Raises RuntimeError when the other end does not come, is
    gone, or is silent for timeout_s; the connection is over then."""

    def __init__(self, address: str, rank: int, device: torch.device, timeout_s: float):
        self.address, self.peer, self.device, self.timeout_s = parse_address(address), 1 - rank, device, timeout_s
        self.who = f"the {'drafter' if self.peer else 'target'} process at {address}"
        if dist.is_initialized():
            raise ValueError(
                "torch.distributed is in use in this process: decode with a remote drafter in one of its own"
            )
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        come = f"{self.who} did not come within {timeout_s:g} s: start it, or allow more time"
        with naming(come, self.close):
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
        parts = [torch.tensor([len(header)]), torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        with self._whole():
            for x in (*parts, *((x if self.direct else x.cpu()).contiguous() for x in tensors)):
                dist.isend(x, self.peer).wait(timedelta(seconds=self.timeout_s))

    def receive(self, idle: bool = False):
        """The next message, its tensors on this end's device. idle: it may come at any time (a vanished end still raises)."""
        with self._whole():
            length = self._part(torch.zeros(1, dtype=torch.long), FOREVER if idle else None)
            header = self._part(torch.empty(int(length), dtype=torch.uint8))
            return unpacked(json.loads(bytes(header.tolist())), self._tensor)

    def close(self) -> None:
        """Leave; the other end's next message fails."""
        if CONNECTED.get(self.address) is self:
            del CONNECTED[self.address]
        if dist.is_initialized():
            dist.destroy_process_group()

    def _part(self, x: Tensor, limit: timedelta | None = None) -> Tensor:
        dist.irecv(x, self.peer).wait(limit or timedelta(seconds=self.timeout_s))
        return x

    def _tensor(self, shape: list[int], dtype: str) -> Tensor:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device if self.direct else "cpu")
        return self._part(x).to(self.device)

    def _whole(self):
        """A message broken off anywhere, by an interrupt too, ends the connection: what follows would be out of step."""
        gone = f"{self.who} is gone, or gave no answer within {self.timeout_s:g} s: start it again, or allow more time"
        return naming(gone, self.close)


@contextmanager
def naming(fault: str, close: Callable[[], None]) -> Iterator[None]:
    """Inside, a failed transfer closes the connection and becomes a RuntimeError that says who is missing."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        close()
        raise RuntimeError(f"{fault} ({str(error).splitlines()[0][:200]})") from error
    except BaseException:
        close()
        raise


class RemoteLink(Link):
    """The target's end: asks the drafter's process for the side's work by name."""

    def __init__(self, channel: Channel):
        self.channel, self.tickets = channel, 0
        self.held: deque[dict] = deque()  # messages that wait for an answer
        self.asked: deque[int] = deque()  # tickets of the answers to come

    def submit(self, work, *args, home=False, after=None):
        assert not (home and self.asked), "one result at a time travels home"
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
        with suppress(RuntimeError):  # it has been reported, or does not matter any more
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
    """The target's end of the connection to the drafter process that serves this address; it says goodbye at exit, or before
    another address is asked for."""
    for other in [held for held in CONNECTED if held != address]:
        hang_up(other)
    if address not in CONNECTED:
        CONNECTED[address] = Channel(address, 0, device, timeout_s)
        atexit.register(hang_up, address)
    CONNECTED[address].timeout_s = timeout_s
    return CONNECTED[address]


def hang_up(address: str) -> None:
    """End a connection, whatever state it is in."""
    if channel := CONNECTED.get(address):
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
        while (message := channel.receive(idle=True))["work"] != BYE:
            work, home = message["work"], message["home"]
            try:
                args = [
                    results.pop(x["pending"]) if isinstance(x, dict) and "pending" in x else x for x in message["args"]
                ]
                if work == "build":
                    settings = dict(args[0])
                    check_same(drafter, settings.pop("drafter"))
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


def remote_side(channel: Channel, drafter: MDFlashModel, sampling: Sampling, **settings) -> RemoteLink:
    """A link to a side that the drafter's process builds with these settings (see `build_side`); RuntimeError when it serves a
    drafter of another shape."""
    link = RemoteLink(channel)
    settings |= {"sampling": asdict(sampling), "drafter": {name: getattr(drafter.config, name, None) for name in SHAPE}}
    link.submit("build", settings, home=True).wait()
    return link


def check_same(drafter: MDFlashModel, asked: dict) -> None:
    """Raise ValueError unless the served drafter has the shape of the one that the target's process loaded."""
    faults = [
        f"{name} {getattr(drafter.config, name, None)} against {value}"
        for name, value in asked.items()
        if getattr(drafter.config, name, None) != value
    ]
    if faults:
        raise ValueError(
            f"it serves another drafter than the target's process loaded ({', '.join(faults)}): serve that one"
        )
