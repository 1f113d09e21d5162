"""Runs recipes/train_mdflash.py and lets one accident happen: `accident.py KIND STEP RANK RECORD --config ..`.

KIND mid-save or mid-step kills the process (SIGKILL) in the middle of a save or of a backward pass; nan spoils a gradient;
none only records. RECORD: a JSONL of (step, hash of a text and its windows) as each rank trains them.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "recipes")]

import torch
import train_mdflash
from transformers import Trainer

from mdflash.training import MDFlashTrainer

kind, step, rank, record = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
ours = os.environ.get("RANK", "0") == rank
save_optimizer, get_batches, training_step = (
    Trainer._save_optimizer_and_scheduler, MDFlashTrainer.get_batch_samples, MDFlashTrainer.training_step
)  # fmt: skip


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_save(self, output_dir):
    """The weights are written, the optimizer's state is not."""
    if ours and kind == "mid-save" and self.state.global_step == step:
        kill()
    save_optimizer(self, output_dir)


def watched_batches(self, *args):
    """Note every text (without padding) with its starts."""
    batches, items = get_batches(self, *args)
    for batch in batches:
        for ids, start, weight in zip(batch["ids"], batch["start"], batch["weight"], strict=True):
            text = (ids.tolist(), start[weight.view(len(start), -1).sum(1) > 0].tolist())
            text = (str(text[0]).rstrip("], 0"), text[1])
            line = json.dumps([self.state.global_step + 1, hashlib.sha256(str(text).encode()).hexdigest()])
            with record.with_suffix(f".{self.args.process_index}").open("a") as file:
                file.write(line + "\n")
    return batches, items


def faulty_step(self, model, inputs, num_items_in_batch=None):
    """Dies in the middle of the backward pass, or spoils it from one projection on."""
    if ours and self.state.global_step + 1 == step and kind in ("mid-step", "nan"):
        spoilt = (lambda grad: kill()) if kind == "mid-step" else (lambda grad: grad * float("nan"))
        projection = self._module.drafter.layers[0].mlp.up_proj
        projection.register_forward_hook(lambda module, inputs, output: output.register_hook(spoilt) and None)
    return training_step(self, model, inputs, num_items_in_batch)


Trainer._save_optimizer_and_scheduler = half_save
MDFlashTrainer.get_batch_samples = watched_batches
MDFlashTrainer.training_step = faulty_step
torch.set_num_threads(1)
train_mdflash.main(sys.argv[5:])
