"""Triton kernels of head.py."""

import triton
import triton.language as tl


@triton.jit
def score(
    logits, first, tokens, W1, W2, best, at, i, d, V, B, rank, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best biased logit of slot i in one block of the vocabulary, for every request: value and token."""
    block = tl.program_id(0)
    v, b, w = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS), tl.arange(0, WIDTH)
    previous = tl.load(first + b, b < B, 0) if i == 0 else tl.load(tokens + b * d + i - 1, b < B, 0)
    code = tl.load(W1 + previous[:, None] * rank + w, (b < B)[:, None] & (w < rank), 0.0)
    weight = tl.load(W2 + v[:, None].to(tl.int64) * rank + w, (v < V)[:, None] & (w < rank), 0.0)
    bias = tl.dot(weight, tl.trans(code), input_precision="ieee").to(W2.dtype.element_ty).to(tl.float32)
    place = b[None, :].to(tl.int64) * d * V + i * V + v[:, None]
    scores = bias + tl.load(logits + place, (v < V)[:, None] & (b < B), 0.0).to(tl.float32)
    scores = tl.where((v < V)[:, None], scores, -float("inf"))
    value, index = tl.max(scores, 0, return_indices=True)
    tl.store(best + b * blocks + block, value, b < B)
    tl.store(at + b * blocks + block, block * BLOCK + index, b < B)


@triton.jit
def pick(best, at, tokens, i, d, blocks, BLOCKS: tl.constexpr):
    """The best of all blocks becomes the token of slot i."""
    b, block = tl.program_id(0), tl.arange(0, BLOCKS)
    values = tl.load(best + b * blocks + block, block < blocks, -float("inf"))
    _, winner = tl.max(values, 0, return_indices=True)
    tl.store(tokens + b * d + i, tl.load(at + b * blocks + winner).to(tl.int64))
