"""The drafter: configuration, windows and tree, backbone, heads, checkpoints, hub."""

from .checkpoint import load_drafter
from .config import MDFlashConfig
from .model import MDFlashModel
from .tree import Layout, Rows

__all__ = ["Layout", "MDFlashConfig", "MDFlashModel", "Rows", "load_drafter"]
