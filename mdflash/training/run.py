"""A stage's folder: who owns it, where it resumes, what it records when finished."""

import hashlib
import json
import math
import os
import uuid
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from ..recipe import Recipe, StageSection, require
from .checkpoints import newest_whole, sweep, universal, write_whole

SETTINGS, FINISHED = "stage.json", "training.json"

# What may change between a run and its resumption: none of it touches the samples, the windows or the arithmetic.
FREE = {
    "activation_checkpointing", "eval_requests", "eval_steps", "logging_steps", "loss_rows", "micro_batch_size", "packing",
    "report_to", "save_steps", "save_total_limit",
}  # fmt: skip
FREE_OF_TARGET = {"attn_implementation", "shard"}


def claim(recipe: Recipe) -> Path | None:
    """The stage's folder, or None when it already holds this very run, finished.

    Raises ValueError when it holds a run with other settings, naming each difference.
    """
    folder = recipe.stage_dir()
    ours = binding_settings(recipe)
    file = folder / SETTINGS
    if file.is_file():
        theirs = json.loads(file.read_text())
        theirs = asdict(StageSection()) | theirs  # a run older than a setting had what is its default now
        differing = [
            f"{key} {theirs.get(key)!r} there, {value!r} here"
            for key, value in ours.items()
            if theirs.get(key) != value
        ]
        if differing:
            raise ValueError(
                f"{folder} holds a run with other settings ({'; '.join(differing)}): delete that folder or give the recipe "
                "another name"
            )
    if (folder / FINISHED).is_file():
        return None
    return folder


def record_settings(recipe: Recipe, folder: Path) -> None:
    """Write what later calls compare with (rank 0, before the first step)."""
    write_whole(folder / SETTINGS, json.dumps(binding_settings(recipe), indent=2) + "\n")


def binding_settings(recipe: Recipe) -> dict:
    """The settings that define a run."""
    settings = {key: value for key, value in asdict(recipe.settings()).items() if key not in FREE}
    settings |= {f"target.{key}": value for key, value in asdict(recipe.target).items() if key not in FREE_OF_TARGET}
    settings |= {f"data.{key}": value for key, value in asdict(recipe.data).items() if key != "batch_size"}
    drafter = {"base": recipe.base_drafter} if recipe.stage == "mdflash" else asdict(recipe.drafter)
    settings |= {f"drafter.{key}": value for key, value in drafter.items()}
    inputs = {"answers": recipe.answers_file}
    if recipe.stage == "mdflash":
        inputs["base drafter"] = Path(recipe.base_drafter) / "model.safetensors"
    return settings | {f"{name} sha256": file_hash(file) for name, file in inputs.items() if file.is_file()}


def file_hash(file: Path) -> str:
    """sha256 of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def resume_point(folder: Path, accelerator: Accelerator) -> str | None:
    """The checkpoint to resume from, or None (call on all ranks, before the engine exists). Rank 0 cleans up, chooses
    and, when the number of ranks has changed, converts; the others take its word."""
    found = [None, False]
    if accelerator.is_main_process:
        sweep(folder)
        checkpoint = newest_whole(folder)
        if checkpoint:
            found = [str(checkpoint), universal(checkpoint, accelerator.num_processes)]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    checkpoint, as_universal = found
    if as_universal:
        accelerator.state.deepspeed_plugin.deepspeed_config.setdefault("checkpoint", {})["load_universal"] = True
    return checkpoint


def world_size() -> int:
    """Ranks of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def training_arguments(settings: StageSection, folder: Path, texts: int, name: str) -> TrainingArguments:
    """The stage's settings as Hugging Face TrainingArguments. texts: training texts in an epoch.

    Raises ValueError when the global batch is not a whole number of micro-batches over the ranks.
    """
    per_step = settings.micro_batch_size * world_size()
    require(
        settings.global_batch_size % per_step == 0, "global_batch_size", settings.global_batch_size,
        f"must be a multiple of micro_batch_size * ranks = {per_step}; change one of them",
    )  # fmt: skip
    steps = settings.max_steps or math.ceil(math.ceil(texts / settings.global_batch_size) * settings.epochs)
    arguments = TrainingArguments(
        output_dir=str(folder),
        run_name=name,
        per_device_train_batch_size=settings.micro_batch_size,
        per_device_eval_batch_size=settings.micro_batch_size,
        gradient_accumulation_steps=settings.global_batch_size // per_step,
        max_steps=steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(settings.warmup_ratio * steps),
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        deepspeed=settings.deepspeed,
        eval_strategy="steps" if settings.eval_steps else "no",
        eval_steps=settings.eval_steps or None,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=settings.save_total_limit,
        logging_steps=settings.logging_steps,
        logging_nan_inf_filter=False,
        report_to=settings.report_to,
        seed=settings.seed,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        dataloader_num_workers=4 if torch.cuda.is_available() else 0,
        dataloader_persistent_workers=torch.cuda.is_available(),
        disable_tqdm=False,
    )
    arguments._n_gpu = min(
        1, arguments.n_gpu
    )  # a process trains on one GPU: DataParallel, HF's choice for several, is no rank
    return arguments


def join_wandb_run(folder: Path, settings: StageSection) -> None:
    """One wandb run across resumes: its id lives in the stage's folder. WANDB_MODE=offline or disabled works as usual."""
    if settings.report_to != "wandb" or os.environ.get("RANK", "0") != "0":
        return
    file = folder / "wandb_run_id"
    if not file.is_file():
        write_whole(file, uuid.uuid4().hex)
    os.environ.setdefault("WANDB_PROJECT", "mdflash")
    os.environ["WANDB_RUN_ID"] = file.read_text()
    os.environ["WANDB_RESUME"] = "allow"
