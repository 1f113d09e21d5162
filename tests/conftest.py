"""Tiny models with random or known weights; nothing is downloaded."""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mdflash import MDFlashConfig, MDFlashModel, Target

torch.set_num_threads(1)  # the models are tiny: threads only get in each other's way

FIXTURES = Path(__file__).parent / "fixtures"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items):
    """GPU tests are skipped where the devices they name are absent."""
    devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("gpu2", 2)):
            if item.get_closest_marker(marker) and devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))


def make_target(
    family: str = "qwen3", vocab: int = 97, hidden: int = 32, layers: int = 4, sharpness: float = 1.0, **extra
):
    """A random target. sharpness scales the LM head, so that distributions are far from uniform."""
    torch.manual_seed(7)
    config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        family
    ]
    shape = dict(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = model_class(config_class(**shape | extra))
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # far from the near-uniform models of a fresh initialisation
        model.get_output_embeddings().weight.mul_(sharpness)
    return Target(model)


def make_drafter(
    target: Target, d: int = 3, taps=(-1, 1, 2), rank: int = 8, head: str = "vanilla", **extra
) -> MDFlashModel:
    """A random drafter for a target."""
    torch.manual_seed(11)
    source = target.config
    shape = dict(
        vocab_size=source.vocab_size, hidden_size=source.hidden_size, intermediate_size=source.intermediate_size,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=source.hidden_size // 4,
        max_position_embeddings=512, block_size=d, mask_token_id=source.vocab_size - 1, target_layer_ids=list(taps),
        num_target_layers=target.num_layers, markov_rank=rank, markov_head_type=head if rank else None,
        enable_confidence_head=rank > 0, confidence_head_with_markov=rank > 0,
    )  # fmt: skip
    drafter = MDFlashModel(MDFlashConfig(**shape | extra))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return drafter.eval()


def lend(drafter, target):
    """A drafter that holds its target's embedding and LM head, as every drafter does."""
    drafter = copy.deepcopy(drafter)
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.detach().clone()
    drafter.lm_head.weight.data = target.lm_head.weight.detach().clone()
    return drafter


def counting_target(vocab: int = 32) -> Target:
    """A real model that always continues t with t+1 (mod vocab): attention and MLP add nothing, embeddings are one-hot."""
    target = make_target(vocab=vocab, hidden=vocab, layers=3)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        target.embed_tokens.weight.copy_(torch.eye(vocab))
        target.lm_head.weight.copy_(torch.eye(vocab).roll(1, 0))
    return target


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with ChatML markers; id 3 is a reserved mask."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["hello world, say something"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def drafter(target) -> MDFlashModel:
    return make_drafter(target)
