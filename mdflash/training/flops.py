"""Matmul FLOPs of one text's training step, every needed product counted once (docs/training.md).

A product [m, k] x [k, n] is 2mkn FLOPs. Backward holds the gradient of the input (dgrad) and of the weight (wgrad), 2mkn
each, where it is needed: a frozen weight has no wgrad, an input without a trained ancestor no dgrad. Attention counts
visible pairs alone. What is computed twice to save memory (checkpointing, the fused attention's and the chunked loss's
second pass) counts once; norms, RoPE, softmax and the optimizer do not count.

T tokens of the text · R rows of its trees · M label rows · C hidden size · V vocabulary. Configs are Hugging Face configs
of decoders with q, k, v, o and a gated MLP (Qwen3, Llama, ..); sizes are their fields.
"""

from collections.abc import Mapping, Sequence

from transformers import PretrainedConfig

from ..drafter import Layout, MDFlashConfig
from ..recipe import Stage, require

TARGET_PARTS = ("target_layers", "target_attention")
ONCE = (*TARGET_PARTS, "context_forward", "context_backward")


def widths(config: PretrainedConfig) -> tuple[int, int]:
    """Width of all queries, H * head_dim, and of all keys (or values), KVH * head_dim."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads * head_dim, kv_heads * head_dim


def layer_weights(config: PretrainedConfig) -> int:
    """Weights of one decoder layer's seven matrices: C * (2 q + 2 kv + 3 intermediate)."""
    q, kv = widths(config)
    return config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)


def attention(config: PretrainedConfig, pairs: int) -> int:
    """Forward of all layers over `pairs` visible (query, key) pairs: 2 q for the score and 2 q for the sum of values."""
    return 4 * widths(config)[0] * config.num_hidden_layers * pairs


def visible_pairs(layout: Layout, length: int, starts: int | Sequence[int], in_flight: float = 0.0) -> int:
    """Pairs (row, key) that the visibility rule allows: features below p, `seen` anchors, the d slots of a row's branch, and
    in the `in_flight` share of texts that have such columns those of the seen anchors.

    starts: every p, or their number: then they are taken as spread evenly over the text, length/2 on average.
    """
    trees, before = (starts, starts * length // 2) if isinstance(starts, int) else (len(starts), sum(starts))
    anchors = sum(layout.seen) + round(in_flight * sum(layout.seen))
    return before * layout.rows + trees * (anchors + len(layout.branches) * layout.d**2)


def count(
    target: PretrainedConfig,
    drafter: MDFlashConfig,
    layout: Layout,
    length: int,
    starts: int | Sequence[int],
    stage: Stage = "mdflash",
    in_flight: float = 0.0,
    spine_labels: bool = False,
    train_head: bool = False,
) -> dict[str, int]:
    """FLOPs by part of one text of `length` tokens with `starts` trees (see `visible_pairs`), all labels valid.

    stage: mdflash freezes the heads (but the Markov head with `train_head`); dspark trains them; dflash has no heads and no
    teacher. in_flight: share of texts with taps in flight; 0 projects no columns for them. spine_labels: the anchors predict
    a token each, too. Raises ValueError for a length or a start out of range.
    """
    require(length > 0, "length", length, "use a positive number of tokens")
    trees = starts if isinstance(starts, int) else len(starts)
    require(trees >= 0, "starts", starts, "use a number of trees, or their positions")
    if not isinstance(starts, int):
        require(all(0 <= p < length for p in starts), "starts", list(starts), f"use positions in 0..{length - 1}")
    T, R = length, trees * layout.rows
    M = trees * (len(layout.branches) * layout.d + spine_labels * layout.spine)
    flying = trees * layout.spine if in_flight else 0
    C, layers = drafter.hidden_size, drafter.num_hidden_layers
    fc = len(drafter.target_layer_ids) * C * C
    context_kv = 2 * C * widths(drafter)[1] * layers
    rows = layer_weights(drafter) * layers
    over_rows = attention(drafter, visible_pairs(layout, length, starts, in_flight))
    logits = 2 * M * C * drafter.vocab_size
    heads, heads_dgrad = head_weights(drafter, stage)
    return {
        "target_layers": 2 * T * layer_weights(target) * target.num_hidden_layers,
        "target_attention": attention(target, T * (T + 1) // 2),
        "context_forward": 2 * T * (fc + context_kv),
        "context_backward": 2 * T * (fc + 2 * context_kv),  # the features are the frozen target's: fc has no dgrad
        "in_flight_forward": 2 * flying * (fc + context_kv),
        "in_flight_backward": 2 * flying * (fc + 2 * context_kv),
        "rows_forward": 2 * R * rows,
        "rows_backward": 4 * R * rows,
        "attention_forward": over_rows,
        "attention_backward": 2 * over_rows,  # q, k, v and the probabilities: four products for forward's two
        "teacher_logits": 0 if stage == "dflash" else logits,
        "student_logits": logits,
        "student_logits_backward": logits,  # the LM head is frozen: dgrad alone
        "heads_forward": 2 * M * heads,
        "heads_backward": 2 * M * (heads_dgrad if stage == "mdflash" and not train_head else 2 * heads),
    }


def count_text(
    target: PretrainedConfig,
    drafter: MDFlashConfig,
    layouts: Sequence[Layout],
    length: int,
    starts: Sequence[int | Sequence[int]],
    stage: Stage = "mdflash",
    in_flight: float = 0.0,
    spine_labels: bool = False,
    train_head: bool = False,
) -> dict[str, int]:
    """`count` over all layouts of a text, `starts` for each; the target's pass and the context are there once."""
    parts = [
        count(target, drafter, layout, length, at, stage, in_flight, spine_labels, train_head)
        for layout, at in zip(layouts, starts, strict=True)
    ]
    return {name: parts[0][name] if name in ONCE else sum(part[name] for part in parts) for name in parts[0]}


def head_weights(drafter: MDFlashConfig, stage: Stage) -> tuple[int, int]:
    """Weights that a label row meets in the heads that the stage's loss reads, and those among them whose input needs a
    gradient while they are frozen: none where it is W1[y] alone."""
    C, rank = drafter.hidden_size, drafter.markov_rank
    if not rank or stage == "dflash":
        return 0, 0
    inner = {"vanilla": 0, "gated": (C + rank) * rank, "rnn": (C + 2 * rank) * 3 * rank}[drafter.markov_head_type]
    markov = inner + rank * drafter.vocab_size
    confidence = C + rank * drafter.confidence_head_with_markov if drafter.enable_confidence_head else 0
    return markov + (confidence if stage == "dspark" else 0), markov if inner else 0


def drafter_part(flops: Mapping[str, int]) -> int:
    """The drafter's own FLOPs: everything but the target's pass (the teacher's logits belong to the loss)."""
    return sum(value for part, value in flops.items() if part not in TARGET_PARTS)
