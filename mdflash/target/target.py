"""Any frozen Hugging Face causal LM as the target. Shape legend: drafter/tree.py; L tapped layers, Q query positions."""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..compilation import compile_for_all_lengths
from ..drafter.checkpoint import as_dtype
from ..drafter.model import MDFlashModel
from .sharding import is_sharded, shard_layers


@dataclass(frozen=True)
class TargetOutput:
    """One pass: hidden [B, Q, C] AFTER the final norm (what the LM head reads) and features [B, Q, L*C] of the taps."""

    hidden: Tensor
    features: Tensor | None


class Target:
    """A frozen causal LM. `model` is the Hugging Face model, `tokenizer` may be None when prompts are token ids.

    Raises ValueError when the model does not have the shape this needs: decoder layers in `base_model.layers`, logits that
    are exactly lm_head(final-norm state), full attention in every layer.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.decoder = model.base_model
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.embed_tokens: nn.Embedding = model.get_input_embeddings()
        if not hasattr(self.decoder, "layers") or self.lm_head is None:
            raise ValueError(
                f"{type(model).__name__} has no base_model.layers or LM head: use a decoder-only causal LM"
            )
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"{type(model).__name__} uses {sorted(kinds)}: only full attention targets are supported")
        window = getattr(model.config, "sliding_window", None)
        if window and not hasattr(model.config, "layer_types") and window < model.config.max_position_embeddings:
            raise ValueError(
                f"{type(model).__name__} attends over sliding_window={window}: only full attention is supported"
            )
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in parameters else "cache"
        self._compiled: list | None = None
        self._check_teacher()

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def config(self):
        return self.model.config

    @property
    def sharded(self) -> bool:
        """Whether the layers are spread over ranks, so that a pass needs them all."""
        return is_sharded(self.model)

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, from the generation config (or the model's, or the tokenizer's EOS)."""
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
        return ()

    def compile_layers(self) -> "Target":
        """Compile the layers' passes over whole texts (never over a cache): one graph that all layers share, for every
        length. Returns self."""
        self._compiled = [compile_for_all_lengths(layer.forward) for layer in self.decoder.layers]
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """Teacher logits [..., V] of final-norm states [..., C]."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def forward(
        self,
        ids_BQ: Tensor,
        taps: Sequence[int] = (),
        positions_BQ: Tensor | None = None,
        cache=None,
        mask: Tensor | None = None,
        on_taps: Sequence[tuple[int, Callable[[Tensor], None]]] = (),
    ) -> TargetOutput:
        """One pass over ids [B, Q]. Without a cache the rows are right-padded texts (causal, pads are never seen), or texts
        packed behind one another whose positions [B, Q] restart at 0: a token then sees its own text alone.

        taps: layer ids to record. cache: a `SlotCache`, with positions [B, Q] and a boolean mask [B, 1, Q, S]. Only the
        tapped outputs are kept, never all hidden states, and no logits are made. on_taps, of (count, work): work gets the
        features of the earliest `count` taps as soon as the last of them is there, while the pass goes on.
        """
        shape, extra = ids_BQ.shape, {}
        if cache is not None:
            extra = {"position_ids": positions_BQ, self._cache_argument: cache, "attention_mask": mask}
        elif positions_BQ is not None:
            if "flash" in self.config._attn_implementation:  # it reads restarts in a batch of one only
                ids_BQ, positions_BQ = ids_BQ.reshape(1, -1), positions_BQ.reshape(1, -1)
            extra = {"position_ids": positions_BQ}
        with self._recording(taps, on_taps) as recorded, self._fast_layers(cache is None):
            out = self.decoder(input_ids=ids_BQ, use_cache=cache is not None, **extra)
        features = torch.cat([recorded[tap].view(*shape, -1) for tap in taps], dim=-1) if taps else None
        return TargetOutput(out.last_hidden_state.view(*shape, -1), features)

    def features(self, ids_BQ: Tensor, taps: Sequence[int]) -> Tensor:
        """Features [B, Q, L*C] of texts [B, Q]: the outputs of the tapped layers, concatenated in the taps' order."""
        return self.forward(ids_BQ.to(self.device), taps).features

    def check_packing(self) -> None:
        """Raise ValueError where a packed pass is not the texts' own passes (a model that ignores restarting positions)."""
        ids = torch.arange(1, 9, device=self.device)[None] % self.config.vocab_size
        positions = torch.arange(4, device=self.device).repeat(1, 2)
        packed, alone = self.forward(ids, (), positions).hidden[:, 4:].float(), self.forward(ids[:, 4:]).hidden.float()
        error = ((packed - alone).norm() / alone.norm()).item()
        if error > 0.05:  # rounding stays far below, another text in sight far above
            raise ValueError(
                f"{type(self.model).__name__} lets packed texts see each other (error {error:.2g}): set packing: false"
            )

    @contextmanager
    def _recording(self, taps: Sequence[int], on_taps: Sequence[tuple[int, Callable[[Tensor], None]]] = ()):
        layers, recorded, hooks = self.decoder.layers, {}, []

        def keep(tap: int, state: Tensor) -> None:
            recorded[tap] = state
            for count, work in on_taps:
                if len(recorded) == count:  # ascending taps come in their order
                    work(torch.cat([recorded[early] for early in taps[:count]], dim=-1))

        def keep_output(tap):
            return lambda module, args, output: keep(tap, output[0] if isinstance(output, tuple) else output)

        def keep_embedding(module, args, kwargs):
            keep(-1, args[0] if args else kwargs["hidden_states"])

        try:
            for tap in taps:
                if tap == -1:
                    hooks.append(layers[0].register_forward_pre_hook(keep_embedding, with_kwargs=True))
                elif 0 <= tap < len(layers) - 1:
                    hooks.append(layers[tap].register_forward_hook(keep_output(tap)))
                else:
                    raise ValueError(f"tap {tap} of a target with {len(layers)} layers: use -1..{len(layers) - 2}")
            yield recorded
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _fast_layers(self, whole_texts: bool):
        """Inside, the layers run their compiled forward where there is one (hooks stay outside the graph)."""
        swapped = list(zip(self.decoder.layers, self._compiled, strict=True)) if self._compiled and whole_texts else []
        try:
            for layer, compiled in swapped:
                layer.forward = compiled
            yield
        finally:
            for layer, _ in swapped:
                del layer.forward

    def _check_teacher(self) -> None:
        """logits must be lm_head(final-norm state): a scaled or capped head would make another teacher."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.config.vocab_size
        with torch.no_grad():
            ours, theirs = self.logits(self.forward(ids).hidden), self.model(input_ids=ids, use_cache=False).logits
        if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the LM head (difference "
                f"{(ours.float() - theirs.float()).abs().max():.3g}): such targets are not supported"
            )


def resolve_attention(name: str, device: torch.device | str | None, dtype: torch.dtype | str | None) -> str:
    """ "auto" is flash-attn where it is importable, on GPUs below fp32, else SDPA."""
    if name != "auto":
        return name
    on_gpu = device is not None and torch.device(device).type == "cuda"
    flash = on_gpu and importlib.util.find_spec("flash_attn") is not None and as_dtype(dtype) != torch.float32
    return "flash_attention_2" if flash else "sdpa"


def load_target(
    path_or_id: str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
    attn_implementation: str = "sdpa",
    shard_over: int = 1,
    **kwargs,
) -> Target:
    """Load a frozen target and its tokenizer from a folder or hub id.

    dtype: None keeps the stored one. attn_implementation: decoding needs "sdpa"; training also takes "auto"
    (flash-attn when it is importable on a GPU, else SDPA). shard_over: the number of ranks, to spread the decoder layers over
    all of them (called by each); 1 keeps them whole. kwargs go to `from_pretrained` (for example `gguf_file`).
    """
    model, found = AutoModelForCausalLM.from_pretrained(
        path_or_id,
        dtype=as_dtype(dtype) or "auto",
        revision=revision,
        attn_implementation=resolve_attention(attn_implementation, device, dtype),
        output_loading_info=True,
        **kwargs,
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{path_or_id} lacks {len(missing)} weights, the first {missing[0]}: a target would decode noise without them; "
            "fetch or save the checkpoint again"
        )
    device = torch.device(device or "cpu")
    model = shard_layers(model, device, shard_over) if shard_over > 1 else model.to(device)
    tokenizer_kwargs = {"gguf_file": kwargs["gguf_file"]} if "gguf_file" in kwargs else {}
    return Target(model, AutoTokenizer.from_pretrained(path_or_id, revision=revision, **tokenizer_kwargs))


def check_pair(target: Target, drafter: MDFlashModel) -> None:
    """Raise ValueError unless the drafter was made for a target of this shape."""
    ours, theirs = drafter.config, target.config
    pairs = {
        "hidden_size": (ours.hidden_size, theirs.hidden_size),
        "vocab_size": (ours.vocab_size, theirs.vocab_size),
        "num_target_layers": (ours.num_target_layers, target.num_layers),
    }
    faults = [f"{name} {mine} against {other}" for name, (mine, other) in pairs.items() if mine != other]
    if faults:
        raise ValueError(f"the drafter was made for another target: {', '.join(faults)}; load the matching pair")


def share_weights(target: Target, drafter: MDFlashModel) -> None:
    """Let the drafter use the target's embedding and LM head storage where device, dtype and values agree (no copy). The
    parameters stay two objects, so that moving the drafter later leaves the target where it is."""
    for ours, theirs in ((drafter.embed_tokens, target.embed_tokens), (drafter.lm_head, target.lm_head)):
        mine, other = ours.weight, theirs.weight
        if mine.device == other.device and mine.dtype == other.dtype and torch.equal(mine, other):
            ours.weight = nn.Parameter(other.detach(), requires_grad=False)
