"""A target's decoder over few rows: the Hugging Face module's own weights, projections fused, one kernel between products.

Shape legend: ops.py; L taps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...target import Target
from . import ops


@dataclass(frozen=True)
class FusedLayer:
    """A decoder layer's weights: (weight, bias or None) of each product, norm weights, (q, k) norms or None."""

    qkv: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    input_norm: Tensor
    mlp_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None


def why_not_fast(target: Target) -> str | None:
    """What keeps a target from the fast path (then the eager one serves it), or None: Qwen3's and Llama's layers fit."""
    config, layer = target.config, target.decoder.layers[0]
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not all(hasattr(attention, f"{name}_proj") for name in "qkvo"):
        return "its attention has no q, k, v and o projections"
    if not all(hasattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")) or config.hidden_act != "silu":
        return "its MLP is not a SiLU-gated one"
    if not hasattr(layer, "post_attention_layernorm") or hasattr(layer, "pre_feedforward_layernorm"):
        return "its layers are not pre-norm with two norms"
    if not hasattr(target.decoder, "rotary_emb") or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
        return "it does not rotate whole heads"
    width = attention.q_proj.weight.shape[0] // config.num_attention_heads
    if width & (width - 1) or width < 16:
        return f"its head width {width} is no power of two from 16 on"
    return None


class FastDecoder:
    """Runs a target's layers over a slot cache. The fused weights replace the modules' own storage, which become views of
    them: nothing is held twice, and the eager path still works.

    Raises ValueError for a target that `why_not_fast` refuses.
    """

    def __init__(self, target: Target):
        reason = why_not_fast(target)
        if reason:
            raise ValueError(f"{type(target.model).__name__} cannot take the fast path: {reason}; use the eager one")
        self.target = target
        self.eps = target.decoder.norm.variance_epsilon
        self.layers = [self._fuse(layer) for layer in target.decoder.layers]
        self.scale = target.decoder.layers[0].self_attn.scaling
        self.ops = ops
        if target.device.type == "cuda":
            from . import kernels

            self.ops = kernels

    @classmethod
    def of(cls, target: Target) -> "FastDecoder":
        """The target's fast decoder, made at the first call and again after its weights have moved."""
        held, projection = getattr(target, "fast_decoder", None), target.decoder.layers[0].self_attn.q_proj.weight
        if held is None or held.layers[0].qkv[0].data_ptr() != projection.data_ptr():
            target.fast_decoder = held = cls(target)
        return held

    @torch.no_grad()
    def forward(
        self,
        ids_BQ: Tensor,
        start_B: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        taps: Sequence[int] = (),
        on_tap: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over ids [B, Q] at positions start..start+Q-1. cache: each layer's keys and values [B, K, S, D], written
        in place. Returns the final-norm states [B, Q, C] and the features [B, Q, L·C]; on_tap(index of the tap) is called
        as soon as that tap's part of the features is written."""
        do, decoder = self.ops, self.target.decoder
        residual = decoder.embed_tokens(ids_BQ)
        B, Q, C = residual.shape
        positions = start_B[:, None] + torch.arange(Q, device=start_B.device)
        cos, sin = (part.contiguous() for part in decoder.rotary_emb(residual, positions))
        features = residual.new_empty(B, Q, len(taps) * C) if taps else None

        def keep(layer: int, state: Tensor) -> None:
            if layer in taps:
                index = taps.index(layer)
                features[..., index * C : (index + 1) * C] = state
                if on_tap:
                    on_tap(index)

        keep(-1, residual)
        x, residual = do.add_norm(residual, None, self.layers[0].input_norm, self.eps)
        for number, (layer, (key, value)) in enumerate(zip(self.layers, cache, strict=True)):
            query = do.rotate_and_store(
                F.linear(x, *layer.qkv), cos, sin, start_B, key, value, layer.head_norms, self.eps
            )
            attended = do.cache_attention(query, key, value, start_B, Q, self.scale)
            x, residual = do.add_norm(F.linear(attended, *layer.out), residual, layer.mlp_norm, self.eps)
            x = F.linear(do.silu_gate(F.linear(x, *layer.gate_up)), *layer.down)
            last = number + 1 == len(self.layers)
            norm = decoder.norm.weight if last else self.layers[number + 1].input_norm
            x, residual = do.add_norm(x, residual, norm, self.eps)
            keep(number, residual)
        return x, features

    @staticmethod
    def _fuse(layer: nn.Module) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
        return FusedLayer(
            qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj),
            out=(attention.o_proj.weight, attention.o_proj.bias),
            gate_up=fuse(mlp.gate_proj, mlp.up_proj),
            down=(mlp.down_proj.weight, mlp.down_proj.bias),
            input_norm=layer.input_layernorm.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            head_norms=norms,
        )


def fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) for products that read the same input; the modules' parameters become views of it."""
    parts = []
    for name in ("weight", "bias"):
        tensors = [getattr(linear, name) for linear in linears]
        if tensors[0] is None:
            parts.append(None)
            continue
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for linear, view in zip(linears, whole.split([len(tensor) for tensor in tensors]), strict=True):
            getattr(linear, name).data = view
        parts.append(whole)
    return tuple(parts)
