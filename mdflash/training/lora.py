"""LoRA (arXiv 2106.09685) on the drafter's backbone: W + alpha/r · B·A, where only A and B train.

peft puts the adapters in; outside the training engine a drafter is always plain: exports carry the merged weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..drafter import MDFlashModel
from ..recipe import LoraSection

ADAPTER = "default"  # peft's name for the one adapter
FILE = "lora.safetensors"  # beside a checkpoint's merged weights, from which A and B could not be told apart again


def backbone_modules(lora: LoraSection) -> str:
    """A pattern for the full names of the adapted linears. A bare suffix would also catch a head's `gate_proj`."""
    return rf"(layers\.\d+\.\w+\.)?({'|'.join(lora.targets)})"


def is_adapted(key: str, lora: LoraSection) -> bool:
    """Whether a tensor of the plain contract is one that the merge changes."""
    return re.fullmatch(backbone_modules(lora) + r"\.weight", key) is not None


def add_adapters(drafter: MDFlashModel, lora: LoraSection, seed: int) -> MDFlashModel:
    """Put adapters in place, in fp32, and freeze all else. B starts at zero: the first step sees the base. Returns self."""
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=backbone_modules(lora))
    with torch.random.fork_rng(devices=[]):  # peft draws A on the CPU
        torch.manual_seed(seed)
        inject_adapter_in_model(config, drafter, ADAPTER)
    return drafter


def adapter_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A and B of every adapted linear; empty when the full weights train."""
    return {key: tensor for key, tensor in state.items() if ".lora_" in key}


def merged(drafter: MDFlashModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's gathered state under the plain contract: adapters added to their weights. As it is without adapters."""
    plain, adapters = {}, adapter_part(state)
    for key in state.keys() - adapters.keys():
        tensor = state[key]
        layer, adapted, kind = key.partition(".base_layer")
        if adapted and kind == ".weight":
            a, b = (adapters[f"{layer}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
            tensor = tensor + drafter.get_submodule(layer).scaling[ADAPTER] * (b @ a)
        plain[layer + kind] = tensor
    return plain


def save_adapters(folder: str | Path, state: Mapping[str, Tensor]) -> None:
    """Write A and B beside a checkpoint's merged weights; nothing when the full weights train."""
    if adapters := adapter_part(state):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in adapters.items()}, Path(folder) / FILE)


def load_adapters(folder: str | Path, module: nn.Module) -> bool:
    """A and B back into a module whose weights are the base's. False when it has none. KeyError names an absent tensor."""
    own = module.state_dict()
    adapters = adapter_part(own)
    if adapters:
        stored = load_file(Path(folder) / FILE)
        module.load_state_dict(own | {key: stored[key] for key in adapters})
    return bool(adapters)
