"""A target too large for one card: every rank keeps its share of each decoder layer and gathers the layer for its pass.

This is what ZeRO-3 does for inference, by PyTorch's `fully_shard`: frozen weights need no engine, and the next layer is
gathered while one computes. Embedding, final norm and LM head stay whole: the drafter and its loss use them directly.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel


def shard_layers(model: PreTrainedModel, device: torch.device, ranks: int) -> PreTrainedModel:
    """Bring a causal LM from the CPU to the ranks' devices (call on all ranks), a layer at a time. From now on a pass
    needs every rank. Returns the model."""
    decoder, layers = model.base_model, model.base_model.layers
    decoder.layers = nn.ModuleList()
    whole = set(model.to(device).parameters())
    decoder.layers = layers
    mesh = init_device_mesh(device.type, (ranks,))  # starts torch.distributed if nobody has
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh, ignored_params=whole)  # shards nothing: the root that orders the gathering
    return model


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether `shard_layers` took it."""
    return isinstance(model.base_model, FSDPModule)
