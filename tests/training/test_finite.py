"""The guard names what is NaN or infinite first, and lets everything else pass."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mdflash.training.finite import LOSS, FiniteGuard

ARGS, STATE = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=6)


class Spoil(torch.autograd.Function):
    """Identity whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class Drafter(nn.Module):
    def __init__(self, spoilt):
        super().__init__()
        self.fc, self.norm, self.spoilt = nn.Linear(3, 3), nn.Linear(3, 3), spoilt

    def forward(self, features):
        hidden = self.fc(features)
        return self.norm(Spoil.apply(hidden) if self.spoilt else hidden)


def step(features=0.5, weight=1.0, factor=1.0, spoilt=False):
    """Two micro-batches, the fault in the first."""
    model = nn.Module()
    model.drafter, guard = Drafter(spoilt), FiniteGuard()
    nn.init.constant_(model.drafter.norm.weight, weight)
    guard.on_train_begin(ARGS, STATE, None, model=model)
    for scale in (1.0, 0.0):
        inputs = torch.full((2, 3), 0.5)
        inputs[1] = features
        hidden = model.drafter(inputs)
        loss = hidden.sum() * scale * factor
        guard.see(LOSS, loss)
        loss.backward()
    guard.on_pre_optimizer_step(ARGS, STATE, None)
    guard.on_train_end(ARGS, STATE, None)
    assert not model.drafter._forward_hooks
    assert guard.norms.sum() == 0


def test_finite_steps_pass():
    step()
    step(factor=1e9)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"features": float("nan")}, "the target's features"),
        ({"weight": float("inf")}, "the backbone's hidden states"),
        ({"factor": float("inf")}, "the loss"),
        ({"spoilt": True}, "the gradient of fc.bias, the gradient of fc.weight, the gradient norm:"),
        ({"factor": 1.5e18}, "the gradient norm"),
    ],
)
def test_the_first_faulty_tensor_is_named(fault, name):
    with pytest.raises(FloatingPointError, match=f"NaN or infinity at step 7, first in {name}"):
        step(**fault)
