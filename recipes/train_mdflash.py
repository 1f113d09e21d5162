"""Train a stage: `deepspeed recipes/train_mdflash.py --config recipes/NAME.yaml [--stage dspark] [--key value]`.

Stage mdflash (the default) finetunes the backbone of a DSpark drafter; dspark (or dflash) bootstraps one from scratch.
Stages resume where they stopped and are skipped when finished.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

import torch

from mdflash import MDFlashModel, Target, decode, load_drafter, load_target
from mdflash.chat import Chat, texts_of
from mdflash.conversations import read_conversations, split_held_out
from mdflash.drafter import Layout
from mdflash.drafter.tree import anchor_counts
from mdflash.recipe import BEYOND, Recipe, StageSection, read_recipe, require, resolved
from mdflash.training import STAGE_WEIGHTS, DrafterForTraining, MDFlashTrainer, Mix, WindowDataset, bootstrap
from mdflash.training.checkpoints import write_whole
from mdflash.training.frozen import check_unchanged, frozen_part, hashes
from mdflash.training.lora import add_adapters
from mdflash.training.run import (
    FINISHED,
    claim,
    join_wandb_run,
    record_settings,
    resume_point,
    training_arguments,
    world_size,
)
from mdflash.training.windows import stage_layouts


def main(args: list[str] | None = None) -> None:
    """Read the recipe, train its stage, prove that frozen tensors stayed frozen, write the drafter."""
    recipe, _ = read_recipe(args, __doc__.splitlines()[0], extra=launcher_arguments)
    try:
        run(recipe)
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


def launcher_arguments(parser) -> None:
    """What the deepspeed launcher adds to the command line of every rank."""
    parser.add_argument("--local_rank", type=int, default=-1)


def run(recipe: Recipe) -> None:
    """One stage, from recipe to finished drafter folder."""
    if recipe.stage != "mdflash" and recipe.drafter.base:
        print(f"drafter.base names {recipe.drafter.base}: there is nothing to bootstrap")
        return
    settings, folder, stage = recipe.settings(), claim(recipe), recipe.stage
    device, _ = training_device(), settings.zero_stage  # what can be wrong before anything is loaded
    rule = "FlexAttention trains on GPUs alone; use auto or dense"
    require(settings.attention != "flex" or device.type == "cuda", "attention", settings.attention, rule)
    if folder is None:
        print(f"{recipe.stage_dir()} already holds this run, finished: nothing to do")
        return
    conversations = split_held_out(read_conversations(recipe.answers_file), recipe.data.held_out)
    target = load_frozen_target(recipe, device)
    drafter, layouts = starting_point(recipe, target)
    dtype = drafter.dtype
    frozen = partial(frozen_part, heads=recipe.frozen_heads, lora=settings.lora)
    frozen_before = hashes(frozen(drafter.state_dict()).items())
    train, held_out, prompts = datasets(recipe, target, layouts, conversations)
    target_before = hashes(target.model.named_parameters())

    drafter.cast(torch.float32).freeze(recipe.frozen_heads).attention = settings.attention
    if settings.lora:
        add_adapters(drafter, settings.lora, settings.seed)
    module = DrafterForTraining(
        drafter,
        target,
        layouts,
        STAGE_WEIGHTS[stage],
        settings.loss_rows,
        target.dtype == torch.bfloat16 or (settings.bf16 and device.type == "cuda"),
    )
    drafter.activation_checkpointing = settings.activation_checkpointing
    if compiles(settings, device):
        drafter.compile_layers()
        if not target.sharded:
            target.compile_layers()
    join_wandb_run(folder, settings)
    arguments = training_arguments(settings, folder, len(train), f"{recipe.name}-{stage}")
    trainer = MDFlashTrainer(module, arguments, train, held_out, held_out_acceptance(recipe, target, prompts))
    if trainer.is_world_process_zero():
        record_settings(recipe, folder)
    began = time.time()
    trainer.train(resume_from_checkpoint=resume_point(folder, trainer.accelerator))
    seconds = time.time() - began
    metrics = trainer.evaluate()
    trainer.save_final(folder, dtype)
    check_unchanged(target_before, hashes(target.model.named_parameters()), "target")
    if trainer.is_world_process_zero():
        written = load_drafter(folder)
        check_unchanged(frozen_before, hashes(frozen(written.state_dict()).items()), "drafter")
        record = {
            "stage": stage, "recipe": resolved(recipe), "layout_anchor_counts": anchor_counts(layouts), "metrics": metrics,
            "steps": trainer.state.global_step, "seconds": round(seconds, 1), "texts": len(train),
            "ranks": arguments.world_size, "device": device_name(device), "frozen_sha256": frozen_before,
            "loss_curve": [entry for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry],
        }  # fmt: skip
        write_whole(folder / FINISHED, json.dumps(record, indent=1) + "\n")
        print(f"{folder}: {stage} drafter after {record['steps']} steps, {seconds:.0f} s; " + figures(metrics))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def training_device() -> torch.device:
    """This rank's device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def compiles(settings: StageSection, device: torch.device) -> bool:
    """Whether to compile the layers. ZeRO-3 gathers weights by hooks inside them, which a graph would not see."""
    if settings.compile is not None:
        return settings.compile
    return device.type == "cuda" and settings.zero_stage < 3


def load_frozen_target(recipe: Recipe, device: torch.device) -> Target:
    """The recipe's target on the training device (its layers spread over the ranks' if it says so)."""
    section, ranks = recipe.target, world_size()
    gguf = {"gguf_file": section.gguf_file} if section.gguf_file else {}
    over = ranks if section.shard else 1
    return load_target(section.path, section.dtype, device, section.revision, section.attn_implementation, over, **gguf)


def starting_point(recipe: Recipe, target: Target) -> tuple[MDFlashModel, tuple[Layout, ...]]:
    """The drafter before its first step, and the windows its stage trains."""
    if recipe.stage == "mdflash":
        revision = recipe.drafter.base_revision if recipe.drafter.base else None
        drafter = load_drafter(recipe.base_drafter, device=target.device, revision=revision)
        drafter.config.mdflash_config = mdflash_block(recipe, target, drafter)
        drafter.config.check_taps("mdflash.in_flight_taps", *recipe.mdflash.in_flight_taps)
    else:
        drafter = bootstrap(target, recipe.drafter, recipe.stage, recipe.dspark.seed).cast(target.dtype)
    return drafter, stage_layouts(recipe, drafter.draft_length)


def mdflash_block(recipe: Recipe, target: Target, drafter: MDFlashModel) -> dict:
    """What an M-DFlash checkpoint adds to its config.json."""
    d = drafter.draft_length
    manifest = recipe.answers_file.parent / "manifest.json"
    data = json.loads(manifest.read_text()) if manifest.is_file() else {}
    return {
        "version": 1,
        "draft_length": d,
        "anchor_counts": anchor_counts(stage_layouts(recipe, d)),
        "beyond_the_paper": {name: getattr(recipe.mdflash, name) for name in BEYOND},
        "base_checkpoint": recipe.base_drafter,
        "base_revision": recipe.drafter.base_revision,
        "target": recipe.target.path,
        "target_revision": recipe.target.revision,
        "data_sha256": data.get("answers_sha256"),
        "chat_template_sha256": Chat(target.tokenizer, target.stop_ids, recipe.target.thinking).template_hash,
        "thinking": recipe.target.thinking,
    }


def datasets(
    recipe: Recipe, target: Target, layouts: Sequence[Layout], conversations: tuple[list[dict], list[dict]]
) -> tuple[WindowDataset, WindowDataset, list[list[int]]]:
    """Training and held-out windows, and held-out prompts for the acceptance length."""
    settings = recipe.settings()
    chat = Chat(target.tokenizer, target.stop_ids, recipe.target.thinking)
    mix = Mix.of(settings)
    parts = []
    if settings.packing:
        target.check_packing()
    # held-out texts stay padded: evaluation attends densely
    for part, pack_to in zip(conversations, (settings.max_length if settings.packing else 0, 0), strict=True):
        samples, empty = texts_of(chat, part, settings.max_length)
        print(f"{len(samples)} texts, {sum(s.supervised for s in samples)} supervised tokens, {empty} without any")
        parts.append(WindowDataset(samples, layouts, settings.starts_per_text, settings.seed, pack_to, mix))
    turns = (takewhile(lambda message: message["role"] != "assistant", row["messages"]) for row in conversations[1])
    prompts = [chat.prompt(list(messages)) for messages in turns]
    return parts[0], parts[1], prompts[: settings.eval_requests]


def held_out_acceptance(recipe: Recipe, target: Target, prompts: list[list[int]]):
    """The callback that joins training and decoding: acceptance length of the drafter as it stands."""
    if not prompts:
        return None
    if target.sharded:
        print("target.shard: no held-out acceptance length, which rank 0 would decode alone; the held-out loss stays")
        return None
    ours = "dspark" if recipe.mdflash.windows == "serial" else "dpara"
    method = {"mdflash": ours}.get(recipe.stage, recipe.stage)
    budget = min(128, recipe.data.max_new_tokens)

    def acceptance(drafter: MDFlashModel) -> dict[str, float]:
        results = decode(target, drafter, prompts, method, budget, batch_size=len(prompts), runner="eager")
        rounds = [r for result in results for r in result.rounds]
        return {"tau": sum(r.committed for r in rounds) / max(1, len(rounds))}

    return acceptance


def device_name(device: torch.device) -> str:
    """For the record."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def figures(metrics: dict[str, float]) -> str:
    """Short text of the held-out figures."""
    return ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in metrics.items())


if __name__ == "__main__":
    main()
