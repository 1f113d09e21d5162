"""Triton twins of ops.py, held equal by tests. Every kernel takes its lengths from the device, so that a CUDA graph of a
pass serves any context."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SPLITS, MOST_ROWS, KEYS = 32, 64, 64


def add_norm(x_NC: Tensor, residual_NC: Tensor | None, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ops.add_norm; x and residual contiguous."""
    x = x_NC.view(-1, x_NC.shape[-1])
    normed, total = torch.empty_like(x_NC), x_NC if residual_NC is None else torch.empty_like(x_NC)
    C = x.shape[1]
    _add_norm[(len(x),)](
        x, x if residual_NC is None else residual_NC, weight_C, normed, total, eps, C,
        ADD=residual_NC is not None, BLOCK=triton.next_power_of_2(C), num_warps=8 if C >= 2048 else 4,
    )  # fmt: skip
    return normed, total


@triton.jit
def _add_norm(x, residual, weight, normed, total, eps, C, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < C
    row = tl.program_id(0) * C
    value = tl.load(x + row + at, inside, 0.0)
    if ADD:
        value += tl.load(residual + row + at, inside, 0.0)
        tl.store(total + row + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / C + eps)
    w = tl.load(weight + at, inside, 0.0)
    tl.store(normed + row + at, w * (wide * scale).to(value.dtype), inside)


def rotate_and_store(
    qkv_BQE: Tensor, cos_BQD: Tensor, sin_BQD: Tensor, start_B: Tensor, key_BKSD: Tensor, value_BKSD: Tensor,
    norms: tuple[Tensor, Tensor] | None, eps: float,
) -> Tensor:  # fmt: skip
    """See ops.rotate_and_store; qkv, cos and sin contiguous, caches laid out alike."""
    B, Q, D = cos_BQD.shape
    K, S = key_BKSD.shape[1:3]
    H = qkv_BQE.shape[-1] // D - 2 * K
    query = qkv_BQE.new_empty(B, K, H // K * Q, D)
    q_norm, k_norm = norms or (cos_BQD, cos_BQD)
    _rotate_and_store[(B * Q, H + 2 * K)](
        qkv_BQE, cos_BQD, sin_BQD, start_B, query, key_BKSD, value_BKSD, q_norm, k_norm, eps, Q, S, key_BKSD.stride(0),
        H=H, K=K, D=D, NORM=norms is not None, num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, start, query, key, value, q_norm, k_norm, eps, Q, S, cache_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    b, i = row // Q, row % Q
    half = tl.arange(0, D // 2)
    source = qkv + row * (H + 2 * K) * D + head * D
    low, high = tl.load(source + half), tl.load(source + D // 2 + half)
    slot = tl.load(start + b).to(tl.int64) + i
    if head >= H + K:
        target = value + b.to(tl.int64) * cache_stride + ((head - H - K) * S + slot) * D
    elif head >= H:
        target = key + b.to(tl.int64) * cache_stride + ((head - H) * S + slot) * D
    else:
        target = query + ((b * H + head) * Q + i) * D  # heads of a group lie side by side already
    if head < H + K:
        if NORM:
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            scale = tl.rsqrt((tl.sum(wide_low * wide_low) + tl.sum(wide_high * wide_high)) / D + eps)
            weight = q_norm if head < H else k_norm
            low = tl.load(weight + half) * (wide_low * scale).to(low.dtype)
            high = tl.load(weight + D // 2 + half) * (wide_high * scale).to(high.dtype)
        cos_low, cos_high = tl.load(cos + row * D + half), tl.load(cos + row * D + D // 2 + half)
        sin_low, sin_high = tl.load(sin + row * D + half), tl.load(sin + row * D + D // 2 + half)
        turned_low = low * cos_low - high * sin_low
        high = high * cos_high + low * sin_high
        low = turned_low
    tl.store(target + half, low)
    tl.store(target + D // 2 + half, high)


def cache_attention(
    query_BKRD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, start_B: Tensor, mask_QE: Tensor, scale: float
) -> Tensor:
    """See ops.cache_attention. The live context of each request is split over programs that end in partial sums, which a
    second kernel joins (flash decoding)."""
    B, K, R, D = query_BKRD.shape
    Q, E = mask_QE.shape
    out = query_BKRD.new_empty(B, Q, K * (R // Q) * D)
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(R)))
    tiles = triton.cdiv(R, rows)
    splits = max(1, min(MOST_SPLITS, 2 * processors(out.device) // (B * K * tiles)))
    partial = torch.empty(B * K, splits, R, D, dtype=torch.float32, device=out.device)
    peak, weight = torch.empty(2, B * K, splits, R, dtype=torch.float32, device=out.device)
    _split_attention[(B * K, splits, tiles)](
        query_BKRD, key_BKSD, value_BKSD, start_B, mask_QE, partial, peak, weight, scale * 1.4426950408889634,
        key_BKSD.shape[2], key_BKSD.stride(0), K, R, Q, E, splits, D=D, ROWS=rows, KEYS=KEYS, num_warps=4,
    )  # fmt: skip
    _join_attention[(B * K, R)](
        partial, peak, weight, out, K, R, Q, splits, D=D, SPLITS=triton.next_power_of_2(splits), num_warps=1
    )
    return out


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU (a few where there is none: the interpreter)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _split_attention(
    query, key, value, start, mask, partial, peak, weight, scale, S, cache_stride, K, R, Q, E, splits,
    D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    b, k = pair // K, pair % K
    first = tl.load(start + b).to(tl.int32)
    share = tl.cdiv(tl.cdiv(first + E, splits), KEYS) * KEYS
    lowest, highest = split * share, tl.minimum((split + 1) * share, first + E)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns, keys = tl.arange(0, D), tl.arange(0, KEYS)
    q = tl.load(query + (pair * R + rows[:, None]) * D + columns, rows[:, None] < R, 0.0)
    base = b.to(tl.int64) * cache_stride + k.to(tl.int64) * S * D
    high = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    for at in range(lowest, highest, KEYS):
        slot = at + keys
        live = slot < highest
        k_block = tl.load(key + base + slot[:, None] * D + columns, live[:, None], 0.0)
        scores = tl.dot(q, tl.trans(k_block), input_precision="ieee") * scale
        own = slot - first
        among = tl.load(mask + (rows % Q)[:, None] * E + own[None, :], (live & (own >= 0))[None, :], 0)
        scores = tl.where((live & (own < 0))[None, :] | (among != 0), scores, -1.0e30)
        higher = tl.maximum(high, tl.max(scores, 1))
        # a row that sees none of these keys keeps weight 0
        weights = tl.where(scores > -1.0e29, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        v_block = tl.load(value + base + slot[:, None] * D + columns, live[:, None], 0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v_block.dtype), v_block, input_precision="ieee")
        high = higher
    to = (pair * splits + split) * R + rows
    tl.store(peak + to, high, rows < R)
    tl.store(weight + to, total, rows < R)
    tl.store(partial + to[:, None] * D + columns, sums, rows[:, None] < R)


@triton.jit
def _join_attention(partial, peak, weight, out, K, R, Q, splits, D: tl.constexpr, SPLITS: tl.constexpr):
    pair, row = tl.program_id(0), tl.program_id(1)
    split, columns = tl.arange(0, SPLITS), tl.arange(0, D)
    live = split < splits
    at = (pair * splits + split) * R + row
    high = tl.load(peak + at, live, -1.0e30)
    shrink = tl.exp2(high - tl.max(high)) * tl.where(live, 1.0, 0.0)
    total = tl.sum(shrink * tl.load(weight + at, live, 0.0))
    sums = tl.load(partial + at[:, None] * D + columns, live[:, None], 0.0)
    result = tl.sum(sums * shrink[:, None], 0) / total
    b, k, group, i = pair // K, pair % K, row // Q, row % Q
    head = k * (R // Q) + group
    target = ((b * Q + i) * K * (R // Q) + head) * D
    tl.store(out + target + columns, result.to(out.dtype.element_ty))


def silu_gate(gate_up_NE: Tensor) -> Tensor:
    """See ops.silu_gate; contiguous."""
    width = gate_up_NE.shape[-1] // 2
    out = gate_up_NE.new_empty(*gate_up_NE.shape[:-1], width)
    block = 1024
    _silu_gate[(gate_up_NE.numel() // (2 * width), triton.cdiv(width, block))](
        gate_up_NE, out, width, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _silu_gate(gate_up, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + 2 * row * width + at, inside, 0.0)
    up = tl.load(gate_up + (2 * row + 1) * width + at, inside, 0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * width + at, (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up, inside)
