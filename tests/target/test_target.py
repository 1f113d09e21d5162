"""Taps, teacher, sharing."""

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer
from transformers import MistralConfig, MistralForCausalLM

from mdflash import Target, load_target
from mdflash.target import grouped_attention, share_weights
from mdflash.target.target import check_pair


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_taps_and_teacher(family, tied):
    target = make_target(family, tie_word_embeddings=tied)
    ids = torch.randint(0, 97, (2, 11))
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True)
    features = target.features(ids, (-1, 0, 2))
    expected = torch.cat([whole.hidden_states[layer + 1] for layer in (-1, 0, 2)], dim=-1)
    assert torch.equal(features, expected)
    torch.testing.assert_close(target.logits(target.forward(ids).hidden), whole.logits, atol=1e-6, rtol=0)


def test_right_padding_changes_nothing(target):
    ids = torch.randint(0, 97, (1, 8))
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], 1)
    torch.testing.assert_close(target.features(padded, (1,))[:, :8], target.features(ids, (1,)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("tap", [3, 7, -2])
def test_final_layer_and_unknown_taps_are_refused(target, tap):
    with pytest.raises(ValueError, match="use -1..2"):
        target.features(torch.tensor([[1, 2]]), (tap,))
    assert not target.decoder.layers[0]._forward_hooks


def test_scaled_logits_are_refused():
    model = make_target().model
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled
    with pytest.raises(ValueError, match="after the LM head"):
        Target(model)


def test_weights_are_shared_only_when_equal(target):
    drafter = make_drafter(target)
    share_weights(target, drafter)
    assert drafter.lm_head.weight.data_ptr() != target.lm_head.weight.data_ptr()
    drafter.embed_tokens.weight.data = target.embed_tokens.weight.clone()
    drafter.lm_head.weight.data = target.lm_head.weight.clone()
    share_weights(target, drafter)
    assert drafter.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    assert drafter.embed_tokens.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    drafter.to(torch.float64)  # moving the drafter must not move the target
    assert target.lm_head.weight.dtype == torch.float32


def test_pair_check_names_the_difference(target):
    with pytest.raises(ValueError, match="vocab_size 50 against 97"):
        check_pair(target, make_drafter(make_target(vocab=50)))


def test_sliding_window_targets_are_refused():
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window=8"):
        Target(MistralForCausalLM(config))
    config.sliding_window = None
    Target(MistralForCausalLM(config))


@pytest.mark.parametrize("queries", [1, 3])
def test_grouped_attention_equals_sdpa(queries):
    """Left-padded rows, query heads in groups of two, few queries over a cache."""
    target = make_target()
    assert target.config.num_attention_heads == 2 * target.config.num_key_value_heads
    ids = torch.randint(0, 97, (3, 9 + queries))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0

    def last_logits():
        with torch.no_grad():
            cache = target.model(input_ids=ids[:, :9], attention_mask=mask[:, :9], use_cache=True).past_key_values
            return target.model(input_ids=ids[:, 9:], attention_mask=mask, past_key_values=cache).logits

    plain = last_logits()
    with grouped_attention(target.model):
        torch.testing.assert_close(last_logits(), plain, atol=1e-5, rtol=1e-5)
    assert target.config._attn_implementation == "sdpa"


def test_a_checkpoint_with_missing_weights_is_refused(target, tmp_path):
    """transformers would fill them with noise and warn."""
    weights = target.model.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    target.model.save_pretrained(tmp_path, state_dict=weights)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 weights, the first model.layers.1.mlp.up_proj.weight"):
        load_target(str(tmp_path))
