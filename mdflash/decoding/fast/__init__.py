"""The fast path of a target's pass over few rows: fused weights and kernels that read the live context alone."""

from .decoder import FastDecoder, why_not_fast, why_not_fast_drafter
from .runner import FastDrafterRunner, FastHeadRunner, FastTargetRunner

__all__ = [
    "FastDecoder",
    "FastDrafterRunner",
    "FastHeadRunner",
    "FastTargetRunner",
    "why_not_fast",
    "why_not_fast_drafter",
]
