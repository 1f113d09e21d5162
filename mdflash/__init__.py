"""mdflash: M-DFlash drafters (training, two-GPU DPara decoding, measurement). The public Python surface.

Names load on first use, so that `mdflash --help` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decoding import RequestResult, Round, decode
    from .drafter import MDFlashConfig, MDFlashModel, load_drafter
    from .target import Target, load_target

__version__ = "0.1.0"
__all__ = [
    "MDFlashConfig", "MDFlashModel", "RequestResult", "Round", "Target", "decode", "load_drafter", "load_target",
]  # fmt: skip
_HOME = {
    "decoding": ("RequestResult", "Round", "decode"),
    "drafter": ("MDFlashConfig", "MDFlashModel", "load_drafter"),
    "target": ("Target", "load_target"),
}


def __getattr__(name: str):
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
