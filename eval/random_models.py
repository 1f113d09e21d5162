"""Random weights at a recipe's exact shapes: true speed and memory, meaningless answers."""

import torch
from transformers import AutoModelForCausalLM

from mdflash import MDFlashModel, Target
from mdflash.recipe import Recipe
from mdflash.target.target import resolve_attention
from mdflash.training.plan import drafter_config


def random_pair(recipe: Recipe, config, device: torch.device) -> tuple[Target, MDFlashModel]:
    """A bf16 target and an fp32 drafter, made on the device; the drafter has the target's embedding and LM head."""
    torch.manual_seed(0)
    with torch.device(device):
        attention = resolve_attention(recipe.target.attn_implementation, device, torch.bfloat16)
        target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention))
        drafter = MDFlashModel(drafter_config(recipe, config))
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.data.clone()
    drafter.lm_head.weight.data = target.lm_head.weight.data.clone()
    return target, drafter
