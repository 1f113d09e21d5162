"""The diffusion backbone: Qwen3-style layers whose keys and values are [context ; rows]. Shape legend: tree.py."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from ..compilation import compile_for_all_lengths
from .config import MDFlashConfig

compiled_flex_attention = compile_for_all_lengths(flex_attention)


@dataclass(frozen=True)
class ContextKV:
    """One layer's projected context: keys (normed and rotated at their positions) and values, [B, KVH, T, head_dim]."""

    key: Tensor
    value: Tensor

    def then(self, other: "ContextKV") -> "ContextKV":
        """The columns of both, one behind the other."""
        return ContextKV(torch.cat([self.key, other.key], 2), torch.cat([self.value, other.value], 2))


def rotate(x_BHRD: Tensor, cos_BRD: Tensor, sin_BRD: Tensor) -> Tensor:
    """RoPE on heads [B, H, R, head_dim] with cos and sin [B, R, head_dim]."""
    return x_BHRD * cos_BRD[:, None] + rotate_half(x_BHRD) * sin_BRD[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Grouped-query attention of [B,H,R,D] over [B,KVH,T+R,D]: a dense boolean mask goes to SDPA, a block mask to
    FlexAttention. Both give the same result; a test holds them equal."""
    grouped = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        flex = compiled_flex_attention if query.is_cuda else flex_attention
        return flex(query, key, value, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


class DrafterAttention(nn.Module):
    """Queries from the rows alone; keys and values from [context ; rows]."""

    def __init__(self, config: MDFlashConfig):
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x_BRC: Tensor) -> Tensor:
        return x_BRC.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x_BRC: Tensor, cos: Tensor, sin: Tensor) -> ContextKV:
        """Project context [B,T,C] or rows [B,R,C] to keys and values."""
        key = self.k_norm(self._heads(self.k_proj(x_BRC))).transpose(1, 2)
        value = self._heads(self.v_proj(x_BRC)).transpose(1, 2)
        return ContextKV(rotate(key, cos, sin).to(value.dtype), value)

    def forward(self, x_BRC: Tensor, cos: Tensor, sin: Tensor, context: ContextKV, mask: Tensor | BlockMask) -> Tensor:
        query = self.q_norm(self._heads(self.q_proj(x_BRC))).transpose(1, 2)
        rows = self.keys_values(x_BRC, cos, sin)
        key = torch.cat([context.key, rows.key], dim=2)
        value = torch.cat([context.value, rows.value], dim=2)
        out = attend(rotate(query, cos, sin).to(value.dtype), key, value, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP over the rows; the context enters through the attention only."""

    def __init__(self, config: MDFlashConfig):
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BRC: Tensor, cos: Tensor, sin: Tensor, context: ContextKV, mask: Tensor | BlockMask) -> Tensor:
        x_BRC = x_BRC + self.self_attn(self.input_layernorm(x_BRC), cos, sin, context, mask)
        return x_BRC + self.mlp(self.post_attention_layernorm(x_BRC))
