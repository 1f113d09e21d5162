"""The drafter's configuration: a Qwen3 configuration plus the DSpark fields (docs/checkpoint.md)."""

from transformers import Qwen3Config

MARKOV_HEADS = ("vanilla", "gated", "rnn")

# Fields a checkpoint's config.json must name itself; a default would hide a wrong file.
REQUIRED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_target_layers", "block_size", "mask_token_id", "target_layer_ids", "markov_rank",
)  # fmt: skip


class MDFlashConfig(Qwen3Config):
    """Geometry of a DSpark, DFlash or M-DFlash drafter; `model_type` stays `qwen3`, as published checkpoints have it.

    Fields beyond Qwen3's:
        block_size: draft length d, the number of slots of one window.
        mask_token_id: id whose embedding a slot of unknown content carries. It may lie in the padded vocabulary.
        target_layer_ids: taps, each the OUTPUT of that decoder layer of the target; -1 is the embedding output.
        num_target_layers: decoder layers of the target; its last layer cannot be tapped.
        markov_rank: rank of the Markov head; 0 means the checkpoint has none (DFlash).
        markov_head_type: "vanilla", "gated" or "rnn"; None when `markov_rank` is 0.
        enable_confidence_head, confidence_head_with_markov: the confidence head and whether it reads W1[y].
        num_anchors: windows drawn per text when the checkpoint was trained (information only).
        mdflash_config: what an M-DFlash checkpoint adds: version, draft length, anchor counts, base, data hashes.

    Raises ValueError, naming field, value and remedy, when a field breaks the contract.
    """

    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    markov_rank: int = 0
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    num_anchors: int | None = None
    mdflash_config: dict | None = None

    def to_dict(self) -> dict:
        """Plain data for config.json: fields of absent parts are absent too."""
        data = super().to_dict()
        absent = ["mdflash_config"] if self.mdflash_config is None else []
        absent += [] if self.markov_rank else ["markov_head_type"]
        absent += [] if self.enable_confidence_head else ["confidence_head_with_markov"]
        return {key: value for key, value in data.items() if key not in absent}

    def validate_contract(self) -> "MDFlashConfig":
        """Check every rule of the checkpoint contract; returns self. transformers builds empty configs of its own, so
        the check is not made at construction but by whoever builds or loads a model."""
        missing = [name for name in REQUIRED_FIELDS if getattr(self, name, None) is None]
        if missing:
            hint = " An unset mask token would silently become pad or EOS." if "mask_token_id" in missing else ""
            raise ValueError(f"config field(s) {', '.join(missing)} unset: a drafter needs them; add them.{hint}")
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: the draft length must be at least 1")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id} outside the vocabulary 0..{self.vocab_size - 1}: "
                "choose a reserved or padded id"
            )
        taps, last = list(self.target_layer_ids), self.num_target_layers - 1
        if not taps or taps != sorted(set(taps)) or taps[0] < -1:
            raise ValueError(f"target_layer_ids={taps}: taps are distinct, ascending layer ids, -1 for the embeddings")
        if taps[-1] >= last:
            raise ValueError(
                f"target_layer_ids={taps} taps layer {taps[-1]} of a target with {self.num_target_layers} layers: "
                f"the final layer ({last}) is only available after the final norm; tap layers below {last}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank={self.markov_rank}: the rank is 0 (no Markov head) or positive")
        if self.markov_rank and self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(
                f"markov_head_type={self.markov_head_type!r} with markov_rank={self.markov_rank}: "
                f"use one of {', '.join(MARKOV_HEADS)}"
            )
        if self.confidence_head_with_markov and self.enable_confidence_head and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs a Markov head; set markov_rank or turn it off")
        if any(kind != "full_attention" for kind in self.layer_types):
            raise ValueError(f"layer_types={self.layer_types}: a drafter's layers all use full_attention")
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=true: a drafter stores embed_tokens and lm_head apart; set it false")
        return self

    def check_taps(self, name: str, *counts: int) -> None:
        """Raise ValueError when the setting `name` counts more taps in flight than the drafter has."""
        taps = len(self.target_layer_ids)
        if max(counts) > taps:
            raise ValueError(f"{name}={max(counts)}: this drafter has {taps} taps; use counts up to that")
