"""Proof that frozen tensors stayed frozen: sha256 before and after every run."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..drafter.model import prefixes_of_frozen
from ..recipe import LoraSection
from .lora import is_adapted


def tensor_hash(tensor: Tensor) -> str:
    """sha256 of a tensor's dtype, shape and bytes; of a sharded one, of this rank's share."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hashes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> hash."""
    return {name: tensor_hash(tensor) for name, tensor in named}


def frozen_part(
    state: Mapping[str, Tensor], heads: Sequence[str], lora: LoraSection | None = None
) -> dict[str, Tensor]:
    """A drafter state's frozen tensors: embeddings, LM head and the named heads; under LoRA all
    but the weights that have an adapter."""
    if lora:
        return {name: tensor for name, tensor in state.items() if not is_adapted(name, lora)}
    return {name: tensor for name, tensor in state.items() if name.startswith(prefixes_of_frozen(heads))}


def check_unchanged(before: Mapping[str, str], after: Mapping[str, str], what: str) -> None:
    """Raise RuntimeError naming every tensor whose hash differs or that went missing."""
    changed = sorted(name for name in before if after.get(name) != before[name])
    if changed:
        raise RuntimeError(
            f"frozen tensors of the {what} changed during training: {', '.join(changed)}. The result is not an M-DFlash "
            "checkpoint under the contract; do not use it, and report this"
        )
