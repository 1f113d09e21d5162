"""A drafter in another process: the same tokens, and bounded errors when it is gone."""

import multiprocessing
import socket
import time

import pytest
import torch
from conftest import make_drafter, make_target

from mdflash import decode
from mdflash.decoding.remote import packed, serve, unpacked
from mdflash.decoding.types import Draft

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 12, [10]]
WIDE = {"hidden": 64, "head_dim": 16}
BEYOND = [
    {"in_flight_taps": 2, "bonus_guesses": 2},
    {"in_flight_taps": 1, "bonus_guesses": 2, "guess_source": "draft", "head_device": "target"},
]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def drafter_process(address: str, device: str, shape: dict) -> None:
    torch.set_num_threads(1)
    serve(make_drafter(make_target(**WIDE), **shape).to(device), address, shape.pop("timeout", 60.0))


def target_process(address: str, device: str, settings: dict, answers) -> None:
    """Decodes in a process of its own, which torch.distributed may keep."""
    torch.set_num_threads(1)
    target = make_target(**WIDE)
    target.model.to(device)
    for asked in settings["runs"]:
        time.sleep(asked.pop("after", 0.0))
        try:
            results = decode(
                target, make_drafter(target), PROMPTS, "dpara", 24, stop_ids=[5, 11], batch_size=3, seed=2,
                drafter_address=address, drafter_timeout_s=settings.get("timeout", 60.0), **asked,
            )  # fmt: skip
            answers.put([(r.token_ids, r.rounds) for r in results])
        except RuntimeError as error:
            answers.put(str(error))


def start(device: str, target_device: str, shape: dict | None = None, **settings):
    context, address = multiprocessing.get_context("spawn"), free_address()
    answers = context.Queue()
    drafter = context.Process(target=drafter_process, args=(address, device, shape or {}), daemon=True)
    target = context.Process(target=target_process, args=(address, target_device, settings, answers), daemon=True)
    target.start()
    drafter.start()
    again = context.Process(target=drafter_process, args=(address, device, {}), daemon=True)
    return drafter, target, answers, again


def same_as_here(device: str, target_device: str, *runs: dict) -> None:
    drafter, target, answers, _ = start(device, target_device, runs=list(runs))
    here = make_target(**WIDE)
    for asked in runs:
        kept = ("temperature", "in_flight_taps", "bonus_guesses", "guess_source")
        local = {name: value for name, value in asked.items() if name in kept}
        expected = decode(
            here, make_drafter(here), PROMPTS, "dpara", 24, stop_ids=[5, 11], batch_size=3, seed=2, **local
        )
        assert answers.get(timeout=120) == [(r.token_ids, r.rounds) for r in expected]
    for process in (target, drafter):
        process.join(30)
        assert process.exitcode == 0


def test_a_drafter_process_gives_the_same_tokens():
    """Several runs over one connection, the heads on either side, greedy and sampled, and beyond the paper."""
    same_as_here("cpu", "cpu", {}, {"temperature": 1.0}, {"head_device": "target"}, {"runner": "fast"}, *BEYOND)


@pytest.mark.gpu2
def test_a_drafter_process_on_another_gpu():
    same_as_here("cuda:1", "cuda:0", {}, {"temperature": 1.0}, {"head_device": "target"}, *BEYOND)


def test_a_killed_drafter_is_a_bounded_error_and_another_may_come():
    """Killed while runs go on: the next run says who is gone, and one after that finds the drafter that was started again."""
    drafter, target, answers, again = start("cpu", "cpu", runs=[{} for _ in range(60)] + [{"after": 8.0}], timeout=30.0)
    good = answers.get(timeout=120)
    drafter.kill()
    began = time.perf_counter()
    while not isinstance(answer := answers.get(timeout=60), str):
        assert answer == good
    assert time.perf_counter() - began < 30
    assert "the drafter process at 127.0.0.1" in answer
    assert "start it again" in answer
    again.start()
    while isinstance(answer, str):  # until it has come
        answer = answers.get(timeout=60)
    assert answer == good
    target.kill()
    again.join(30)
    assert not again.is_alive()  # the target's end ends the drafter's process


def test_a_server_waits_between_decodings_and_serves_its_own_drafter_alone():
    drafter, target, answers, _ = start("cpu", "cpu", shape={"rank": 4}, runs=[{}, {}])
    for _ in range(2):  # a refusal does not end the connection
        assert "another drafter than the target's process loaded (markov_rank 4 against 8)" in answers.get(timeout=120)
    for process in (target, drafter):
        process.join(30)
        assert process.exitcode == 0


def test_messages_come_out_as_they_went_in():
    message = {
        "work": "x",
        "args": (torch.arange(3), None, 4, [1, 2], Draft(torch.ones(1, 2), None), (True, torch.zeros(0))),
    }
    tensors = []
    coded = packed(message, tensors)
    given = iter(tensors)
    found = unpacked(coded, lambda shape, dtype: next(given))
    assert found["work"] == "x"
    assert found["args"][1:4] == (None, 4, [1, 2])
    assert torch.equal(found["args"][0], torch.arange(3))
    assert found["args"][4].q is None
    assert found["args"][5][0] is True
