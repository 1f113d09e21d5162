"""Stops a run at the first step whose loss or gradient is NaN or infinite, naming the tensor, before anything is saved."""

from functools import partial

import torch
from accelerate.utils import reduce
from torch import Tensor
from transformers import TrainerCallback

FEATURES, HIDDEN, LOSS = range(3)  # the gradients follow
PASS = ("the target's features", "the backbone's hidden states", "the loss")


class FiniteGuard(TrainerCallback):
    """Adds up the norm of every watched tensor over a step's micro-batches and ranks (NaN and infinity stay) and looks
    at the sums once a step: one small reduction, one synchronisation, and every rank stops at the same step.

    Features and hidden states only help to name the fault: padding may hold anything that no loss reads.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Hook the drafter's pass and every trained parameter's gradient."""
        trained = [(name.removeprefix("drafter."), p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [*PASS, *(f"the gradient of {name}" for name, _ in trained), "the gradient norm"]
        self.norms = torch.zeros(len(self.names) - 1, device=args.device)
        self.order: dict[int, int] = {}  # as tensors came by: the first faulty one is nearest to the cause
        self.handles = [p.register_hook(partial(self.see, i)) for i, (_, p) in enumerate(trained, len(PASS))]
        self.handles.append(model.drafter.register_forward_hook(self._see_pass))

    def see(self, index: int, tensor: Tensor) -> None:
        """Watch one tensor of this micro-batch."""
        self.order.setdefault(index, len(self.order))
        self.norms[index] += torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)

    def _see_pass(self, drafter, inputs, hidden) -> None:
        self.see(FEATURES, inputs[0])
        self.see(HIDDEN, hidden)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Raise FloatingPointError on all ranks. (A ZeRO engine has stepped by now, or skipped the step in silence; what
        it holds ends with the process.)"""
        sums = torch.cat([self.norms, torch.linalg.vector_norm(self.norms[len(PASS) :])[None]])
        self.norms.zero_()
        faulty = reduce((~sums.isfinite()).float(), "sum").nonzero().flatten().tolist()
        if any(index >= LOSS for index in faulty):
            faulty.sort(key=lambda index: self.order.get(index, len(self.names)))
            what = ", ".join(self.names[index] for index in faulty[:3])
            raise FloatingPointError(
                f"NaN or infinity at step {state.global_step + 1}, first in {what}: lower the learning rate or look at the "
                "data; nothing was saved after the last checkpoint"
            )

    def on_train_end(self, args, state, control, **kwargs):
        """Leave the module as it was."""
        for handle in self.handles:
            handle.remove()
