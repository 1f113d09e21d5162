"""`decode`: requests in, results out. Batches, stops, budgets and times; the schedules know nothing of them."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from ..drafter import MDFlashModel
from ..drafter.sampling import Sampling
from ..target import Target, grouped_attention
from ..target.target import check_pair
from .build import build_schedule, check_method
from .deployment import Deployment, place
from .mailbox import Arrival, Outcome
from .requests import Prompt, Request, Stopping, check_prompts, check_types, prompt_ids
from .schedule import Schedule
from .tuning import settle
from .types import RequestResult, Round

OnRound = Callable[[int, "Request"], None]


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
    runner: str = "auto",
    lm_head: str = "auto",
    head_device: str = "drafter",
    drafter_address: str | None = None,
    in_flight_taps: int | str = 0,
    bonus_guesses: int | str = 0,
    guess_source: str = "spine",
) -> list[RequestResult]:
    """Answer every prompt with one schedule; results come in the prompts' order.

    prompts: token ids, chat messages, or strings (one user turn, rendered with the chat template when there is one).
    method: "autoregressive" (drafter may be None), "dspark", "dflash" (a rank-0 checkpoint) or "dpara".
    stop_ids: None takes the target's. devices: "target,drafter", for example "cuda:0,cuda:1" or "cpu,cpu"; None leaves both
    models where they are. The drafter is moved; serial methods draft on the target's device.
    seed: request i draws from its own generator keyed by (seed, i): its tokens do not depend on its batch.
    stop_strings: the answer ends with the token that completes one. on_round(request index, request) after the prefill and
    after every round, for streaming. runner, lm_head, head_device, drafter_timeout_s, drafter_address, in_flight_taps,
    bonus_guesses, guess_source: see `Deployment`; "fast" is for Qwen3's and Llama's layers.
    Raises ValueError for inputs that break a rule, before anything runs.
    """
    check_types(prompts, stop_ids, stop_strings, max_new_tokens=max_new_tokens, batch_size=batch_size, top_k=top_k)
    sampling = Sampling(temperature, top_k, top_p)
    drafter = None if method == "autoregressive" else drafter
    check_method(method, drafter)
    deployment = Deployment(
        runner, lm_head, head_device, drafter_timeout_s, drafter_address=drafter_address, in_flight_taps=in_flight_taps,
        bonus_guesses=bonus_guesses, guess_source=guess_source,
    )  # fmt: skip
    if drafter_address is not None and method != "dpara":
        raise ValueError(
            f"drafter_address={drafter_address!r} with method={method!r}: only 'dpara' drafts in another process"
        )
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
        current = torch.cuda.device(target.device) if target.device.type == "cuda" else nullcontext()
        with grouped_attention(target.model), current:  # kernels are launched on the current device
            batch = min(batch_size, len(requests))
            tokens = max(len(request.prompt) for request in requests) + max_new_tokens
            build = partial(build_schedule, method, target, drafter, sampling, batch, tokens)
            schedule = build(settle(deployment, drafter, batch, build) if method == "dpara" else deployment)
            try:
                schedule.warm_up()
                run(
                    schedule,
                    requests,
                    stopping,
                    seed,
                    deployment.rounds_ahead(target.device),
                    drafter_timeout_s,
                    on_round,
                )
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
    rows = Rows(schedule, requests, stopping, seed, lag, timeout_s, on_round or (lambda index, request: None))
    flying: deque[Flight] = deque()
    while rows.fill() or flying:
        if any(rows.held):
            flying.append(rows.step())
        if len(flying) > lag or not any(rows.held):
            rows.commit(flying.popleft())


@dataclass(frozen=True)
class Flight:
    """A round under way: the requests it serves by batch row, its outcome, whether it fell back."""

    held: tuple[Request | None, ...]
    outcome: Outcome
    fallback: bool


class Rows:
    """Which request sits in which batch row."""

    def __init__(
        self, schedule: Schedule, requests: list[Request], stopping: Stopping, seed: int, lag: int, timeout_s: float,
        on_round: OnRound,
    ):  # fmt: skip
        self.schedule, self.stopping, self.on_round = schedule, stopping, on_round
        self.seed, self.lag, self.timeout_s = seed, lag, timeout_s
        self.waiting: deque[Request] = deque(requests)
        self.held: list[Request | None] = [None] * schedule.batch

    def fill(self) -> bool:
        """Put waiting requests into free rows (one prefill for all); False when no row holds a request."""
        while self.waiting and None in self.held:
            free = [row for row, request in enumerate(self.held) if request is None][: len(self.waiting)]
            new = [self.waiting.popleft() for _ in free]
            began = time.perf_counter()
            seeds = [request_seed(self.seed, request.index) for request in new]
            first = Arrival(self.schedule.fill(free, [request.prompt for request in new], seeds)).read(self.timeout_s)
            now = time.perf_counter()
            for row, request, token in zip(free, new, first, strict=True):
                request.prefill_s, request.began = now - began, now
                self.held[row] = request
                self.stopping.commit(request, [token])
                self._settle(row, request)
        return any(self.held)

    def step(self) -> Flight:
        """Start one round of all rows, with the host's bound on the slots it reaches."""
        schedule = self.schedule
        n = schedule.n
        longest = max(len(request.prompt) + len(request.token_ids) for request in self.held if request)
        schedule.block = schedule.block.within(longest + n + self.lag * (n + 1))
        outcome = Outcome(schedule.step())
        return Flight(tuple(self.held), outcome, schedule.fell_back)

    def commit(self, flight: Flight) -> None:
        """Give every request its tokens; a finished one leaves its row, and what it still had under way is dropped."""
        outcomes = flight.outcome.read(self.timeout_s)
        now = time.perf_counter()
        for row, (request, (r, b, guessed, proposed)) in enumerate(zip(flight.held, outcomes, strict=True)):
            if request is None or request.finish_reason:
                continue
            committed = self.stopping.commit(request, [*proposed[:r], b])
            cold_start = self.schedule.n > 0 and not request.rounds
            request.rounds.append(Round(r, tuple(proposed), b, committed, flight.fallback, cold_start, guessed))
            request.decode_s = now - request.began
            self._settle(row, request)

    def _settle(self, row: int, request: Request) -> None:
        """Free the row of a finished request; report what it has by now."""
        if request.finish_reason:
            self.held[row] = None
            self.schedule.block = self.schedule.block.park([row])
        self.on_round(request.index, request)


def request_seed(seed: int, index: int) -> int:
    """A 63-bit generator seed for request `index` of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:8], "big") >> 1
