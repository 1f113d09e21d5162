"""The Hugging Face Trainer with this project's normalisation, sampler, held-out measures and checkpoints."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from ..drafter import MDFlashModel
from ..drafter.checkpoint import save_drafter, unfilled
from .checkpoints import ASIDE, publish
from .finite import LOSS, FiniteGuard
from .lora import load_adapters, merged, save_adapters
from .module import DrafterForTraining
from .windows import EpochSampler, WindowDataset, total_weight

PREFIX = "drafter."
Acceptance = Callable[[MDFlashModel], dict[str, float]]


class MDFlashTrainer(Trainer):
    """Trains `DrafterForTraining` on a `WindowDataset`.

    acceptance: called on rank 0 at every evaluation with a plain copy of the drafter; its figures join the held-out loss.
    Checkpoints hold the full contract in the training precision; `export_state` gives it at any ZeRO stage.
    """

    def __init__(
        self, module: DrafterForTraining, args: TrainingArguments, train: WindowDataset, held_out: WindowDataset,
        acceptance: Acceptance | None = None,
    ):  # fmt: skip
        super().__init__(module, args, data_collator=train.collate, train_dataset=train, eval_dataset=held_out)
        self.model_accepts_loss_kwargs = True  # the loss is already normalised over the whole accumulated batch
        self.acceptance = acceptance
        self.guard = FiniteGuard()
        self.add_callback(self.guard)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """This rank's share of Σ m w loss / Σ m w over the global batch; the engine averages over ranks."""
        loss = model(**inputs) * self.args.world_size / num_items_in_batch
        self.guard.see(LOSS, loss)
        return loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The accumulation's batches and their exact normaliser: Σ m_i w_i over ranks and accumulation."""
        batches = list(islice(epoch_iterator, num_batches))
        total = sum(map(total_weight, batches), torch.zeros(())).to(device)
        return batches, self.accelerator.reduce(total, "sum").clamp(min=1e-9)

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        args = self.args
        texts = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self.train_sampler = EpochSampler(len(self.train_dataset), texts, args.seed)
        return self.train_sampler

    def _init_training_state(self, *args, **kwargs):
        """A resumed run saves, logs and evaluates as often as its settings say, not as the checkpoint's did."""
        start = super()._init_training_state(*args, **kwargs)
        self.state.compute_steps(self.args, self.state.max_steps)
        return start

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        """ZeRO-3 hands one step counter of a universal checkpoint to all its groups, which would then each count it up."""
        super()._load_optimizer_and_scheduler(checkpoint)
        optimizer = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def _run_epoch(self, model, epoch, *args, **kwargs):
        """The base class's pass with two gaps of its resume closed."""
        if self.state.global_step >= self.state.max_steps:  # killed after the last step: not one more
            self.control.should_training_stop = True
            return
        self.train_sampler.set_epoch(epoch)  # resumed within an epoch, several ranks: the base class does not reach it
        super()._run_epoch(model, epoch, *args, **kwargs)

    def _get_output_dir(self, trial) -> str:
        """Where the base class writes checkpoints: aside, until they are whole."""
        return str(Path(super()._get_output_dir(trial)) / ASIDE)

    def _save_checkpoint(self, model, trial) -> None:
        """Written by all ranks, then sealed and renamed into place by rank 0."""
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            written = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
            publish(written, self.args.save_total_limit)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """Held-out texts in file order, the same windows every time."""
        size = self.args.per_device_eval_batch_size
        sampler = EpochSampler(len(self.eval_dataset), size * self.args.world_size, self.args.seed, shuffle=False)
        loader = DataLoader(self.eval_dataset, size, sampler=sampler, collate_fn=self.eval_dataset.collate)
        return self.accelerator.prepare(loader)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Held-out loss over all ranks, and the held-out acceptance length."""
        model = self.model_wrapped
        model.eval()
        sums = torch.zeros(2, device=self.args.device)
        for batch in self.get_eval_dataloader():
            inputs = self._prepare_inputs(batch)
            sums += torch.stack([model(**inputs), total_weight(inputs)])
        loss, weight = self.accelerator.reduce(sums, "sum").tolist()
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"held-out loss is {loss} at step {self.state.global_step}: lower the learning rate; nothing was saved"
            )
        metrics = {f"{metric_key_prefix}_loss": loss / max(weight, 1e-9)}
        if self.acceptance:
            state = self.export_state()
            if self.is_world_process_zero():
                figures = self.acceptance(self._plain_drafter(state))
                metrics |= {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
            self.accelerator.wait_for_everyone()
        model.train()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def export_state(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every tensor of the contract, gathered whatever the ZeRO stage (call on all ranks): trained (LoRA merged) and
        frozen ones in the training precision, embedding and LM head as the target holds them."""
        if state is None:
            state = self.accelerator.get_state_dict(self.model_wrapped) or {}
        state = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
        target = self._module._target[0]
        lent = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}
        state = merged(self._module.drafter, state)
        return state | {name: weight.detach() for name, weight in lent.items()}  # never the target's own Parameters

    def save_final(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the finished drafter in `dtype` (call on all ranks)."""
        state = self.export_state()
        if self.is_world_process_zero():
            config = self._module.drafter.config
            config.dtype = dtype
            save_drafter(folder, config, {name: tensor.to(dtype) for name, tensor in state.items()})
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir=None, state_dict=None) -> None:
        """One checkpoint's weights, as a drafter folder; with LoRA the adapters lie beside the merged weights."""
        if self.args.should_save:
            state = state_dict if state_dict is not None else self.model.state_dict()
            save_drafter(output_dir, self._module.drafter.config, self.export_state(state))
            save_adapters(output_dir, state)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        """Weights back from such a folder (without DeepSpeed, which loads its own)."""
        if load_adapters(resume_from_checkpoint, self.model):
            return
        stored = load_file(Path(resume_from_checkpoint) / "model.safetensors")
        own = self.model.state_dict()
        self.model.load_state_dict({name: stored[name.removeprefix(PREFIX)] for name in own})

    def _plain_drafter(self, state: dict[str, Tensor]) -> MDFlashModel:
        target = self._module._target[0]
        drafter = unfilled(self._module.drafter.config)
        drafter.load_state_dict(state, assign=True)
        return drafter.cast(target.dtype, target.device).eval()

    @property
    def _module(self) -> DrafterForTraining:
        return self.accelerator.unwrap_model(self.model)
