"""One compiled graph for all lengths."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.fx.experimental import _config as shape_config

F = TypeVar("F", bound=Callable)
BACKEND = "inductor"


def compile_for_all_lengths(function: F) -> F:
    """`torch.compile` with dynamic shapes, at the first call.

    PyTorch takes sizes that are equal at the first call to stay equal (duck shaping): a first text as long as the hidden
    size is wide would tie the two, and every graph would be compiled again at the next length. So this turns that off, in
    the whole process.
    """
    shape_config.use_duck_shape = False
    return torch.compile(function, dynamic=True, backend=BACKEND)
