"""The window loss (docs/method.md): 0.1 CE + 0.9 total variation against the target.

M windows of d slots, C hidden size, V vocabulary. `slot_losses` is the plain definition; `loss_sum` computes the same
through fused.py, whose logits exist for one chunk of slots at a time.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..drafter import MDFlashModel
from .fused import FusedWindowLoss


@dataclass(frozen=True)
class LossWeights:
    """Factors of the terms: cross-entropy, total variation, and the confidence head's BCE (0: not trained)."""

    cross_entropy: float
    total_variation: float
    confidence: float


# M-DFlash trains no confidence head; a DSpark bootstrap does; DFlash is CE alone.
STAGE_WEIGHTS = {
    "mdflash": LossWeights(0.1, 0.9, 0.0),
    "dspark": LossWeights(0.1, 0.9, 1.0),
    "dflash": LossWeights(1.0, 0.0, 0.0),
}


@dataclass(frozen=True)
class Windows:
    """Valid windows, flattened. hidden, teacher [M, d, C]: the drafter's slots and the target's final-norm states at
    p+k..p+k+d-1. previous, labels [M, d]: y_{i-1} and y_i. weight [M, d]: m_i w_i."""

    hidden: Tensor
    teacher: Tensor
    previous: Tensor
    labels: Tensor
    weight: Tensor


def divergences(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy -log q(y) and Σ_v |q - p| (twice the total variation distance) of every slot, fp32.

    logits, teacher_logits [..., V] of q and p; labels [...].
    """
    log_q, p = logits.float().log_softmax(-1), teacher_logits.float().softmax(-1)
    return -log_q.gather(-1, labels[..., None]).squeeze(-1), (log_q.exp() - p).abs().sum(-1)


def slot_losses(drafter: MDFlashModel, lm_head: nn.Module, windows: Windows, weights: LossWeights) -> Tensor:
    """Per-slot loss [M, d] in fp32: the definition, with every logit in memory."""
    logits = drafter.lm_head(windows.hidden) + drafter.head.biases(windows.previous, windows.hidden)
    cross_entropy, distance = divergences(logits, lm_head(windows.teacher), windows.labels)
    loss = weights.cross_entropy * cross_entropy + weights.total_variation * distance
    return loss + confidence_losses(drafter, windows, distance, weights)


def confidence_losses(
    drafter: MDFlashModel, windows: Windows, distance: Tensor, weights: LossWeights
) -> Tensor | float:
    """Per-slot BCE [M, d] of the confidence head against the acceptance 1 - distance/2; 0 where it is not trained."""
    if not weights.confidence or drafter.confidence_head is None:
        return 0.0
    confidence = drafter.confidence_logits(windows.hidden, windows.previous).float()
    accepted = 1 - distance.detach() / 2
    return weights.confidence * F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")


def loss_sum(drafter: MDFlashModel, lm_head: nn.Linear, windows: Windows, weights: LossWeights, rows: int) -> Tensor:
    """The numerator Σ m_i w_i loss_i over all windows (fp32 scalar); the denominator is Σ m_i w_i over the global batch.

    rows: at most this many slots have logits at once. lm_head: the target's, which is also the drafter's.
    """
    if any(hasattr(parameter, "ds_id") for parameter in drafter.head.parameters()):
        return sharded_loss_sum(drafter, lm_head, windows, weights, rows)
    code, code_weight = drafter.head.codes(windows.previous, windows.hidden), None
    if code is not None:
        weight = drafter.head.markov_w2.weight
        code, code_weight = code.flatten(0, 1), weight if torch.is_grad_enabled() else weight.detach()
    teacher = windows.teacher.flatten(0, 1) if weights.total_variation or weights.confidence else None
    total, distance = FusedWindowLoss.apply(
        windows.hidden.flatten(0, 1), code, lm_head.weight, code_weight, teacher, windows.labels.flatten(),
        windows.weight.flatten(), (weights.cross_entropy, weights.total_variation), rows,
    )  # fmt: skip
    confidence = confidence_losses(drafter, windows, distance.view_as(windows.weight), weights)
    return total + (windows.weight * confidence).sum()


def most_over_ranks(count: int, device: torch.device) -> int:
    """The largest count of any rank: each chunk calls the heads, whose ZeRO-3 gathers every rank must join."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def sharded_loss_sum(
    drafter: MDFlashModel, lm_head: nn.Module, windows: Windows, weights: LossWeights, rows: int
) -> Tensor:
    """`loss_sum` under ZeRO-3, which gathers the heads' weights only for their own modules: plain chunks, recomputed in
    backward."""
    fields = (windows.hidden, windows.teacher, windows.previous, windows.labels, windows.weight)
    step = max(1, rows // windows.labels.shape[1])

    def chunk_sum(*chunk: Tensor) -> Tensor:
        part = Windows(*chunk)
        return (part.weight * slot_losses(drafter, lm_head, part, weights)).sum()

    total = windows.hidden.sum() * 0.0  # keeps the graph (and every rank's collectives) when there is no window
    chunks = list(zip(*(field.split(step) for field in fields), strict=True))
    count = most_over_ranks(len(chunks), windows.hidden.device)
    chunks += [tuple(field[:0] for field in fields)] * (count - len(chunks))
    for chunk in chunks:
        total = total + (checkpoint(chunk_sum, *chunk, use_reentrant=False) if count > 1 else chunk_sum(*chunk))
    return total
