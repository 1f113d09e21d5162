"""SDPA for few queries over a long cache: the query heads of a group become rows, so no key or value is repeated."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grouped_sdpa"
FEW_QUERIES = 16


def grouped_sdpa(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, Q, D], key and value [B, H/G, S, D], mask [B, 1, Q, S] or None ->
    [B, Q, H, D]. Equal to "sdpa", which writes every key and value G times when there is a mask."""
    B, H, Q, D = query.shape
    heads = key.shape[1]
    if heads == H or Q > FEW_QUERIES or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = query.reshape(B, heads, -1, D)  # a group's heads lie side by side, each with its Q queries
    mask = attention_mask.repeat(1, 1, H // heads, 1)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return out.reshape(B, H, Q, D).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_sdpa)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model decodes with `grouped_sdpa`, which takes boolean masks, whatever it was loaded with."""
    loaded_with = model.config._attn_implementation
    model.set_attn_implementation(GROUPED)
    try:
        yield
    finally:
        model.set_attn_implementation(loaded_with)
