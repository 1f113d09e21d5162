"""Training: windows, loss, the module that the engine wraps, the trainer."""

from .bootstrap import bootstrap, bootstrap_config
from .loss import STAGE_WEIGHTS
from .module import DrafterForTraining
from .trainer import MDFlashTrainer
from .windows import Mix, WindowDataset

__all__ = [
    "STAGE_WEIGHTS",
    "DrafterForTraining",
    "MDFlashTrainer",
    "Mix",
    "WindowDataset",
    "bootstrap",
    "bootstrap_config",
]
