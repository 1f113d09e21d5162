"""One Triton kernel for the slots of a chunk: cross-entropy, total variation and their gradient, in three reads.

The plain PyTorch twin is `slot_terms` in fused.py; a GPU test holds them equal. One program walks one slot's vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def slot_terms_cuda(
    logits_RV: Tensor, teacher_RV: Tensor | None, labels_R: Tensor, weight_R: Tensor, factors: tuple[float, float],
    gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `slot_terms` (fused.py): contiguous logits [R, V] are overwritten with their gradient when `gradient`."""
    rows, vocabulary = logits_RV.shape
    cross_entropy, distance = (torch.empty(rows, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
    if rows:
        _slot_terms[(rows,)](
            logits_RV, logits_RV if teacher_RV is None else teacher_RV, labels_R, weight_R, cross_entropy, distance,
            vocabulary, *factors, HAS_TEACHER=teacher_RV is not None, GRADIENT=gradient, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return cross_entropy, distance


@triton.jit
def _slot_terms(
    logits, teacher, labels, weight, cross_entropy, distance, V, ce_factor, tv_factor,
    HAS_TEACHER: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    teacher += row * V
    columns = tl.arange(0, BLOCK)
    # first read: both softmaxes' maxima and sums, rescaled as the maximum grows
    z_max, z_sum = -float("inf"), 0.0
    t_max, t_sum = -float("inf"), 0.0
    for first in range(0, V, BLOCK):
        inside = first + columns < V
        z = tl.load(logits + first + columns, inside, -float("inf")).to(tl.float32)
        new_max = tl.maximum(z_max, tl.max(z))
        z_sum = z_sum * tl.exp(z_max - new_max) + tl.sum(tl.exp(z - new_max))
        z_max = new_max
        if HAS_TEACHER:
            t = tl.load(teacher + first + columns, inside, -float("inf")).to(tl.float32)
            new_max = tl.maximum(t_max, tl.max(t))
            t_sum = t_sum * tl.exp(t_max - new_max) + tl.sum(tl.exp(t - new_max))
            t_max = new_max
    z_log, t_log = z_max + tl.log(z_sum), t_max + tl.log(t_sum)
    label = tl.load(labels + row)
    tl.store(cross_entropy + row, z_log - tl.load(logits + label).to(tl.float32))
    # second read: the distance, and c = Σ_v sign(q - p) q
    total, signed = 0.0, 0.0
    if HAS_TEACHER:
        for first in range(0, V, BLOCK):
            inside = first + columns < V
            q = tl.exp(tl.load(logits + first + columns, inside, -float("inf")).to(tl.float32) - z_log)
            p = tl.exp(tl.load(teacher + first + columns, inside, -float("inf")).to(tl.float32) - t_log)
            total += tl.sum(tl.abs(q - p))
            signed += tl.sum(tl.where(q > p, q, tl.where(q < p, -q, 0.0)))
    tl.store(distance + row, total)
    # third read: the gradient, in place
    if GRADIENT:
        tl.debug_barrier()  # every warp has read the label's logit before any overwrites it
        scale = tl.load(weight + row)
        for first in range(0, V, BLOCK):
            at = first + columns
            inside = at < V
            q = tl.exp(tl.load(logits + at, inside, -float("inf")).to(tl.float32) - z_log)
            gradient = ce_factor * (q - tl.where(at == label, 1.0, 0.0))
            if HAS_TEACHER:
                p = tl.exp(tl.load(teacher + at, inside, -float("inf")).to(tl.float32) - t_log)
                sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
                gradient += tv_factor * q * (sign - signed)
            tl.store(logits + at, scale * gradient, inside)
