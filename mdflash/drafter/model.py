"""The drafter: backbone, Markov head and confidence head under the DSpark checkpoint contract. Shape legend: tree.py."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..compilation import compile_for_all_lengths
from .backbone import ContextKV, DrafterLayer
from .config import MDFlashConfig
from .heads import HEADS, ConfidenceHead, MarkovHead
from .tree import Layout, Rows, dense_mask, flex_mask

FLEX_SMALLEST_HEAD = 16  # FlexAttention's GPU kernel takes no smaller head_dim

# Parameters no stage touches: prefixes of state-dict keys.
SHARED_WITH_TARGET = ("embed_tokens.", "lm_head.")
HEADS_OF_DSPARK = ("markov_head", "confidence_head")


def prefixes_of_frozen(heads: Sequence[str]) -> tuple[str, ...]:
    """What the state-dict keys of frozen tensors begin with: embeddings, LM head and the named heads."""
    return (*SHARED_WITH_TARGET, *(f"{head}." for head in heads))


class MDFlashModel(PreTrainedModel):
    """A DSpark, DFlash or M-DFlash drafter. Serial block and DPara tree are one forward over [context ; rows].

    Build from a config (`MDFlashModel(config)`: random weights) or load with `mdflash.load_drafter`. `attention` selects
    the mask: "dense" (reference, and what decoding's few rows use), "flex" (FlexAttention), or "auto": flex for training
    batches on GPUs whose kernel takes the head size, dense elsewhere. `activation_checkpointing` keeps each layer's input
    alone for backward, which computes the layer again.
    """

    config_class = MDFlashConfig
    base_model_prefix = ""
    _no_split_modules = ["DrafterLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: MDFlashConfig):
        super().__init__(config.validate_contract())
        hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.markov_head = HEADS[config.markov_head_type](vocab, rank, hidden) if rank else MarkovHead()
        self.confidence_head = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(hidden, rank if config.confidence_head_with_markov else 0)
        self.attention = "auto"
        self.activation_checkpointing = False
        self.post_init()

    @property
    def head(self) -> MarkovHead:
        """The checkpoint's `markov_head` by its short name (adds no key)."""
        return self.markov_head

    @property
    def draft_length(self) -> int:
        """d, the slots of one window."""
        return self.config.block_size

    @property
    def feature_width(self) -> int:
        """Width F of one position's features: taps * hidden."""
        return self.fc.in_features

    def forward(self, features_BTF: Tensor, rows: Rows, positions_BT: Tensor | None = None) -> Tensor:
        """Hidden states [B, R, C] (after the final norm) of the rows, given features of positions 0..T-1 (or, of packed
        texts, of `positions_BT`)."""
        B, T = features_BTF.shape[:2]
        if positions_BT is None:
            positions_BT = torch.arange(T, device=features_BTF.device).expand(B, T)
        context = self.project_context(features_BTF, positions_BT)
        if rows.taps is not None:
            context = self.with_in_flight(context, features_BTF, rows)
        return self.forward_rows(rows, context, self.mask(rows, T))

    def with_in_flight(self, context: list[ContextKV], features_BTF: Tensor, rows: Rows) -> list[ContextKV]:
        """The context and, behind it, the in-flight columns of the rows' anchors, from the features at their positions."""
        anchors = rows.anchors
        at_BA = (rows.first + rows.position)[:, anchors].clamp(max=features_BTF.shape[1] - 1)
        features_BAF = features_BTF.gather(1, at_BA[..., None].expand(-1, -1, features_BTF.shape[2]))
        flying = self.project_in_flight(features_BAF, rows.position[:, anchors], rows.taps[:, anchors])
        return [layer.then(more) for layer, more in zip(context, flying, strict=True)]

    def project_context(self, features_BTF: Tensor, positions_BT: Tensor) -> list[ContextKV]:
        """Each layer's keys and values of RMSNorm(fc(features)) at the given positions."""
        context_BTC = self.hidden_norm(self.fc(features_BTF))
        cos, sin = self.rotary_emb(context_BTC, positions_BT)
        return [layer.self_attn.keys_values(context_BTC, cos, sin) for layer in self.layers]

    def project_in_flight(self, features_BAF: Tensor, positions_BA: Tensor, taps_BA: Tensor) -> list[ContextKV]:
        """`project_context` of anchors whose earliest `taps` taps alone exist: the others count as zero."""
        channel = torch.arange(features_BAF.shape[-1], device=features_BAF.device)
        exists = channel < taps_BA[..., None] * self.config.hidden_size
        return self.project_context(features_BAF.where(exists, 0.0), positions_BA)

    def forward_rows(self, rows: Rows, context: list[ContextKV], mask: Tensor | BlockMask) -> Tensor:
        """The rows' pass over an already projected context; the decoder's entry. Returns [B, R, C]."""
        x_BRC = self.embed_tokens(rows.ids).to(self.norm.weight.dtype)
        cos, sin = self.rotary_emb(x_BRC, rows.position)
        again = self.activation_checkpointing and torch.is_grad_enabled()
        for layer, layer_context in zip(self.layers, context, strict=True):
            inputs = x_BRC, cos, sin, layer_context, mask
            x_BRC = checkpoint(layer, *inputs, use_reentrant=False) if again else layer(*inputs)
        return self.norm(x_BRC)

    def mask(self, rows: Rows, context_length: int) -> Tensor | BlockMask:
        """The visibility rule in the form the configured attention takes."""
        worthwhile = self.training and rows.ids.is_cuda and self.config.head_dim >= FLEX_SMALLEST_HEAD
        flex = self.attention == "flex" or (self.attention == "auto" and worthwhile)
        return (flex_mask if flex else dense_mask)(rows, context_length)

    def serial_hidden(self, features_BTF: Tensor, anchor_B: Tensor) -> Tensor:
        """The serial DSpark window, cache-free: features of positions 0..T-1 [B,T,F] (T may be 0), anchor token at
        position T [B] -> hidden states [B, d, C]; slot i predicts the token at T+i (i = 1..d)."""
        d = self.draft_length
        anchor_BNs = anchor_B.new_empty(anchor_B.shape[0], 1, 0)
        hidden = self._one_tree(features_BTF, Layout.serial(d), anchor_BNs, first_BNb=anchor_B[:, None, None])
        return hidden[:, 0]

    def tree_hidden(self, features_BTF: Tensor, block_BN: Tensor) -> Tensor:
        """The DPara tree, cache-free: features of positions 0..T-1 and the block t_0..t_d [B, d+1] starting at position
        T -> hidden states [B, d+1, d, C]; branch r, slot i predicts the token at T+r+1+i."""
        d = self.draft_length
        if block_BN.shape[1] != d + 1:
            raise ValueError(f"block of {block_BN.shape[1]} tokens: this drafter's block holds d+1 = {d + 1}")
        return self._one_tree(features_BTF, Layout.tree(d), block_BN[:, None])

    def serial_logits(self, features_BTF: Tensor, anchor_B: Tensor) -> Tensor:
        """Base logits [B, d, V] of `serial_hidden` (before the Markov head)."""
        return self.lm_head(self.serial_hidden(features_BTF, anchor_B))

    def tree_logits(self, features_BTF: Tensor, block_BN: Tensor) -> Tensor:
        """Base logits [B, d+1, d, V] of `tree_hidden` (before the Markov head)."""
        return self.lm_head(self.tree_hidden(features_BTF, block_BN))

    def _one_tree(self, features, layout: Layout, anchor_BNs: Tensor, first_BNb: Tensor | None = None) -> Tensor:
        B, T = features.shape[:2]
        start_BN = torch.full((B, 1), T, device=features.device)
        rows = Rows.build(layout, start_BN, layout.token_ids(anchor_BNs, self.config.mask_token_id, first_BNb))
        return rows.branches(self(features, rows))[:, 0]

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Confidence logits [..., d] of slots with hidden [..., d, C] and previous tokens y_{i-1} [..., d]."""
        if self.confidence_head is None:
            raise ValueError("this checkpoint has no confidence head (enable_confidence_head is false)")
        embedding = self.markov_head.markov_w1(previous) if self.config.confidence_head_with_markov else None
        return self.confidence_head(hidden, embedding)

    def cast(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> "MDFlashModel":
        """Convert the parameters alone; RoPE's frequencies stay fp32, as `.to(dtype)` would not leave them. Returns self."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device=device, dtype=dtype)
        self.rotary_emb.to(device)
        return self

    def compile_layers(self) -> "MDFlashModel":
        """Compile the layers for training: one graph that all layers share, for every length. Returns self."""
        for layer in self.layers:
            layer.self_attn.keys_values = compile_for_all_lengths(layer.self_attn.keys_values)
            layer.forward = compile_for_all_lengths(layer.forward)
        return self

    def freeze(self, heads: Sequence[str] = HEADS_OF_DSPARK) -> "MDFlashModel":
        """Stop gradients of embeddings, LM head and the named heads, and of nothing else. Returns self."""
        frozen = prefixes_of_frozen(heads)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return self

    def save_pretrained(self, folder) -> None:
        """Write config.json and safetensors under the DSpark contract: the architecture's published name is kept, and an
        untouched checkpoint comes out tensor-identical."""
        from .checkpoint import save_drafter

        save_drafter(folder, self.config, self.state_dict())

    @classmethod
    def from_pretrained(cls, path_or_id, *args, **kwargs) -> "MDFlashModel":
        """Strict load (see `mdflash.load_drafter`)."""
        from .checkpoint import load_drafter

        return load_drafter(path_or_id, *args, **kwargs)
