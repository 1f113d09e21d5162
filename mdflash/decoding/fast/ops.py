"""The small operations between a decoder layer's matrix products, in plain PyTorch; kernels.py holds their Triton twins.

B requests · Q query rows of a request, in slots start..start+Q-1 · E slots of its own behind the context, its rows' the last
· H query heads, K key/value heads, G = H/K · D head
width · S cache slots (slot = position) · C channels. Each function mirrors what transformers' Qwen3 and Llama compute, its
roundings included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def add_norm(x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual), x + residual) of N rows; None adds nothing."""
    total = x_NC if residual_NC is None else x_NC + residual_NC
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_C * normed.to(total.dtype), total


def rotate_and_store(
    qkv_BQE: Tensor, cos_BQD: Tensor, sin_BQD: Tensor, start_B: Tensor, key_BKSD: Tensor, value_BKSD: Tensor,
    norms: tuple[Tensor, Tensor] | None, eps: float,
) -> Tensor:  # fmt: skip
    """Split the fused projection (E = (H + 2K)·D), norm each query and key head where the model does, rotate them, write
    keys and values into their slots, and return the queries [B, K, G·Q, D], a group's heads side by side. H may be 0."""
    B, Q, D = cos_BQD.shape
    K = key_BKSD.shape[1]
    heads = qkv_BQE.view(B, Q, -1, D)
    H = heads.shape[2] - 2 * K
    query, key, value = heads.split((H, K, K), dim=2)
    if norms is not None:
        query, key = (add_norm(x, None, weight, eps)[0] for x, weight in zip((query, key), norms, strict=True))
    query, key = rotated(query, cos_BQD, sin_BQD), rotated(key, cos_BQD, sin_BQD)
    at = (start_B[:, None] + torch.arange(Q, device=start_B.device))[:, None, :, None].expand(B, K, Q, D)
    key_BKSD.scatter_(2, at, key.transpose(1, 2))
    value_BKSD.scatter_(2, at, value.transpose(1, 2))
    return query.view(B, Q, K, H // K, D).permute(0, 2, 3, 1, 4).reshape(B, K, -1, D)


def rotated(x_BQHD: Tensor, cos_BQD: Tensor, sin_BQD: Tensor) -> Tensor:
    """RoPE of heads laid out [B, Q, heads, D]."""
    low, high = x_BQHD.chunk(2, dim=-1)
    return x_BQHD * cos_BQD[:, :, None] + torch.cat((-high, low), dim=-1) * sin_BQD[:, :, None]


def cache_attention(
    query_BKRD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, start_B: Tensor, mask_QE: Tensor, scale: float
) -> Tensor:
    """Attention of rows R = G·Q over the slots: row i of a request sees slots 0..start-1, and slot start+j where mask[i, j]
    (int8). Returns [B, Q, H·D]."""
    B, K, R, D = query_BKRD.shape
    Q, E = mask_QE.shape
    own = torch.arange(key_BKSD.shape[2], device=start_B.device) - start_B[:, None]
    among_rows = mask_QE.bool()[:, own.clamp(0, E - 1)].transpose(0, 1) & (own < E)[:, None]
    visible = torch.where((own < 0)[:, None], True, among_rows).repeat(1, R // Q, 1)
    out = F.scaled_dot_product_attention(query_BKRD, key_BKSD, value_BKSD, attn_mask=visible[:, None], scale=scale)
    return out.view(B, K, -1, Q, D).permute(0, 3, 1, 2, 4).reshape(B, Q, -1)


def silu_gate(gate_up_NE: Tensor) -> Tensor:
    """silu(gate)·up of a fused projection whose halves they are."""
    gate, up = gate_up_NE.chunk(2, dim=-1)
    return F.silu(gate) * up
