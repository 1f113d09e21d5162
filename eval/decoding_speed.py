"""What a decoding round costs at a target's true shape, on random weights (they say nothing of acceptance).

    python -m eval.decoding_speed --config recipes/qwen3_8b.yaml --output FILE.json [--target_config config.json]

Writes FILE.json (the figures), and beside it FILE_anatomy.png (what a round of each schedule is made of), FILE_batches.png
(step by batch) and FILE_trace.json (the rounds of each schedule for Perfetto or chrome://tracing). All schedules run on the
fast runners through the product's own loop, requests of `--context` tokens in every batch row. Two GPUs give DPara the
second; one gives it a second stream.
"""

import gc
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from mdflash.decoding.build import build_schedule
from mdflash.decoding.deployment import Deployment, default_devices, place
from mdflash.decoding.engine import run
from mdflash.decoding.requests import Request, Stopping
from mdflash.drafter.sampling import Sampling
from mdflash.recipe import read_recipe
from mdflash.target import grouped_attention
from mdflash.training.plan import target_config

from .anatomy import WARM_UP_ROUNDS, Timeline
from .random_models import random_pair
from .run import provenance

BATCHES = (1, 4, 8, 16)


def main(args: list[str] | None = None) -> None:
    """Measure, rewriting the output file after every schedule."""
    recipe, values = read_recipe(args, __doc__.splitlines()[0], extra=arguments)
    if not torch.cuda.is_available():
        sys.exit("error: no GPU here: this measures decoding speed, run it on one or two")
    output = Path(values.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    found = provenance("eval.decoding_speed", args) | {"recipe": recipe.name, "context": values.context, "ms": {}}
    target, drafter = random_pair(recipe, target_config(recipe, values.target_config), torch.device("cuda", 0))
    found |= limit(target)
    bench = Bench(target, drafter.cast(torch.bfloat16), values.context, values.rounds)
    whole = not values.taps
    schedules = bench.all(BATCHES) if whole else bench.grid(values.batches, values.taps, values.guesses)
    for name, figures in schedules:
        found["ms"][name] = figures
        found |= headline(found) if whole else {"over_dspark": over_dspark(found["ms"])}
        output.write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(figures), flush=True)
    if not whole:
        return
    output.with_name(output.stem + "_trace.json").write_text(json.dumps({"traceEvents": bench.trace}))
    from .decoding_plots import plot_anatomy, plot_batches  # matplotlib is wanted for these alone

    plot_anatomy(found, output.with_name(output.stem + "_anatomy.png"))
    plot_batches(found, output.with_name(output.stem + "_batches.png"))


def arguments(parser) -> None:
    """What this command adds to a recipe's."""
    parser.add_argument("--output", type=str, required=True, help="JSON file that the figures are written to")
    parser.add_argument(
        "--target_config", type=str, default=None, help="the target's config.json, else it is looked up"
    )
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of every request")
    parser.add_argument(
        "--taps", type=list[int], default=[], help="instead: DPara with so many taps in flight, each of these"
    )
    parser.add_argument("--guesses", type=list[int], default=[0], help="with --taps: guessed bonuses, each of these")
    parser.add_argument("--batches", type=list[int], default=list(BATCHES), help="with --taps: batch sizes")
    parser.add_argument("--rounds", type=int, default=240, help="rounds timed, after those that warm up")


def limit(target) -> dict:
    """What an autoregressive step must at least take: every weight it reads once, at the device's own copy rate."""
    read = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if target.lm_head.weight.data_ptr() != target.embed_tokens.weight.data_ptr():
        read -= target.embed_tokens.weight.nbytes
    source = torch.empty(4 << 30, dtype=torch.int8, device=target.device)
    into = torch.empty_like(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
    for repeat in range(13):
        if repeat == 3:
            began.record()
        into.copy_(source)
    ended.record()
    ended.synchronize()
    bandwidth = 10 * 2 * source.nbytes / began.elapsed_time(ended) * 1e3
    return {
        "weights_gb": round(read / 1e9, 2), "copy_tb_per_s": round(bandwidth / 1e12, 3),
        "weight_read_limit_ms": round(read / bandwidth * 1e3, 3),
    }  # fmt: skip


class Bench:
    """Schedules over one target and drafter, each run for the same rounds."""

    def __init__(self, target, drafter, context: int, rounds: int):
        self.target, self.drafter, self.context = target, drafter, context
        self.tokens = rounds + WARM_UP_ROUNDS
        self.trace: list[dict] = []

    def all(self, batches) -> Iterator[tuple[str, dict]]:
        """(name, figures) of every schedule: "dpara_b4" is DPara at batch 4 in the default deployment."""
        two = default_devices()
        for batch in batches:
            yield f"ar_b{batch}", self.measure("autoregressive", batch, "cuda:0")
        for batch in batches:
            yield f"dspark_b{batch}", self.measure("dspark", batch, "cuda:0")
        yield f"dspark_tap_events_b{batches[0]}", self.measure("dspark", batches[0], "cuda:0", tap_events=True)
        for batch in (1, batches[-1]):
            yield f"dpara_one_gpu_b{batch}", self.measure("dpara", batch, "cuda:0,cuda:0")
        if two == "cuda:0,cuda:0":
            return
        for batch in batches:
            yield f"dpara_b{batch}", self.measure("dpara", batch, two)
            all_logits = Deployment("fast").all_logits(
                batch * self.drafter.draft_length * (self.drafter.draft_length + 1)
            )
            other = "selected" if all_logits else "all"
            yield f"dpara_{other}_b{batch}", self.measure("dpara", batch, two, lm_head=other)
        yield f"dpara_heads_on_target_b{batches[0]}", self.measure("dpara", batches[0], two, head_device="target")
        yield f"dpara_no_graphs_b{batches[0]}", self.measure("dpara", batches[0], two, graphs=False)

    def grid(self, batches, taps, guesses) -> Iterator[tuple[str, dict]]:
        """AR and DSpark, and DPara with every pair of taps in flight and guessed bonuses: "dpara_b4_t3_f1"."""
        for batch in batches:
            yield f"ar_b{batch}", self.measure("autoregressive", batch, "cuda:0")
            yield f"dspark_b{batch}", self.measure("dspark", batch, "cuda:0")
            for count, guess in product(taps, guesses):
                settings = {"in_flight_taps": count, "bonus_guesses": guess}
                name = f"dpara_b{batch}_t{count}_f{guess}"
                yield name, self.measure("dpara", batch, default_devices(), **settings)

    def measure(self, method: str, batch: int, devices: str, **settings) -> dict:
        """One schedule's medians. Its rows hold a request each until the rounds are done."""
        gc.collect()
        torch.cuda.empty_cache()
        drafter = None if method == "autoregressive" else self.drafter
        if drafter is not None:
            place(self.target, drafter, method, devices)
        deployment = Deployment("fast", **settings)
        vocabulary = self.target.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        requests = [
            Request(i, torch.randint(vocabulary, (self.context,), generator=generator).tolist()) for i in range(batch)
        ]
        stopping = Stopping(self.tokens, (), (), None)
        with grouped_attention(self.target.model):
            schedule = build_schedule(
                method, self.target, drafter, Sampling(), batch, self.context + self.tokens, deployment
            )
            timeline = Timeline(schedule)
            try:
                run(schedule, requests, stopping, 0, deployment.rounds_ahead(self.target.device), 60.0)
            finally:
                schedule.close()
        name = f"{method}, batch {batch}, {devices}"
        self.trace += [event | {"pid": f"{name}: {event['pid']}"} for event in timeline.trace()]
        return timeline.figures()


def over_dspark(ms: dict) -> dict[str, float]:
    """Every DPara step over the serial DSpark step at its batch."""
    steps = {name: figures["step"] for name, figures in ms.items() if name.startswith("dpara_")}
    return {name: round(step / ms[f"dspark_{name.split('_')[1]}"]["step"], 4) for name, step in steps.items()}


def headline(found: dict) -> dict:
    """The figures of record, as far as their schedules have run."""
    ms = found["ms"]

    def at(name: str, part: str) -> float | None:
        return ms.get(name, {}).get(part)

    def ratio(a: float | None, b: float | None) -> float | None:
        return round(a / b, 4) if a and b else None

    ar, dspark, dpara = at("ar_b1", "step"), at("dspark_b1", "step"), at("dpara_b1", "step")
    last = BATCHES[-1]
    shares = {f"b{b}": at(f"dpara_b{b}", "hidden_share") for b in BATCHES}
    hidden = {batch: share for batch, share in shares.items() if share is not None}
    return {
        "ar_over_limit": ratio(ar, found["weight_read_limit_ms"]),
        "verify_over_ar": ratio(at("dpara_b1", "verify"), ar),
        "exposed_ms": at("dpara_b1", "exposed"),
        "dpara_over_ar": ratio(dpara, ar),
        "dspark_exposed_ms": at("dspark_b1", "exposed"),
        "dpara_over_dspark": ratio(dpara, dspark),
        "hidden_share": min((share for batch, share in hidden.items() if batch != f"b{last}"), default=None),
        "hidden_share_by_batch": hidden,
        "tap_events_over_verify": ratio(at("dspark_tap_events_b1", "verify"), at("dspark_b1", "verify")),
        f"b{last}_dpara_over_dspark": ratio(at(f"dpara_b{last}", "step"), at(f"dspark_b{last}", "step")),
    }


if __name__ == "__main__":
    main()
