"""The fast path of a target's pass over few rows: fused weights and kernels that read the live context alone."""

from .decoder import FastDecoder, why_not_fast

__all__ = ["FastDecoder", "why_not_fast"]
