"""A DSpark (or DFlash) drafter from scratch for a target that has no published one."""

import torch
from transformers import PretrainedConfig

from ..drafter import MDFlashConfig, MDFlashModel
from ..recipe import DrafterSection
from ..target import Target


def bootstrap_config(source: PretrainedConfig, dtype: str, section: DrafterSection, stage: str) -> MDFlashConfig:
    """The drafter's config: the widths of the target's config, the section's geometry. stage "dflash" leaves out both heads.

    Raises ValueError naming the field that breaks the checkpoint contract (unset mask token, final-layer tap, ..).
    """
    heads = section.num_attention_heads or source.num_attention_heads
    rank = 0 if stage == "dflash" else section.markov_rank
    config = MDFlashConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=section.intermediate_size or source.intermediate_size,
        num_hidden_layers=section.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=section.num_key_value_heads or source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        rms_norm_eps=source.rms_norm_eps,
        # small init (Nguyen and Salazar 2019, arXiv 1910.05895)
        initializer_range=(2 / (5 * source.hidden_size)) ** 0.5,
        max_position_embeddings=source.max_position_embeddings,
        rope_parameters=source.rope_parameters,
        num_target_layers=source.num_hidden_layers,
        block_size=section.block_size,
        mask_token_id=section.mask_token_id,
        target_layer_ids=section.target_layer_ids,
        markov_rank=rank,
        markov_head_type=section.markov_head_type if rank else None,
        enable_confidence_head=rank > 0,
        confidence_head_with_markov=rank > 0,
        dtype=dtype,
        eos_token_id=source.eos_token_id,
    )
    return config.validate_contract()


def bootstrap(target: Target, section: DrafterSection, stage: str, seed: int) -> MDFlashModel:
    """A randomly initialised drafter on the target's device that holds the target's embedding and LM head."""
    config = bootstrap_config(target.config, str(target.dtype).removeprefix("torch."), section, stage)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = MDFlashModel(config)
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.detach().clone()
    drafter.lm_head.weight.data = target.lm_head.weight.detach().clone()
    return drafter.to(target.device)
