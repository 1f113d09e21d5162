"""Decoder layers over few rows: the modules' own weights, projections fused, one kernel between products.

Shape legend: ops.py; L taps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...drafter import MDFlashModel
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
    if getattr(target.decoder.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
        return "its RoPE changes with the length of the context"
    return unfit_width(attention.q_proj.weight.shape[0] // config.num_attention_heads)


def why_not_fast_drafter(drafter: MDFlashModel) -> str | None:
    """The same for a drafter's backbone, whose layers are Qwen3's."""
    reason = unfit_width(drafter.config.head_dim)
    return reason and f"of the drafter, {reason}"


def unfit_width(width: int) -> str | None:
    """What is wrong with heads of this width for the kernels."""
    return None if width >= 16 and not width & (width - 1) else f"its head width {width} is no power of two from 16 on"


class FastLayers:
    """Decoder layers over a slot cache, as a target's and a drafter's backbone have them. The fused weights replace the
    modules' own storage, which become views of them: nothing is held twice, and the eager path still works."""

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, scale: float):
        self.layers = [self._fuse(layer) for layer in layers]
        self.norm, self.eps, self.scale = norm.weight, norm.variance_epsilon, scale
        self.ops = ops
        if self.norm.is_cuda:
            from . import kernels

            self.ops = kernels

    def forward(
        self,
        x_BQC: Tensor,
        cos_BQD: Tensor,
        sin_BQD: Tensor,
        start_B: Tensor,
        mask_QQ: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        keep: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """One pass over embedded rows, whose keys and values go to slots start..start+Q-1 of the cache (each layer's keys and
        values [B, K, S, D]); row i sees every slot below start, and row j where mask[i, j]. cos and sin rotate them at
        their positions. Returns the final-norm states; keep(layer, its output) is called as soon as that is written."""
        do = self.ops
        x, residual = do.add_norm(x_BQC, None, self.layers[0].input_norm, self.eps)
        for number, (layer, (key, value)) in enumerate(zip(self.layers, cache, strict=True)):
            query = do.rotate_and_store(
                F.linear(x, *layer.qkv), cos_BQD, sin_BQD, start_B, key, value, layer.head_norms, self.eps
            )
            attended = do.cache_attention(query, key, value, start_B, mask_QQ, self.scale)
            x, residual = do.add_norm(F.linear(attended, *layer.out), residual, layer.mlp_norm, self.eps)
            x = F.linear(do.silu_gate(F.linear(x, *layer.gate_up)), *layer.down)
            last = number + 1 == len(self.layers)
            x, residual = do.add_norm(x, residual, self.norm if last else self.layers[number + 1].input_norm, self.eps)
            if keep:
                keep(number, residual)
        return x

    def store(self, x_BQC: Tensor, cos_BQD: Tensor, sin_BQD: Tensor, start_B: Tensor, cache) -> None:
        """Write keys and values of rows that ask nothing (a drafter's context) into slots start..start+Q-1 of every layer."""
        for layer, (key, value) in zip(self.layers, cache, strict=True):
            width = 2 * key.shape[1] * key.shape[3]
            weight, bias = layer.qkv
            states = F.linear(x_BQC, weight[-width:], None if bias is None else bias[-width:])
            self.ops.rotate_and_store(states, cos_BQD, sin_BQD, start_B, key, value, layer.head_norms, self.eps)

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


class RotationTable:
    """cos and sin [.., D] of positions, from a table of the model's own, made once for all slots."""

    def __init__(self, rotary: nn.Module, like: Tensor, slots: int):
        positions = torch.arange(slots, device=like.device)[None]
        self.cos, self.sin = (part[0].to(like.dtype).contiguous() for part in rotary(like, positions))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


class FastDecoder:
    """Runs a target's layers over a slot cache.

    Raises ValueError for a target that `why_not_fast` refuses.
    """

    def __init__(self, target: Target):
        reason = why_not_fast(target)
        if reason:
            raise ValueError(f"{type(target.model).__name__} cannot take the fast path: {reason}; use the eager one")
        self.target = target
        decoder = target.decoder
        self.stack = FastLayers(decoder.layers, decoder.norm, decoder.layers[0].self_attn.scaling)
        self.masks: dict[int, Tensor] = {}

    @classmethod
    def of(cls, target: Target) -> "FastDecoder":
        """The target's fast decoder, made at the first call and again after its weights have moved."""
        held, projection = getattr(target, "fast_decoder", None), target.decoder.layers[0].self_attn.q_proj.weight
        if held is None or held.stack.layers[0].qkv[0].data_ptr() != projection.data_ptr():
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
        rotation: RotationTable | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One causal pass over ids [B, Q] at positions start..start+Q-1. cache: each layer's keys and values [B, K, S, D],
        written in place. rotation: a table for all its slots, else one is made. Returns the final-norm states [B, Q, C] and
        the features [B, Q, L·C]; on_tap(index of the tap) is called as soon as that tap's part of the features is written."""
        x = self.target.embed_tokens(ids_BQ)
        B, Q, C = x.shape
        positions = start_B[:, None] + torch.arange(Q, device=start_B.device)
        rotation = rotation or RotationTable(self.target.decoder.rotary_emb, x, cache[0][0].shape[2])
        cos, sin = rotation(positions)
        features = x.new_empty(B, Q, len(taps) * C) if taps else None

        def keep(layer: int, state: Tensor) -> None:
            if layer in taps:
                index = taps.index(layer)
                features[..., index * C : (index + 1) * C] = state
                if on_tap:
                    on_tap(index)

        keep(-1, x)
        if Q not in self.masks:
            self.masks[Q] = torch.ones(Q, Q, dtype=torch.int8, device=x.device).tril()
        return self.stack.forward(x, cos, sin, start_B, self.masks[Q], cache, keep), features


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
