"""What a training stage will need, before anything starts: parameters, FLOPs, GPU memory, hours. No weights are loaded.

Parameters are exact (the models are built without storage). Memory holds the tensors that this trainer and DeepSpeed 0.19
keep at the end of a forward, activations as the plain modules save them for FlexAttention (a test measures them). It
leaves out the CUDA context, the allocator's fragments, and what is only there while activations are not: the target's own
working memory, and the flat gradients of ZeRO-1 and 2 in the optimizer's step.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..conversations import read_conversations
from ..drafter import Layout, MDFlashConfig
from ..drafter.checkpoint import as_dtype, read_config, unfilled
from ..drafter.model import SHARED_WITH_TARGET
from ..recipe import Recipe, StageSection, TargetSection, require
from .bootstrap import bootstrap_config
from .flops import count_text, drafter_part, layer_weights, widths
from .windows import Mix, stage_layouts

FP32 = 4
LAYERS_IN_FLIGHT = 3  # of a sharded target: the computing layer's weights and gathering buffer, the next one's buffer
GEOMETRY = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class Parameters:
    """Numbers of elements. target: tied tensors once; target_layers: of its decoder layers. drafter: the whole checkpoint.
    engine: what the engine holds, that is the drafter without the target's embedding and LM head. trained: those with a
    gradient."""

    target: int
    target_layers: int
    drafter: int
    engine: int
    trained: int


@dataclass(frozen=True)
class Zero:
    """What a DeepSpeed JSON says about memory; the defaults stand for plain data parallelism (all gradients in buckets).
    stage: 0..3. bucket: elements of one gradient bucket; buckets: how many. live: most elements that stage 3 gathers."""

    stage: int = 0
    offload_optimizer: bool = False
    offload_param: bool = False
    bucket: int = sys.maxsize
    buckets: int = 1
    live: int = 0

    @classmethod
    def read(cls, settings: StageSection) -> "Zero":
        """From the recipe's `deepspeed` setting; missing (and "auto") values take DeepSpeed's defaults."""
        if not settings.deepspeed:
            return cls()
        values = {key: value for key, value in settings.zero_optimization.items() if value not in (None, "auto")}
        stage = values.get("stage", 0)
        return cls(
            stage,
            values.get("offload_optimizer", {}).get("device", "none") != "none",
            values.get("offload_param", {}).get("device", "none") != "none",
            int(values.get("reduce_bucket_size", 5e8)),
            2 if values.get("overlap_comm") and stage in (1, 2) else 1,
            int(values.get("stage3_max_live_parameters", 1e9)),
        )


@dataclass(frozen=True)
class Plan:
    """One stage's needs. flops: of one text, by part (`flops.count`). memory: bytes on each GPU, by part. checkpointed: of
    which activations are, or would be, with activation checkpointing. host: bytes of CPU memory per rank that offloading takes.
    tflops: bf16 matmul TFLOP/s of one GPU, of which `share` is reached. texts: in the whole run; None when unknown."""

    parameters: Parameters
    flops: dict[str, int]
    memory: dict[str, int]
    checkpointed: int
    host: int
    length: int
    gpus: int
    tflops: float
    share: float
    texts: int | None

    @property
    def samples_per_s(self) -> float:
        """Texts a second over all GPUs."""
        return self.gpus * self.tflops * 1e12 * self.share / sum(self.flops.values())

    @property
    def hours(self) -> float | None:
        """Of the whole run, without evaluation and checkpoints."""
        return None if self.texts is None else self.texts / self.samples_per_s / 3600

    @property
    def peak(self) -> int:
        """Bytes on each GPU, all parts together."""
        return sum(self.memory.values())

    @property
    def checkpointed_peak(self) -> int:
        """The same with activation checkpointing."""
        return self.peak - self.memory["activations"] + self.checkpointed


def make_plan(
    recipe: Recipe,
    target: PretrainedConfig,
    gpus: int = 1,
    tflops: float | None = None,
    share: float = 0.45,
    length: int | None = None,
    texts: int | None = None,
) -> Plan:
    """Plan the recipe's stage for a target of this config.

    tflops: of one GPU; None measures. share: of it that a step reaches. length: tokens of a mean text for the FLOPs, at
    most `max_length` (the default), which memory is planned for. texts: training texts in an epoch; None takes the
    answers, or data.limit. Raises ValueError for a value out of range, a target that the count does not describe, or no
    tflops where there is no GPU.
    """
    settings = recipe.settings()
    missing = [name for name in GEOMETRY if not isinstance(getattr(target, name, None), int)]
    require(
        not missing, "the target's config", target.model_type, f"it lacks {', '.join(missing)}: name a dense decoder's"
    )
    length = settings.max_length if length is None else length
    require(gpus > 0, "gpus", gpus, "use a positive integer")
    require(0 < share <= 1, "matmul_share", share, "use a share of the matmul rate in (0, 1]")
    require(tflops is None or tflops > 0, "tflops", tflops, "use a positive number")
    require(0 < length <= settings.max_length, "length", length, f"use 1..max_length = {settings.max_length}")
    require(texts is None or texts > 0, "texts", texts, "use a positive integer")
    per_step = settings.micro_batch_size * gpus
    require(
        settings.global_batch_size % per_step == 0, "global_batch_size", settings.global_batch_size,
        f"must be a multiple of micro_batch_size * gpus = {per_step}; change one of them",
    )  # fmt: skip
    drafter = drafter_config(recipe, target)
    drafter.check_taps("in_flight_taps", *settings.in_flight_taps)
    layouts = stage_layouts(recipe, drafter.block_size)
    parameters = count_parameters(target, drafter, recipe.frozen_heads)
    kept, checkpointed = activations(drafter, layouts, settings)
    state, host = optimizer_memory(parameters, settings, gpus)
    memory = target_memory(parameters, target.num_hidden_layers, recipe.target, gpus) | state
    memory["bf16 autocast copies"] = 2 * parameters.trained if settings.bf16 else 0
    memory |= step_memory(drafter, layouts, settings, as_dtype(recipe.target.dtype).itemsize)
    memory["activations"] = checkpointed if settings.activation_checkpointing else kept
    flops = count_text(
        target, drafter, layouts, length, [settings.starts_per_text] * len(layouts), recipe.stage, Mix.of(settings).in_flight,
        settings.spine_loss > 0, settings.train_head,
    )  # fmt: skip
    return Plan(
        parameters, flops, memory, checkpointed, host, length, gpus, measured_tflops() if tflops is None else tflops, share,
        texts_of_run(recipe, texts),
    )  # fmt: skip


def target_config(recipe: Recipe, file: str | None = None) -> PretrainedConfig:
    """The target's config: from `file` (a config.json, or a folder), or else from the recipe's target (folder, or hub)."""
    section, source = recipe.target, file or recipe.target.path
    own = {} if file else {"revision": section.revision}
    own |= {"gguf_file": section.gguf_file} if section.gguf_file and not file else {}
    if file and not Path(file).exists():
        raise FileNotFoundError(f"--target_config {file}: no such file; name the target's config.json")
    try:
        return AutoConfig.from_pretrained(source, **own)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} gives no config of the target ({' '.join(str(error).split())[:200]}): name its folder, or pass its "
            "config.json with --target_config"
        ) from error


def drafter_config(recipe: Recipe, target: PretrainedConfig) -> MDFlashConfig:
    """The drafter's config: the base checkpoint's where its folder is here, or else what the recipe's drafter section
    describes. Nothing is downloaded. Raises ValueError when it was made for another target."""
    base = Path(recipe.base_drafter)
    if recipe.stage == "mdflash" and (base / "config.json").is_file():
        config = read_config(base)
    else:
        config = bootstrap_config(target, recipe.target.dtype, recipe.drafter, recipe.stage)
    for name, theirs in (
        ("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size), ("num_target_layers", target.num_hidden_layers)
    ):  # fmt: skip
        ours = getattr(config, name)
        require(ours == theirs, f"the drafter's {name}", ours, f"the target has {theirs}; name the matching pair")
    return config


def count_parameters(target: PretrainedConfig, drafter: MDFlashConfig, frozen_heads: Sequence[str]) -> Parameters:
    """Exact numbers, from models without storage. Raises ValueError when `flops.layer_weights` does not describe the target
    (mixture of experts, MLP without a gate, ..)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target)
    linear = [module for module in model.base_model.modules() if isinstance(module, nn.Linear)]
    found, formula = sum(m.weight.numel() for m in linear), layer_weights(target) * target.num_hidden_layers
    require(
        found == formula, "model_type", target.model_type,
        f"its layers hold {found} matrix weights, a decoder with q, k, v, o and a gated MLP {formula}: use such a target",
    )  # fmt: skip
    sizes = {
        name: (parameter.numel(), parameter.requires_grad)
        for name, parameter in unfilled(drafter).freeze(frozen_heads).named_parameters()
    }
    return Parameters(
        target=sum(parameter.numel() for parameter in model.parameters()),
        target_layers=sum(parameter.numel() for parameter in model.base_model.layers.parameters()),
        drafter=sum(size for size, _ in sizes.values()),
        engine=sum(size for name, (size, _) in sizes.items() if not name.startswith(SHARED_WITH_TARGET)),
        trained=sum(size for size, trained in sizes.values() if trained),
    )


def target_memory(parameters: Parameters, layers: int, section: TargetSection, gpus: int) -> dict[str, int]:
    """Bytes of the target on each GPU, by part: all of it, or with `shard` a share of its layers and those of the moment."""
    size, sharded = as_dtype(section.dtype).itemsize, parameters.target_layers if section.shard and gpus > 1 else 0
    return {
        "target weights": (parameters.target - sharded + math.ceil(sharded / gpus)) * size,
        "target: layers gathered": LAYERS_IN_FLIGHT * math.ceil(sharded / layers) * size,
    }


def optimizer_memory(parameters: Parameters, settings: StageSection, gpus: int) -> tuple[dict[str, int], int]:
    """Bytes on each GPU of everything that has a parameter's size, by part, and bytes of CPU memory per rank.

    ZeRO-1 and 2 step on a copy of a rank's partition of the fp32 parameters. ZeRO-1 keeps all gradients until the step,
    ZeRO-2 its partition, and this micro-batch's beside the accumulated. ZeRO-3 partitions the parameters themselves.
    Offloading moves partitions to the CPU, with the staging copies that DeepSpeed makes there.
    """
    zero, trained = Zero.read(settings), parameters.trained
    sharded, flat = zero.stage in (1, 2, 3), zero.stage in (1, 2)
    own, held = math.ceil(trained / gpus), math.ceil(parameters.engine / gpus)  # one rank's partitions
    accumulating = settings.global_batch_size > settings.micro_batch_size * gpus
    elements = {
        "drafter parameters, fp32": held if zero.stage == 3 else parameters.engine,
        "ZeRO-3: gathered, at most": min(parameters.engine, zero.live) if zero.stage == 3 and gpus > 1 else 0,
        "ZeRO: fp32 partition": own if flat else 0,
        "gradients, fp32": own * (1 + (zero.stage == 2 and accumulating)) if zero.stage in (2, 3) else trained,
        "gradient buckets": zero.bucket * zero.buckets if sharded else min(trained, zero.bucket) if gpus > 1 else 0,
        "Adam state, fp32": 2 * (own if sharded else trained),
    }
    host = 0
    if zero.offload_optimizer and sharded:
        host = elements["Adam state, fp32"] + own * (2 + flat + (zero.stage == 2 and accumulating))
        elements |= {"ZeRO: fp32 partition": 0, "Adam state, fp32": 0}
        elements["gradients, fp32"] = trained if zero.stage == 1 else 0
    if zero.offload_param and zero.stage == 3:
        host += held
        elements |= {"drafter parameters, fp32": 0, "ZeRO-3: gathered, at most": min(parameters.engine, zero.live)}
    return {part: size * FP32 for part, size in elements.items()}, host * FP32


def step_memory(
    drafter: MDFlashConfig, layouts: Sequence[Layout], settings: StageSection, target_bytes: int
) -> dict[str, int]:
    """Bytes of the target's outputs and of the loss. Features and final states cover all positions of a micro-batch. A chunk
    of the loss holds two logit tensors, the drafter's (which its gradient overwrites) and the teacher's."""
    tokens = settings.micro_batch_size * settings.max_length
    labels = settings.micro_batch_size * settings.starts_per_text * sum(len(x.branches) * x.d for x in layouts)
    width = (len(drafter.target_layer_ids) + 1) * drafter.hidden_size
    compute = 2 if settings.bf16 else FP32
    return {
        "features, final states": tokens * width * target_bytes,
        "loss chunk": 2 * min(settings.loss_rows, labels) * drafter.vocab_size * compute,
    }


def activations(drafter: MDFlashConfig, layouts: Sequence[Layout], settings: StageSection) -> tuple[int, int]:
    """Bytes that the drafter's forward keeps for backward: all layers', and with every layer checkpointed (each layer's
    input, the context's projections, one layer in full).

    Under autocast the residual stream and the norms are fp32, every matrix keeps a bf16 cast of its own input.
    """
    C, mlp, (q, kv) = drafter.hidden_size, drafter.intermediate_size, widths(drafter)
    w, casts = (2, (3, 2)) if settings.bf16 else (FP32, (1, 1))
    norms = 4 * FP32 * C  # two norms: input, normalised input
    row = norms + sum(casts) * w * C + (FP32 + 3 * w) * q + (FP32 + 3 * w) * kv + 4 * w * mlp
    place = (FP32 + 3 * w) * kv + (2 * w * C if settings.bf16 else 0)  # a context position in one layer
    once = len(drafter.target_layer_ids) * w * C + 2 * FP32 * C + w * C  # fc's input, hidden_norm's, its output
    trees = settings.micro_batch_size * settings.starts_per_text  # of each layout
    flying = trees * sum(layout.spine for layout in layouts) if any(settings.in_flight_taps) else 0
    tokens = settings.micro_batch_size * settings.max_length + flying
    rows = trees * sum(layout.rows for layout in layouts)
    layers, final_norm = drafter.num_hidden_layers, rows * 2 * FP32 * C
    outside = tokens * (once + layers * place) + final_norm
    return outside + layers * rows * row, outside + rows * (layers * FP32 * C + row)


def measured_tflops(size: int = 8192, repeats: int = 40) -> float:
    """bf16 matmul TFLOP/s of the current GPU over `repeats` square products. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("no GPU to measure a matmul rate on: give one GPU's bf16 rate with --tflops X")
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for repeat in range(5 + repeats):
        if repeat == 5:  # warm by now
            began.record()
        a @ b
    ended.record()
    ended.synchronize()
    return repeats * 2 * size**3 / began.elapsed_time(ended) / 1e9


def texts_of_run(recipe: Recipe, texts: int | None) -> int | None:
    """Texts of all optimizer steps, as `training_arguments` counts them: the last global batch of an epoch is filled up."""
    settings, data = recipe.settings(), recipe.data
    batch = settings.global_batch_size
    if settings.max_steps:
        return settings.max_steps * batch
    if texts is None and recipe.answers_file.is_file():
        texts = len(read_conversations(recipe.answers_file)) - data.held_out
    elif texts is None and data.limit:
        texts = data.limit * len(data.temperatures) - data.held_out
    return None if texts is None else math.ceil(math.ceil(max(texts, 0) / batch) * settings.epochs) * batch


def show(plan: Plan, console: Console) -> None:
    """Print the plan as tables."""
    p, whole, own = plan.parameters, sum(plan.flops.values()), drafter_part(plan.flops)
    console.print(
        f"parameters: target {short(p.target)}; drafter {short(p.drafter)}, of which {short(p.trained)} train, "
        f"{short(p.engine - p.trained)} are frozen and {short(p.drafter - p.engine)} are lent by the target",
        soft_wrap=True,
    )
    parts = {part.replace("_", " "): value for part, value in plan.flops.items()}
    rest = {"drafter's own part": own, "all": whole}
    console.print(table(f"matmul FLOPs of a text of {plan.length} tokens", "FLOP", parts, rest))
    rest = {"all": plan.peak}
    rest |= {"all, activations checkpointed": plan.checkpointed_peak} if plan.checkpointed_peak < plan.peak else {}
    rest |= {"CPU memory of each rank": plan.host} if plan.host else {}
    console.print(table("memory of each GPU", "B", plan.memory, rest))
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        console.print(f"{card.name}: {card.total_memory / 1e9:.0f} GB")
    hours = "hours unknown (give --texts)" if plan.hours is None else f"{plan.texts} texts in {plan.hours:.3g} hours"
    console.print(
        f"rate: {plan.gpus} GPU x {plan.tflops:.4g} TFLOP/s x {plan.share:g} = {plan.samples_per_s:.3g} samples/s, "
        f"{plan.samples_per_s * plan.length:.0f} tokens/s; {hours}",
        soft_wrap=True,
    )


def table(title: str, unit: str, parts: dict[str, int], rest: dict[str, int]) -> Table:
    """Part, value, share of all parts; then sums, by the same decimal prefix. Empty parts are left out."""
    whole = sum(parts.values())
    factor, prefix = decimal_prefix(whole)
    shown = Table(title=title, title_justify="left")
    shown.add_column("part")
    shown.add_column(prefix + unit, justify="right")
    shown.add_column("share", justify="right")
    for part, value in parts.items():
        if value:
            shown.add_row(part, f"{value / factor:.2f}", f"{value / whole:.1%}")
    shown.add_section()
    for part, value in rest.items():
        shown.add_row(part, f"{value / factor:.2f}", f"{value / whole:.1%}")
    return shown


def short(number: int) -> str:
    """As in 8.19 B or 43.42 k."""
    factor, prefix = decimal_prefix(number)
    return f"{number / factor:.2f} {prefix.replace('G', 'B')}".rstrip()


def decimal_prefix(number: float) -> tuple[float, str]:
    """The largest of 1, k, M, G, T that leaves a number of at least 1."""
    return next((pair for pair in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= pair[0]), (1.0, ""))
