"""Greedy steps of a vanilla Markov head without writing biased logits: one kernel scores blocks of the vocabulary, one picks.

Each step reads W2 once, which bounds it from below. Shape legend: drafter/tree.py.
"""

import torch
from torch import Tensor, nn

from ...drafter.heads import GatedHead, RNNHead, VanillaHead

BLOCK = 64  # tokens of the vocabulary a program scores


def is_fusible(head: nn.Module) -> bool:
    """Whether the head's code of a slot depends on the previous token alone, and the kernels can run."""
    return isinstance(head, VanillaHead) and not isinstance(head, GatedHead | RNNHead) and head.markov_w1.weight.is_cuda


def greedy_draft(logits_BdV: Tensor, first_B: Tensor, head: VanillaHead) -> Tensor:
    """Tokens [B, d]: what `MarkovHead.draft` draws greedily, the lowest id among equal scores."""
    import triton

    from .head_kernels import pick, score

    logits_BdV, first_B = logits_BdV.contiguous(), first_B.contiguous()
    B, d, V = logits_BdV.shape
    W1, W2 = head.markov_w1.weight, head.markov_w2.weight
    blocks, rank = triton.cdiv(V, BLOCK), W1.shape[1]
    tokens = torch.empty(B, d, dtype=torch.long, device=first_B.device)
    best = torch.empty(B, blocks, dtype=torch.float32, device=first_B.device)
    at = torch.empty(B, blocks, dtype=torch.int32, device=first_B.device)
    rows, width = max(16, triton.next_power_of_2(B)), max(16, triton.next_power_of_2(rank))
    for i in range(d):
        score[(blocks,)](
            logits_BdV, first_B, tokens, W1, W2, best, at, i, d, V, B, rank, blocks,
            BLOCK=BLOCK, ROWS=rows, WIDTH=width, num_warps=4,
        )  # fmt: skip
        pick[(B,)](best, at, tokens, i, d, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=4)
    return tokens
