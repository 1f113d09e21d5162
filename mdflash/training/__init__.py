"""Training: windows, loss, the module that the engine wraps, the trainer."""

from .bootstrap import bootstrap, bootstrap_config
from .loss import STAGE_WEIGHTS
from .module import DrafterForTraining
from .trainer import MDFlashTrainer
from .windows import WindowDataset

__all__ = ["STAGE_WEIGHTS", "DrafterForTraining", "MDFlashTrainer", "WindowDataset", "bootstrap", "bootstrap_config"]
