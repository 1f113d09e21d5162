"""`decode`: requests in, results out. Batches, stops, budgets and times; the schedules know nothing of them."""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch

from ..chat import Chat
from ..drafter import MDFlashModel
from ..drafter.sampling import Sampling
from ..target import Target, grouped_attention
from ..target.target import check_pair, share_weights
from .autoregressive import Autoregressive
from .dpara import DPara
from .drafter_runner import DrafterRunner
from .fast import FastTargetRunner
from .mailbox import Outcome
from .schedule import Noise, Schedule
from .serial import Serial
from .target_runner import TargetRunner
from .types import RequestResult, Round

METHODS = ("autoregressive", "dspark", "dflash", "dpara")
RUNNERS = {"eager": TargetRunner, "fast": FastTargetRunner}
LAG = 0  # rounds under way on a GPU before the host looks at an outcome; 1 hides the host, but has not run on one yet
Prompt = str | Sequence[int] | Sequence[dict]
OnRound = Callable[[int, "Request"], None]


@dataclass
class Request:
    """A request in flight: what has been committed so far."""

    index: int
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    began: float = 0.0  # when decoding began, on the host's clock

    def result(self) -> RequestResult:
        return RequestResult(
            tuple(self.token_ids),
            self.finish_reason,
            tuple(self.rounds),
            len(self.prompt),
            self.prefill_s,
            self.decode_s,
        )


@dataclass(frozen=True)
class Stopping:
    """When a request ends: a stop id, a stop string in the decoded answer, or exactly `max_new_tokens` tokens."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    tokenizer: object

    def commit(self, request: Request, tokens: Sequence[int]) -> int:
        """Append tokens one by one until the request ends; returns how many were counted."""
        for count, token in enumerate(tokens, start=1):
            request.token_ids.append(token)
            if token in self.stop_ids or (self.stop_strings and self._has_stop_string(request.token_ids)):
                request.finish_reason = "stop"
            elif len(request.token_ids) == self.max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                return count
        return len(tokens)

    def _has_stop_string(self, token_ids: list[int]) -> bool:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return any(stop in text for stop in self.stop_strings)


def decode(
    target: Target,
    drafter: MDFlashModel | None,
    prompts: Sequence[Prompt],
    method: str = "dpara",
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    stop_ids: Sequence[int] | None = None,
    devices: str | Sequence[str] | None = None,
    batch_size: int = 1,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_strings: Sequence[str] = (),
    thinking: bool = False,
    on_round: OnRound | None = None,
    drafter_timeout_s: float = 120.0,
    runner: str = "eager",
) -> list[RequestResult]:
    """Answer every prompt with one schedule; results come in the prompts' order.

    prompts: token ids, chat messages, or strings (one user turn, rendered with the chat template when there is one).
    method: "autoregressive" (drafter may be None), "dspark", "dflash" (a rank-0 checkpoint) or "dpara".
    stop_ids: None takes the target's. devices: "target,drafter", for example "cuda:0,cuda:1" or "cpu,cpu"; None leaves both
    models where they are. The drafter is moved; serial methods draft on the target's device.
    seed: request i draws from its own generator keyed by (seed, i): its tokens do not depend on its batch.
    stop_strings: the answer ends with the token that completes one. on_round(request index, request) after the prefill and
    after every round, for streaming. runner: the target's passes, "eager" (the Hugging Face model; the reference) or "fast"
    (fused weights, kernels, CUDA graphs; for Qwen3's and Llama's layers).
    Raises ValueError for inputs that break a rule, before anything runs.
    """
    check_types(prompts, stop_ids, stop_strings, max_new_tokens=max_new_tokens, batch_size=batch_size, top_k=top_k)
    sampling = Sampling(temperature, top_k, top_p)
    drafter = None if method == "autoregressive" else drafter
    check_method(method, drafter)
    if runner not in RUNNERS:
        raise ValueError(f"runner={runner!r}: use one of {', '.join(RUNNERS)}")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name}={value}: use a positive integer")
    if stop_strings and target.tokenizer is None:
        raise ValueError(f"stop_strings={list(stop_strings)} need a tokenizer: load the target with load_target")
    if drafter is not None:
        check_pair(target, drafter)
        place(target, drafter, method, devices)
    stopping = Stopping(
        max_new_tokens, target.stop_ids if stop_ids is None else tuple(stop_ids), tuple(stop_strings), target.tokenizer
    )
    requests = [Request(i, prompt_ids(target, prompt, thinking)) for i, prompt in enumerate(prompts)]
    check_prompts(target, requests, max_new_tokens)
    if requests:
        with grouped_attention(target.model):
            lag = LAG if target.device.type == "cuda" else 0
            schedule = build_schedule(
                method, target, drafter, sampling, requests, min(batch_size, len(requests)), max_new_tokens, lag,
                drafter_timeout_s, RUNNERS[runner],
            )  # fmt: skip
            try:
                run(schedule, requests, stopping, seed, lag, drafter_timeout_s, on_round)
            finally:
                schedule.close()
    return [request.result() for request in requests]


def run(
    schedule: Schedule, requests: list[Request], stopping: Stopping, seed: int, lag: int, timeout_s: float,
    on_round: OnRound | None = None,
) -> None:  # fmt: skip
    """Drive all requests through the schedule's batch rows: a row that falls free takes the next request.

    lag: rounds that may be under way before the host looks at an outcome. A finished request's row runs on for so many
    rounds, which are dropped and not counted.
    """
    rows = Rows(schedule, requests, stopping, seed, lag, on_round or (lambda index, request: None))
    flying: deque[Flight] = deque()
    while rows.fill() or flying:
        if any(rows.held):
            flying.append(rows.step())
        if len(flying) > lag or not any(rows.held):
            rows.commit(flying.popleft(), timeout_s)


@dataclass(frozen=True)
class Flight:
    """A round under way: the requests it serves by batch row, its outcome, whether it fell back."""

    held: tuple[Request | None, ...]
    outcome: Outcome
    fallback: bool


class Rows:
    """Which request sits in which batch row."""

    def __init__(
        self, schedule: Schedule, requests: list[Request], stopping: Stopping, seed: int, lag: int, on_round: OnRound
    ):
        self.schedule, self.stopping, self.seed, self.lag, self.on_round = schedule, stopping, seed, lag, on_round
        self.waiting: deque[Request] = deque(requests)
        self.held: list[Request | None] = [None] * schedule.batch

    def fill(self) -> bool:
        """Put waiting requests into free rows (one prefill for all); False when no row holds a request."""
        while self.waiting and None in self.held:
            free = [row for row, request in enumerate(self.held) if request is None][: len(self.waiting)]
            new = [self.waiting.popleft() for _ in free]
            began = time.perf_counter()
            seeds = [request_seed(self.seed, request.index) for request in new]
            first = self.schedule.fill(free, [request.prompt for request in new], seeds).tolist()
            now = time.perf_counter()
            for row, request, token in zip(free, new, first, strict=True):
                request.prefill_s, request.began = now - began, now
                self.held[row] = request
                self.stopping.commit(request, [token])
                self._settle(row, request)
        return any(self.held)

    def step(self) -> Flight:
        """Start one round of all rows, with the host's bound on the slots it reaches."""
        schedule, block = self.schedule, self.schedule.block
        n = block.draft.tokens.shape[1] if block.draft else 0
        longest = max(len(request.prompt) + len(request.token_ids) for request in self.held if request)
        schedule.block = block = block.within(longest + n + self.lag * (n + 1))
        late = schedule.drafter.late_passes if schedule.uses_drafter else 0
        outcome = Outcome(block, schedule.step())
        return Flight(tuple(self.held), outcome, schedule.uses_drafter and schedule.drafter.late_passes > late)

    def commit(self, flight: Flight, timeout_s: float) -> None:
        """Give every request its tokens; a finished one leaves its row, and what it still had under way is dropped."""
        accepted, bonus, drafts = flight.outcome.read(timeout_s)
        now = time.perf_counter()
        for row, request in enumerate(flight.held):
            if request is None or request.finish_reason:
                continue
            r, b, proposed = accepted[row], bonus[row], drafts[row]
            committed = self.stopping.commit(request, [*proposed[:r], b])
            cold_start = self.schedule.uses_drafter and not request.rounds
            request.rounds.append(Round(r, tuple(proposed), b, committed, flight.fallback, cold_start))
            request.decode_s = now - request.began
            self._settle(row, request)

    def _settle(self, row: int, request: Request) -> None:
        """Free the row of a finished request; report what it has by now."""
        if request.finish_reason:
            self.held[row] = None
            self.schedule.block.park([row])
        self.on_round(request.index, request)


def build_schedule(
    method: str, target: Target, drafter: MDFlashModel | None, sampling: Sampling, requests: list[Request], batch: int,
    max_new_tokens: int, lag: int, timeout_s: float, runner: type[TargetRunner],
) -> Schedule:  # fmt: skip
    """Runners with caches large enough for any of the requests in each of `batch` rows, and the schedule over them."""
    d = drafter.draft_length if drafter is not None else 0
    slots = max(len(request.prompt) for request in requests) + max_new_tokens + (1 + lag) * (d + 1)
    taps = tuple(drafter.config.target_layer_ids) if drafter is not None else ()
    target_runner = runner(target, taps, sampling, batch, slots)
    noise = Noise(batch, max_new_tokens + lag, d, target.device)
    if drafter is None:
        return Autoregressive(target_runner, None, noise)
    drafter_runner = DrafterRunner(drafter, sampling, batch, slots)
    if method == "dpara":
        return DPara(target_runner, drafter_runner, noise, timeout_s)
    return Serial(target_runner, drafter_runner, noise)


def request_seed(seed: int, index: int) -> int:
    """A 63-bit generator seed for request `index` of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1


def check_method(method: str, drafter: MDFlashModel | None) -> None:
    """The method exists and the checkpoint fits it."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    if method == "autoregressive":
        return
    if drafter is None:
        raise ValueError(f"method={method!r} needs a drafter: load one with mdflash.load_drafter")
    rank = drafter.config.markov_rank
    if method == "dflash" and rank:
        raise ValueError(f"method='dflash' needs a rank-0 checkpoint, this one has markov_rank={rank}: use 'dspark'")
    if method == "dspark" and not rank:
        raise ValueError("method='dspark' needs a Markov head, this checkpoint has markov_rank=0: use 'dflash'")


def default_devices() -> str:
    """Target's and drafter's device of this machine: two GPUs, the one GPU twice, or the CPU."""
    gpus = torch.cuda.device_count()
    return f"cuda:0,cuda:{min(gpus, 2) - 1}" if gpus else "cpu,cpu"


def usable_device(name: str) -> torch.device:
    """A device of this machine, or ValueError saying what there is."""
    try:
        device = torch.device(name.strip())
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not a torch device: use cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: decoding runs on cpu or cuda:N")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device {name!r}: this machine has {count} CUDA devices; use {default_devices()!r}")
    return device


def share_cores(devices: str) -> None:
    """On CPUs give each role half of the cores, so that DPara's two threads do not wait for each other; the same for every
    method, so that speeds compare."""
    if "cpu" in devices:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def place(target: Target, drafter: MDFlashModel, method: str, devices: str | Sequence[str] | None) -> None:
    """Move target and drafter to `devices` and share embeddings and LM head where they live together."""
    if devices is not None:
        names = devices.split(",") if isinstance(devices, str) else list(devices)
        if len(names) not in (1, 2):
            raise ValueError(f"devices={devices!r}: name the target's and the drafter's device, as in 'cuda:0,cuda:1'")
        first, last = usable_device(names[0]), usable_device(names[-1])
        if target.device != first:
            target.model.to(first)
        drafter.to(last)
    if method != "dpara":
        drafter.to(target.device)
    share_weights(target, drafter)


def check_types(prompts, stop_ids, stop_strings, **integers) -> None:
    """Raise ValueError for arguments of `decode` that are not what they must be."""
    for name, value in integers.items():
        if type(value) is not int:
            raise ValueError(f"{name}={value!r}: use an integer")
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise ValueError(f"prompts is {type(prompts).__name__}, not a list of prompts: wrap a single one in a list")
    for i, prompt in enumerate(prompts):
        messages = isinstance(prompt, Sequence) and prompt and all(isinstance(part, dict) for part in prompt)
        ids = isinstance(prompt, Sequence) and all(isinstance(part, Integral) for part in prompt)
        if not (
            isinstance(prompt, str) or ids or (messages and all({"role", "content"} <= part.keys() for part in prompt))
        ):
            raise ValueError(
                f"prompt {i} is {str(prompt)[:60]!r}: use a string, token ids, or messages with role and content"
            )
    if stop_ids is not None and (isinstance(stop_ids, str) or not all_are(Integral, stop_ids)):
        raise ValueError(f"stop_ids={stop_ids!r}: pass a list of token ids, or None for the target's")
    if isinstance(stop_strings, str) or not all_are(str, stop_strings) or "" in stop_strings:
        raise ValueError(f"stop_strings={stop_strings!r}: pass a list of non-empty strings")


def all_are(kind: type, values: object) -> bool:
    """Whether it is a sequence (or set) of such values."""
    return isinstance(values, Collection) and all(isinstance(value, kind) for value in values)


def prompt_ids(target: Target, prompt: Prompt, thinking: bool) -> list[int]:
    """Token ids of a prompt in any of its three forms."""
    if isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict)):
        if target.tokenizer is None:
            raise ValueError("text prompts need a tokenizer: load the target with load_target, or pass token ids")
        if isinstance(prompt, str) and not target.tokenizer.chat_template:
            return target.tokenizer(prompt)["input_ids"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Chat(target.tokenizer, target.stop_ids, thinking).prompt(messages)
    return [int(token) for token in prompt]


def check_prompts(target: Target, requests: list[Request], max_new_tokens: int) -> None:
    """Every prompt is non-empty, inside the vocabulary, and leaves room for the answer."""
    vocab = target.config.vocab_size
    limit = getattr(target.config, "max_position_embeddings", None)
    for request in requests:
        if not request.prompt:
            raise ValueError(f"prompt {request.index} is empty: a request needs at least one token")
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise ValueError(
                f"prompt {request.index} holds ids outside 0..{vocab - 1}: was it made with another tokenizer?"
            )
        if limit and len(request.prompt) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {request.index} of {len(request.prompt)} tokens plus max_new_tokens={max_new_tokens} exceeds the "
                f"target's {limit} positions: shorten one of them"
            )
