"""The frozen target LLM: features by layer taps, teacher states, shared embeddings and LM head."""

from .attention import grouped_attention
from .target import Target, TargetOutput, load_target, share_weights

__all__ = ["Target", "TargetOutput", "grouped_attention", "load_target", "share_weights"]
