"""One YAML per target describes the whole pipeline; every command reads its own section. `--key value` overrides."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace

Stage = Literal["dspark", "dflash", "mdflash"]


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise ValueError saying value, rule and remedy."""
    if not holds:
        raise ValueError(f"{name}={value!r}: {rule}")


@dataclass
class TargetSection:
    """The frozen target.

    Args:
        path: folder or hub id.
        revision: hub revision to pin.
        gguf_file: name of a GGUF file inside `path`, dequantised on load.
        dtype: parameter and activation type of target and drafter when answering and decoding.
        attn_implementation: of the training pass; "auto" takes flash-attn where it is importable, else SDPA.
        shard: training on several ranks: each keeps a share of every decoder layer, for a target that its card does not fit.
        thinking: whether the chat template's thinking mode is on; recorded in data and checkpoints.
    """

    path: str = ""
    revision: str | None = None
    gguf_file: str | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "auto"
    shard: bool = False
    thinking: bool = False

    def __post_init__(self):
        require(self.dtype in ("float32", "bfloat16", "float16"), "target.dtype", self.dtype, "use float32 or bfloat16")


@dataclass
class DataSection:
    """Prompts and the target-written answers.

    Args:
        prompts: JSONL file, folder of JSONL files ({"id","turns"}), or hub dataset id.
        prompts_revision: hub revision to pin.
        prompts_split: split of a hub dataset.
        limit: first prompts used; 0 takes all.
        temperatures: one answer per prompt and temperature; 0 is greedy.
        max_new_tokens: length of an answer.
        batch_size: prompts answered at once.
        held_out: conversations kept out of training, for the held-out loss.
        seed: seed of sampled answers.
    """

    prompts: str = ""
    prompts_revision: str | None = None
    prompts_split: str = "train"
    limit: int = 0
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    max_new_tokens: int = 512
    batch_size: int = 64
    held_out: int = 64
    seed: int = 0

    def __post_init__(self):
        require(self.max_new_tokens > 0, "data.max_new_tokens", self.max_new_tokens, "use a positive integer")
        require(self.batch_size > 0, "data.batch_size", self.batch_size, "use a positive integer")
        require(self.held_out > 0, "data.held_out", self.held_out, "keep at least one conversation out of training")
        require(bool(self.temperatures), "data.temperatures", self.temperatures, "name at least one temperature")


@dataclass
class DrafterSection:
    """Geometry of a drafter bootstrapped from scratch; widths not named here are the target's.

    Args:
        base: hub id or folder of a published DSpark drafter; null bootstraps one with `--stage dspark`.
        base_revision: hub revision to pin.
        num_hidden_layers: backbone layers.
        target_layer_ids: taps (outputs of these target layers).
        block_size: draft length d.
        mask_token_id: a reserved or padded id.
        markov_rank: rank of the Markov head.
        markov_head_type: vanilla, gated or rnn.
        num_attention_heads: query heads; null takes the target's.
        num_key_value_heads: key/value heads; null takes the target's.
        intermediate_size: MLP width; null takes the target's.
    """

    base: str | None = None
    base_revision: str | None = None
    num_hidden_layers: int = 5
    target_layer_ids: list[int] = field(default_factory=list)
    block_size: int = 7
    mask_token_id: int | None = None
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


@dataclass
class LoraSection:
    """Adapters trained on the backbone in place of its weights; the finished drafter has them merged in.

    Args:
        r: rank of an adapter.
        alpha: an adapter adds alpha/r · B·A to its weight.
        targets: adapted linears, the same in every layer; `fc` is the features' projection.
    """

    r: int = 16
    alpha: float = 32.0
    targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))

    def __post_init__(self):
        require(self.r > 0, "lora.r", self.r, "use a positive integer")
        require(self.alpha > 0, "lora.alpha", self.alpha, "use a positive number, r or 2r say")
        others = [name for name in self.targets if name not in LORA_TARGETS]
        require(
            bool(self.targets) and not others, "lora.targets", others or self.targets,
            f"adapters go on the backbone's linears; embeddings and heads stay frozen: choose from {', '.join(LORA_TARGETS)}",
        )  # fmt: skip


# Settings of the mdflash stage in which a finetune may differ from the paper's, and the paper's values.
BEYOND = {
    "in_flight_taps": [0], "known_bonus": 0.0, "serial_windows": False, "spine_loss": 0.0, "train_head": False,
    "windows": "trees", "slot_decay": 4.0,
}  # fmt: skip
OF_EVERY_STAGE = {"slot_decay"}


@dataclass
class StageSection:
    """One training stage.

    Args:
        learning_rate: peak, after linear warm-up, before cosine decay to 0.
        epochs: passes over the answers (when max_steps is 0).
        max_steps: optimizer steps; 0 goes by epochs.
        global_batch_size: texts per optimizer step over all ranks and accumulation.
        micro_batch_size: texts per rank and forward.
        starts_per_text: starts p drawn in a text; each costs a whole tree (or one k=0 window in the dspark stage). With
            independent windows: starts drawn for every k.
        windows: layout of the mdflash stage: trees (the windows of one start, k = 1..d+1, share their anchors, as in
            decoding), independent (every window has its own start and anchors; as many for every k) or serial (k = 0 alone: a
            control that trains the DSpark drafter on, with nothing of M-DFlash).
        in_flight_taps: counts of the anchors' earliest taps that are in flight, one drawn for each text; [0] is the paper's
            M-DFlash, [0, 1, .., n] makes a drafter for every schedule.
        known_bonus: share of the mdflash stage's windows whose first slot carries the bonus token, for guessed bonuses.
        serial_windows: the mdflash stage keeps the serial mode alive by as many k = 0 windows as trees.
        spine_loss: weight of the spine's own predictions, which guess the bonus, beside a first slot's 1; 0 trains none.
        train_head: the mdflash stage trains the Markov head along with the backbone; the paper freezes it.
        slot_decay: slot i of a window weighs exp(-(i-1)/slot_decay) in the loss; the paper's is 4.
        packing: the texts of a micro-batch share rows of up to max_length tokens instead of being padded to the longest; none
            sees another, and loss and gradients stay the same. For FlexAttention: dense attention pays for every pair of texts.
        max_length: texts are cut at this many tokens.
        bf16: compute in bf16 under fp32 masters; false computes in fp32.
        attention: auto (FlexAttention on GPUs), flex or dense.
        compile: compile the layers of target and drafter (once for all lengths); null does on GPUs, except under ZeRO-3.
        loss_rows: label rows whose logits exist at once.
        activation_checkpointing: keep each drafter layer's input alone for backward, which computes the layer again.
        deepspeed: DeepSpeed JSON; null runs plain HF Trainer.
        eval_steps: steps between held-out evaluations; 0 evaluates at the end only.
        eval_requests: held-out prompts decoded for the held-out acceptance length; 0 skips it.
        save_steps: steps between checkpoints; 0 saves at the end only.
        save_total_limit: whole checkpoints kept, the newest.
        logging_steps: steps between log lines.
        report_to: wandb or none.
        seed: seed of weights, sample order and window draws.
        warmup_ratio: share of the steps spent warming up.
        lora: adapters {r, alpha, targets} to train instead of the full weights (mdflash stage only); null trains those.
    """

    learning_rate: float = 3e-5
    epochs: float = 1.0
    max_steps: int = 0
    global_batch_size: int = 128
    micro_batch_size: int = 1
    starts_per_text: int = 32
    windows: Literal["trees", "independent", "serial"] = "trees"
    in_flight_taps: list[int] = field(default_factory=lambda: [0])
    known_bonus: float = 0.0
    serial_windows: bool = False
    spine_loss: float = 0.0
    train_head: bool = False
    slot_decay: float = 4.0
    packing: bool = True
    max_length: int = 4096
    bf16: bool = True
    attention: Literal["auto", "flex", "dense"] = "auto"
    compile: bool | None = None
    loss_rows: int = 4096
    activation_checkpointing: bool = False
    deepspeed: str | None = "recipes/deepspeed/zero1.json"
    eval_steps: int = 0
    eval_requests: int = 16
    save_steps: int = 0
    save_total_limit: int = 2
    logging_steps: int = 10
    report_to: Literal["wandb", "none"] = "none"
    seed: int = 0
    warmup_ratio: float = 0.04
    lora: LoraSection | None = None

    def __post_init__(self):
        require(self.learning_rate >= 0, "learning_rate", self.learning_rate, "use a non-negative number")
        for name in ("global_batch_size", "micro_batch_size", "starts_per_text", "max_length", "loss_rows"):
            require(getattr(self, name) > 0, name, getattr(self, name), "use a positive integer")
        require(self.save_total_limit > 0, "save_total_limit", self.save_total_limit, "keep at least one checkpoint")
        require(self.max_steps >= 0, "max_steps", self.max_steps, "use 0 to go by epochs, or a positive integer")
        require(0 < self.epochs < math.inf, "epochs", self.epochs, "use a positive number")
        require(0 <= self.warmup_ratio < 1, "warmup_ratio", self.warmup_ratio, "use a share of the steps in [0, 1)")
        require(math.isfinite(self.learning_rate), "learning_rate", self.learning_rate, "use a finite number")
        require(self.logging_steps > 0, "logging_steps", self.logging_steps, "use a positive integer")
        taps = self.in_flight_taps
        rule = "name distinct counts of taps, 0 up to how many the drafter has"
        require(bool(taps) and len(set(taps)) == len(taps) and min(taps) >= 0, "in_flight_taps", taps, rule)
        require(0 <= self.known_bonus <= 1, "known_bonus", self.known_bonus, "use a share of the windows in [0, 1]")
        require(0 <= self.spine_loss < math.inf, "spine_loss", self.spine_loss, "use 0 for none, or a positive weight")
        require(0 < self.slot_decay < math.inf, "slot_decay", self.slot_decay, "use a positive number of slots")
        rule = "windows=serial has neither anchors nor an open bonus; leave it at"
        for name in ("in_flight_taps", "known_bonus", "serial_windows", "spine_loss"):
            value, off = getattr(self, name), BEYOND[name]
            require(self.windows != "serial" or value == off, name, value, f"{rule} {off}")
        rule = "adapters train the backbone alone; give up one of the two"
        require(not (self.lora and self.train_head), "train_head", self.train_head, rule)
        for name in ("eval_steps", "eval_requests", "save_steps"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "use 0 for never, or a positive integer")

    @property
    def zero_optimization(self) -> dict:
        """That part of the DeepSpeed JSON; empty without one. Raises ValueError when the file is missing or no JSON."""
        if not self.deepspeed:
            return {}
        remedy = "run from the checkout's root, or name a DeepSpeed JSON such as recipes/deepspeed/zero1.json"
        require(Path(self.deepspeed).is_file(), "deepspeed", self.deepspeed, f"no such file; {remedy}")
        try:
            return json.loads(Path(self.deepspeed).read_text()).get("zero_optimization", {})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"deepspeed={self.deepspeed!r} is no JSON object ({error}): {remedy}") from error

    @property
    def zero_stage(self) -> int:
        """The DeepSpeed JSON's ZeRO stage; 0 without one."""
        return self.zero_optimization.get("stage", 0)


@dataclass
class EvalSection:
    """The evaluation.

    Args:
        benchmarks: names of built-in benchmarks, or of JSONL files in `folder`.
        folder: folder of NAME.jsonl files ({"id","turns"}); null loads the built-in benchmarks from the hub.
        requests: first requests of each benchmark; 0 takes all.
        max_new_tokens: token budget of an answer.
        temperature: 0 is greedy.
        top_p: nucleus mass, applied to target and draft alike.
        top_k: tokens kept, applied to target and draft alike; 0 keeps all.
        batch_size: requests decoded at once.
        methods: autoregressive, dspark, dpara-untuned, dpara, dflash.
        devices: target's and drafter's device; null takes cuda:0,cuda:1, or the one GPU twice, or cpu,cpu.
        runner: eager (the reference), fast (fused weights, kernels, CUDA graphs), or auto: fast on GPUs where it fits.
        lm_head: DPara's LM head over all branches, the selected one, or auto.
        head_device: DPara's heads on the drafter's or the target's device.
        in_flight_taps: `dpara` drafts behind so many of the verify pass's taps, with their features; 0 is the paper's, auto
            measures it.
        bonus_guesses: bonuses that `dpara` guesses for every acceptance boundary; 0 is the paper's, auto measures it.
        guess_source: the guesses come from the tree's spine (a pass of its own before the tree) or from the last draft.
        dtype: null takes target.dtype.
        seed: seed of sampled answers and of the bootstrap.
        output: results folder; null is results/NAME.
    """

    benchmarks: list[str] = field(default_factory=list)
    folder: str | None = None
    requests: int = 80
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 1
    methods: list[str] = field(default_factory=lambda: ["autoregressive", "dspark", "dpara-untuned", "dpara"])
    devices: str | None = None
    runner: Literal["auto", "eager", "fast"] = "auto"
    lm_head: Literal["auto", "all", "selected"] = "auto"
    head_device: Literal["drafter", "target"] = "drafter"
    in_flight_taps: int | Literal["auto"] = 0
    bonus_guesses: int | Literal["auto"] = 0
    guess_source: Literal["spine", "draft"] = "spine"
    dtype: str | None = None
    seed: int = 0
    output: str | None = None

    @property
    def deployment(self) -> dict:
        """How `decode` lays itself out, by its arguments' names."""
        names = ("runner", "lm_head", "head_device", "in_flight_taps", "bonus_guesses", "guess_source")
        return {name: getattr(self, name) for name in names}


@dataclass
class Recipe:
    """The whole pipeline of one target.

    Args:
        name: names runs/NAME (answers, checkpoints) and results/NAME (evaluation).
        variant: another finetune of the same answers and DSpark drafter: runs/NAME/mdflash-VARIANT, results/NAME-VARIANT.
        stage: the training stage to run.
        target: the frozen target.
        data: prompts and answers.
        drafter: where the DSpark drafter comes from.
        dspark: bootstrap of a DSpark (or DFlash) drafter from scratch.
        mdflash: the M-DFlash finetune.
        eval: the evaluation.
    """

    name: str = ""
    variant: str = ""
    stage: Stage = "mdflash"
    target: TargetSection = field(default_factory=TargetSection)
    data: DataSection = field(default_factory=DataSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    dspark: StageSection = field(default_factory=lambda: StageSection(learning_rate=6e-4))
    mdflash: StageSection = field(default_factory=StageSection)
    eval: EvalSection = field(default_factory=EvalSection)

    def __post_init__(self):
        plain = bool(self.name) and "/" not in self.name and self.name not in (".", "..")
        require(plain, "name", self.name, "give the recipe a plain name")
        require("/" not in self.variant, "variant", self.variant, "use a plain name, or none")
        require(bool(self.target.path), "target.path", self.target.path, "name the target's folder or hub id")
        beyond = {name: getattr(self.dspark, name) for name in BEYOND.keys() - OF_EVERY_STAGE}
        beyond = {name: value for name, value in beyond.items() if value != BEYOND[name]}
        rule = "a bootstrap trains serial windows and its own heads; set it in mdflash"
        require(not beyond, f"dspark.{', '.join(beyond)}", list(beyond.values()), rule)
        rule = "a bootstrap starts from random weights, which adapters cannot train; set mdflash.lora, or null here"
        require(self.dspark.lora is None, "dspark.lora", self.dspark.lora, rule)

    @property
    def run_dir(self) -> Path:
        """runs/NAME."""
        return Path("runs") / self.name

    @property
    def answers_file(self) -> Path:
        """Target-written conversations, with manifest.json beside them."""
        return self.run_dir / "answers" / "answers.jsonl"

    @property
    def results_dir(self) -> Path:
        """eval.output, or results/NAME (NAME-VARIANT)."""
        return Path(self.eval.output or f"results/{self.name}{self.suffix}")

    def stage_dir(self, stage: Stage | None = None) -> Path:
        """The folder a stage writes its checkpoints and its finished drafter to."""
        stage = stage or self.stage
        return self.run_dir / (stage + (self.suffix if stage == "mdflash" else ""))

    @property
    def suffix(self) -> str:
        """What the variant adds to a folder's name."""
        return f"-{self.variant}" if self.variant else ""

    def settings(self) -> StageSection:
        """The running stage's section; a dflash bootstrap uses dspark's."""
        return self.mdflash if self.stage == "mdflash" else self.dspark

    @property
    def frozen_heads(self) -> tuple[str, ...]:
        """The drafter's heads that the running stage leaves as they are."""
        if self.stage != "mdflash":
            return ()
        return ("confidence_head",) if self.mdflash.train_head else ("markov_head", "confidence_head")

    @property
    def base_drafter(self) -> str:
        """The DSpark checkpoint that M-DFlash starts from: published, or the one bootstrapped here."""
        return self.drafter.base or str(self.stage_dir("dspark"))


def read_recipe(
    args: list[str] | None = None, description: str = "", extra: Callable[[ArgumentParser], None] | None = None
) -> tuple[Recipe, Namespace]:
    """Parse `--config recipe.yaml [--key value]`. `extra(parser)` adds a command's own arguments.

    Returns the recipe and the namespace of everything parsed. An unknown key in the file or on the command line ends the
    program with the key named.
    """
    parser = ArgumentParser(description=description, usage="%(prog)s --config RECIPE.yaml [--key value ...]")
    parser.add_argument("--config", action="config", help="a recipe YAML")
    parser.add_class_arguments(Recipe, nested_key=None)
    if extra:
        extra(parser)
    parsed = parser.parse_args(args)
    try:
        values = parser.instantiate(parsed)
        return Recipe(**{name: values[name] for name in Recipe.__dataclass_fields__}), values
    except ValueError as error:
        parser.error(str(error))


def resolved(recipe: Recipe) -> dict:
    """The recipe as plain data, for manifests and results."""
    return asdict(recipe)
