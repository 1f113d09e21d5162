"""Speed and memory of a training step at a target's true shape, on random weights (they say nothing of acceptance).

    python -m eval.training_speed --config recipes/qwen3_8b.yaml --output FILE.json [--target_config config.json]
    deepspeed --num_gpus 2 --module eval.training_speed (the same arguments) --engine_steps 4

The first writes the step's figures: share of the measured bf16 matmul rate (FLOPs as docs/training.md counts them), peak
memory, time by part, the loss against a plain reference, recompiles. The second runs the trainer itself under DeepSpeed and
adds samples/s for its number of GPUs and its ZeRO stage; `scaling_2gpu` (of the ZeRO stage that scales least) follows once one
and two GPUs have run.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from transformers import TrainerCallback

from mdflash.chat import Sample
from mdflash.recipe import Recipe, read_recipe
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining, MDFlashTrainer, Mix, WindowDataset
from mdflash.training.flops import count_text, drafter_part
from mdflash.training.fused import FusedWindowLoss
from mdflash.training.plan import measured_tflops, target_config
from mdflash.training.run import training_arguments
from mdflash.training.windows import stage_layouts

from .random_models import random_pair
from .run import provenance

REPEATS, RANDOM_LENGTHS, LONGEST, LOSS_ROWS = 20, 200, 1024, 1792


def main(args: list[str] | None = None) -> None:
    """Measure, and merge the figures into the output file."""
    recipe, values = read_recipe(args, __doc__.splitlines()[0], extra=arguments)
    if not torch.cuda.is_available():
        sys.exit("error: no GPU here: this measures training speed, run it on one")
    if values.engine_steps == 1:
        sys.exit("error: --engine_steps 1: the first step compiles, so time at least one more")
    config = target_config(recipe, values.target_config)
    made_by = provenance("eval.training_speed", args) | {"recipe": recipe.name}
    pieces = (
        [engine_figures(recipe, config, values.engine_steps)] if values.engine_steps else step_figures(recipe, config)
    )
    for found in pieces:
        if os.environ.get("RANK", "0") == "0":
            merge(Path(values.output), found, made_by, engine=values.engine_steps > 0)


def arguments(parser) -> None:
    """What this command adds to a recipe's."""
    parser.add_argument("--output", type=str, required=True, help="JSON file that the figures are merged into")
    parser.add_argument(
        "--target_config", type=str, default=None, help="the target's config.json, else it is looked up"
    )
    parser.add_argument("--engine_steps", type=int, default=0, help="run this many optimizer steps under DeepSpeed")
    parser.add_argument("--local_rank", type=int, default=-1)


def merge(output: Path, found: dict, made_by: dict, engine: bool) -> None:
    """Add the figures to what the file holds: a new revision or command of the step's figures drops the old ones, an engine
    run keeps its own provenance, and scaling follows where one and two GPUs ran the same ZeRO stage."""
    held = json.loads(output.read_text()) if output.is_file() else {}
    runs = held.get("engine", {})
    if engine:
        runs |= {name: run | made_by for name, run in found.items()}
    else:
        same = all(held.get(name) == value for name, value in made_by.items())
        held = (held if same else made_by) | found | {"ms": (held if same else {}).get("ms", {}) | found.get("ms", {})}
    pairs = [(name, name.replace("_2gpu", "_1gpu")) for name in runs if name.endswith("_2gpu")]
    scaling = {
        two: round(runs[two]["samples_per_s"] / runs[one]["samples_per_s"], 3) for two, one in pairs if one in runs
    }
    held |= {"engine": runs} if runs else {}
    held |= {"scaling_2gpu": min(scaling.values()), "scaling_2gpu_by_stage": scaling} if scaling else {}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(held, indent=1) + "\n")
    print(f"{time.process_time():.0f} s of work:", json.dumps(found), flush=True)


# ---- the step ----


def random_module(recipe: Recipe, config, device: torch.device) -> DrafterForTraining:
    """Target and drafter of the recipe's shapes, random, made on the device; heads frozen, layers compiled."""
    settings = recipe.settings()
    target, drafter = random_pair(recipe, config, device)
    drafter.freeze(recipe.frozen_heads).train().compile_layers()
    target.compile_layers()
    layouts = stage_layouts(recipe, drafter.draft_length)
    module = DrafterForTraining(
        drafter.cast(torch.float32), target, layouts, STAGE_WEIGHTS[recipe.stage], settings.loss_rows, settings.bf16
    )
    torch.cuda.empty_cache()
    return module.train()


def random_batch(module: DrafterForTraining, recipe: Recipe, length: int) -> dict[str, torch.Tensor]:
    """One micro-batch of full texts whose windows all have labels."""
    settings, vocabulary = recipe.settings(), module.drafter.config.vocab_size
    texts = settings.micro_batch_size
    samples = [
        Sample(str(i), tuple(torch.randint(vocabulary, (length,)).tolist()), ((1, length),)) for i in range(texts)
    ]
    dataset = WindowDataset(samples, module.layouts, settings.starts_per_text, 0, mix=Mix.of(settings))
    return {name: tensor.cuda() for name, tensor in dataset.collate([dataset[(0, i)] for i in range(texts)]).items()}


def step_figures(recipe: Recipe, config) -> Iterator[dict]:
    """All figures of one GPU, piece by piece."""
    rate = measured_tflops()
    module = random_module(recipe, config, torch.device("cuda"))
    settings, length = recipe.settings(), recipe.settings().max_length
    batch, texts = random_batch(module, recipe, length), settings.micro_batch_size
    starts = [column.tolist() for column in batch["start"][0].chunk(len(module.layouts))]
    flops = count_text(
        config, module.drafter.config, module.layouts, length, starts, recipe.stage, Mix.of(settings).in_flight,
        settings.spine_loss > 0, settings.train_head,
    )  # fmt: skip
    accumulation = settings.global_batch_size // texts
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-6, fused=True)
    yield {
        "shape": {
            "length": length, "windows_per_text": settings.starts_per_text * sum(len(x.branches) for x in module.layouts),
            "micro_batch": texts, "windows": settings.windows, "stage": recipe.stage, "accumulation": accumulation,
        },
        "matmul_tflops_measured": round(rate, 1),
        "tflop_per_text": {name: round(value / 1e12, 3) for name, value in flops.items()},
    }  # fmt: skip

    def micro_step() -> None:
        (module(**batch) / 1000).backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def share(part: float, ms: float) -> float:
        return round(texts * part / (ms / 1e3) / (rate * 1e12), 4)

    began = time.perf_counter()
    micro_step()
    torch.cuda.synchronize()
    first_step_s = time.perf_counter() - began
    update()
    torch.cuda.reset_peak_memory_stats()
    step_ms, update_ms = median_ms(micro_step), median_ms(update, 5)
    whole_ms = step_ms + update_ms / accumulation
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    yield {
        "matmul_share": share(sum(flops.values()), whole_ms),
        "matmul_share_update_every_step": share(sum(flops.values()), step_ms + update_ms),
        "samples_per_s": round(texts / whole_ms * 1e3, 3),
        "tokens_per_s": round(texts * length / whole_ms * 1e3),
        "peak_gb": round(peak_gb, 2),
        "ms": {"micro_step": step_ms, "optimizer_update": update_ms, "first_step_with_compilation": first_step_s * 1e3},
    }
    target = module._target[0]

    def target_pass() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=module.bf16):
            target.forward(batch["ids"], module.drafter.config.target_layer_ids)

    target_ms = median_ms(target_pass)
    yield {"target_kernels_ms": kernel_table(target_pass)}
    with stored_target(module, batch):
        drafter_ms = median_ms(micro_step)
        yield {
            "target_matmul_share": share(flops["target_layers"] + flops["target_attention"], target_ms),
            "drafter_matmul_share": share(drafter_part(flops), drafter_ms),
            "ms": {"target_forward": target_ms, "drafter": drafter_ms},
            "drafter_kernels_ms": kernel_table(micro_step),
        }
    optimizer.zero_grad(set_to_none=True)
    if module.drafter.config.markov_rank:
        yield loss_figures(module)
    yield {"recompiles": recompiles(module, recipe)}


def median_ms(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median time of one call between device events, after two warm-up calls."""
    times = []
    for repeat in range(repeats + 2):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if repeat >= 2:
            times.append(began.elapsed_time(ended))
    return round(statistics.median(times), 3)


@contextmanager
def stored_target(module: DrafterForTraining, batch: dict):
    """Inside, the module finds the target's output on the batch ready: what remains is the drafter's own part."""
    target = module._target[0]
    with torch.autocast("cuda", torch.bfloat16, enabled=module.bf16):
        seen = target.forward(batch["ids"], module.drafter.config.target_layer_ids)
    target.forward = lambda *args: seen
    try:
        yield
    finally:
        del target.forward


def kernel_table(work: Callable[[], object], rows: int = 18) -> dict[str, float]:
    """Milliseconds of one call by kernel, the largest first, the rest summed."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    times = sorted(
        ((e.self_device_time_total / 1e3, f"{e.key[:70]} x{e.count}") for e in profiler.key_averages()), reverse=True
    )
    table = {name: round(ms, 3) for ms, name in times[:rows]}
    return table | {"rest": round(sum(ms for ms, _ in times[rows:]), 3)}


def loss_figures(module: DrafterForTraining) -> dict:
    """Extra peak memory and time (forward and backward) of the fused loss over those of the plain reference."""
    W, W2 = module._target[0].lm_head.weight, module.drafter.head.markov_w2.weight.detach().bfloat16()
    hidden, teacher = torch.randn(2, LOSS_ROWS, W.shape[1], device="cuda", dtype=torch.bfloat16)
    code = torch.randn(LOSS_ROWS, W2.shape[1], device="cuda", dtype=torch.bfloat16)
    labels, weight = torch.randint(len(W), (LOSS_ROWS,), device="cuda"), torch.rand(LOSS_ROWS, device="cuda")
    hidden.requires_grad_()

    def fused():
        FusedWindowLoss.apply(hidden, code, W, W2, teacher, labels, weight, (0.1, 0.9), module.loss_rows)[0].backward()

    def plain():
        q = torch.softmax((hidden @ W.T + code @ W2.T).float(), -1)
        with torch.no_grad():
            p = torch.softmax((teacher @ W.T).float(), -1)
        cross_entropy = -q.gather(1, labels[:, None])[:, 0].log()
        (weight * (0.1 * cross_entropy + 0.9 * (q - p).abs().sum(-1))).sum().backward()

    memory, times, gradients = [], [], []
    for run in (fused, plain):
        hidden.grad = None
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        memory.append((torch.cuda.max_memory_allocated() - before) / 1e9)
        gradients.append(hidden.grad.double())
        times.append(median_ms(run, 10))
    return {
        "loss_gb": {"fused": round(memory[0], 3), "plain": round(memory[1], 3)},
        "loss_ms": {"fused": times[0], "plain": times[1]},
        "loss_memory_ratio": round(memory[0] / memory[1], 4),
        "loss_time_ratio": round(times[0] / times[1], 4),
        "loss_gradient_difference": ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item(),
    }


def recompiles(module: DrafterForTraining, recipe: Recipe) -> int:
    """Graphs compiled anew over random text lengths, after the first."""
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    generator = torch.Generator().manual_seed(0)
    longest = min(LONGEST, recipe.settings().max_length)
    for length in torch.randint(64, longest, (RANDOM_LENGTHS,), generator=generator).tolist():
        module(**random_batch(module, recipe, length)).backward()
    module.zero_grad(set_to_none=True)
    return counters["unique_graphs"] - before


# ---- the trainer under DeepSpeed ----


class StepTimes(TrainerCallback):
    """When every optimizer step ended."""

    def __init__(self):
        self.ended = []

    def on_step_end(self, *args, **kwargs):
        torch.cuda.synchronize()
        self.ended.append(time.perf_counter())


def engine_figures(recipe: Recipe, config, steps: int) -> dict:
    """Samples/s and losses of the trainer on random texts, at the recipe's global batch and ZeRO stage."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    settings = recipe.settings()
    settings.max_steps, settings.logging_steps, settings.eval_steps, settings.save_steps = steps, 1, 0, 0
    module = random_module(recipe, config, device)
    generator = torch.Generator().manual_seed(1)
    samples = [
        Sample(str(i), tuple(torch.randint(config.vocab_size, (settings.max_length,), generator=generator).tolist()),
               ((1, settings.max_length),))
        for i in range(settings.global_batch_size * steps)
    ]  # fmt: skip
    dataset = WindowDataset(samples, module.layouts, settings.starts_per_text, settings.seed, mix=Mix.of(settings))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments_ = training_arguments(settings, Path(folder), len(samples), "speed")
        trainer = MDFlashTrainer(module, arguments_, dataset, dataset)
        trainer.add_callback(times)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = [after - before for before, after in pairwise(times.ended)]
    name = f"zero{settings.zero_stage}_{arguments_.world_size}gpu"
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 1e9, device=device)
    return {
        name: {
            "samples_per_s": round(settings.global_batch_size / statistics.median(seconds), 3), "losses": losses,
            "global_batch": settings.global_batch_size, "step_s": [round(s, 3) for s in seconds],
            "peak_gb": round(trainer.accelerator.gather(peak).max().item(), 2),
        }
    }  # fmt: skip


if __name__ == "__main__":
    main()
