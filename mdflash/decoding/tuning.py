"""`auto` for taps in flight and guessed bonuses: every pair is timed at start-up, most expected tokens per ms win.

A later tap and more guesses raise the acceptance length and shorten or fill the window in which the drafting side works; where
it no longer hides, the measured step says so.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from weakref import WeakKeyDictionary

import torch

from ..drafter import MDFlashModel
from .deployment import AUTO, Deployment
from .schedule import Schedule

GUESSES, ROUNDS = (0, 1, 2, 4), 12

# Share of serial DSpark's acceptance length, by how far into the target's layers the latest tap in flight lies and by guessed
# bonuses: one checkpoint of SmolLM2-135M-Instruct (docs/results/smollm2_135m.json); between two depths they are interpolated.
SHARES = (
    (0.0, {0: 0.821, 1: 0.859, 2: 0.868, 4: 0.876}),
    (0.07, {0: 0.830, 1: 0.868, 2: 0.878, 4: 0.886}),
    (0.30, {0: 0.839, 1: 0.879, 2: 0.890, 4: 0.899}),
    (0.53, {0: 0.854, 1: 0.897, 2: 0.909, 4: 0.918}),
    (0.77, {0: 0.885, 1: 0.929, 2: 0.941, 4: 0.952}),
)

Build = Callable[[Deployment], Schedule]


SETTLED: WeakKeyDictionary[MDFlashModel, dict] = WeakKeyDictionary()  # what was measured, for further decodings


def settle(deployment: Deployment, drafter: MDFlashModel, batch: int, build: Build) -> Deployment:
    """The deployment with every `auto` of the two settings measured away, once for a drafter, its device and a batch size.
    build makes the schedule of a deployment. A drafter that was not trained for one of them keeps it at 0."""
    if AUTO not in (deployment.in_flight_taps, deployment.bonus_guesses):
        return deployment
    if deployment.in_flight_taps != AUTO:
        drafter.config.check_taps("in_flight_taps", deployment.in_flight_taps)
    known, key = SETTLED.setdefault(drafter, {}), (deployment, drafter.norm.weight.device, batch)
    if key not in known:
        known[key] = measured(deployment, drafter, build)
        chosen = known[key].in_flight_taps, known[key].bonus_guesses
        logging.getLogger(__name__).info("batch %d: %d taps in flight, %d guessed bonuses", batch, *chosen)
    return known[key]


def settled(drafter: MDFlashModel) -> dict[int, dict[str, int]]:
    """What `auto` came to for a drafter, by batch size."""
    return {
        batch: {"in_flight_taps": found.in_flight_taps, "bonus_guesses": found.bonus_guesses}
        for (_, _, batch), found in SETTLED.get(drafter, {}).items()
    }


def measured(deployment: Deployment, drafter: MDFlashModel, build: Build) -> Deployment:
    """The pair with most expected tokens per ms."""
    trained = (drafter.config.mdflash_config or {}).get("beyond_the_paper", {})
    most = min(max(trained.get("in_flight_taps", [0])), len(drafter.config.target_layer_ids) - 1)
    taps, guesses = deployment.in_flight_taps, deployment.bonus_guesses
    taps = range(most + 1) if taps == AUTO else (taps,)
    possible = tuple(count for count in GUESSES if count < drafter.config.vocab_size)
    guesses = (possible if trained.get("known_bonus") else (0,)) if guesses == AUTO else (guesses,)
    pairs = [replace(deployment, in_flight_taps=t, bonus_guesses=f) for t, f in product(taps, guesses)]
    return (
        max(pairs, key=lambda pair: expected_share(drafter, pair) / step_s(build(pair))) if len(pairs) > 1 else pairs[0]
    )


def expected_share(drafter: MDFlashModel, deployment: Deployment) -> float:
    """Of DSpark's acceptance length, under this deployment."""
    count, config = deployment.in_flight_taps, drafter.config
    depth = (config.target_layer_ids[count - 1] + 1) / config.num_target_layers if count else 0.0
    depths = [at for at, _ in SHARES]
    guesses = max(f for f in GUESSES if f <= deployment.bonus_guesses)
    upper = min(bisect_right(depths, depth), len(SHARES) - 1)
    (low, shares), (high, more) = SHARES[upper - 1], SHARES[upper]
    part = min(1.0, (depth - low) / (high - low))
    return shares[guesses] + part * (more[guesses] - shares[guesses])


def step_s(schedule: Schedule) -> float:
    """Seconds a round takes with nothing committed; closes the schedule."""
    try:
        schedule.warm_up()
        schedule.block = schedule.block.within(schedule.n + 1)
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            for _ in range(ROUNDS):
                schedule.step()
                schedule.block = schedule.block.within(schedule.n + 1)
            if schedule.block.start.is_cuda:
                torch.cuda.synchronize(schedule.block.start.device)
        return (time.perf_counter() - began) / ROUNDS
    finally:
        schedule.close()
