"""Decoder layers over few rows: the modules' own weights, projections fused, one kernel between products.

Shape legend: ops.py; L taps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

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


LAYERS = (Qwen3DecoderLayer, LlamaDecoderLayer, Qwen2DecoderLayer, MistralDecoderLayer)


def why_not_fast(target: Target) -> str | None:
    """What keeps a target from the fast path (then the eager one serves it), or None. What its modules compute is known for
    these classes of layers alone, their products plain and unhooked."""
    config, layers = target.config, target.decoder.layers
    if any(type(layer) not in LAYERS for layer in layers):
        return f"its layers are {type(layers[0]).__name__}, not those of Qwen3, Llama, Qwen2 or Mistral"
    if config.hidden_act != "silu":
        return "its MLP is not a SiLU-gated one"
    if getattr(target.decoder.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
        return "its RoPE changes with the length of the context"
    return altered(layers) or unfit_width(layers[0].self_attn.q_proj.weight.shape[0] // config.num_attention_heads)


def why_not_fast_drafter(drafter: MDFlashModel) -> str | None:
    """The same for a drafter's backbone, whose layers are Qwen3's."""
    reason = altered(drafter.layers) or unfit_width(drafter.config.head_dim)
    return reason and f"of the drafter, {reason}"


def altered(layers: Sequence[nn.Module]) -> str | None:
    """What in these layers is not as its class makes it: replaced products (adapters, quantised weights) or hooks."""
    for layer in layers:
        for module in (layer.self_attn, layer.mlp):
            for name, part in module.named_children():
                if name.endswith("_proj") and (type(part) is not nn.Linear or not part.weight.is_floating_point()):
                    return f"its {name} is a {type(part).__name__} of {part.weight.dtype}, not a plain product"
        if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
            return "its layers have forward hooks"
    return None


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
        mask_QE: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        keep: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """One pass over embedded rows of requests that own the E slots from start on of the cache (each layer's keys and values
        [B, K, S, D]): the rows' keys and values go to the last Q of them, what lies in the others was stored before. Row i
        sees every slot below start, and slot start+j where mask[i, j]. cos and sin rotate the rows at their positions. Returns
        the final-norm states; keep(layer, its output) is called as soon as that is written."""
        Q, E = mask_QE.shape
        slot_B = start_B + (E - Q) if E > Q else start_B
        do = self.ops
        x, residual = do.add_norm(x_BQC, None, self.layers[0].input_norm, self.eps)
        for number, (layer, (key, value)) in enumerate(zip(self.layers, cache, strict=True)):
            query = do.rotate_and_store(
                F.linear(x, *layer.qkv), cos_BQD, sin_BQD, slot_B, key, value, layer.head_norms, self.eps
            )
            attended = do.cache_attention(query, key, value, start_B, mask_QE, self.scale)
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
    """One weight (and bias) for products that read the same input; the modules' parameters become views of it. Where they
    already lie side by side, they are taken as they are."""
    parts = []
    for name in ("weight", "bias"):
        tensors = [getattr(linear, name) for linear in linears]
        if tensors[0] is None:
            parts.append(None)
            continue
        sizes = [len(tensor) for tensor in tensors]
        if side_by_side(tensors):
            parts.append(tensors[0].detach().as_strided((sum(sizes), *tensors[0].shape[1:]), tensors[0].stride()))
            continue
        whole = torch.cat([tensor.detach() for tensor in tensors])
        for linear, view in zip(linears, whole.split(sizes), strict=True):
            getattr(linear, name).data = view
        parts.append(whole)
    return tuple(parts)


def side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Whether they follow one another in one storage, without gaps."""
    return all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        and a.is_contiguous()
        and b.is_contiguous()
        for a, b in pairwise(tensors)
    )
