"""The frozen target LLM: features by layer taps, teacher states, shared embeddings and LM head."""

from .target import Target, TargetOutput, load_target, share_weights

__all__ = ["Target", "TargetOutput", "load_target", "share_weights"]
