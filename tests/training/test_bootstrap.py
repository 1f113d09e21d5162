"""Bootstrapping: geometry from the target, named faults, a tied target that still yields both tensors."""

import pytest
import torch
from conftest import make_target
from safetensors.torch import load_file

from mdflash import load_drafter
from mdflash.drafter.checkpoint import save_drafter
from mdflash.recipe import DrafterSection
from mdflash.training import bootstrap

SECTION = dict(num_hidden_layers=1, target_layer_ids=[0, 2], block_size=3, mask_token_id=5, markov_rank=8)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("stage", ["dspark", "dflash"])
def test_a_bootstrapped_drafter_holds_the_targets_tensors(family, stage, tmp_path):
    target = make_target(family, tie_word_embeddings=True)
    drafter = bootstrap(target, DrafterSection(**SECTION), stage, seed=0)
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
    state = drafter.state_dict() | {  # as the trainer exports it: both keys are the target's one tensor
        "embed_tokens.weight": target.embed_tokens.weight,
        "lm_head.weight": target.lm_head.weight,
    }
    save_drafter(tmp_path, drafter.config, state)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], stored["lm_head.weight"])
    again = load_drafter(tmp_path)
    assert again.config.markov_rank == (0 if stage == "dflash" else 8)
    assert again.config.num_target_layers == target.num_layers
    assert again.config.model_type == "qwen3"


def test_the_seed_decides_the_weights(target):
    first, second, other = (bootstrap(target, DrafterSection(**SECTION), "dspark", seed) for seed in (1, 1, 2))
    assert torch.equal(first.fc.weight, second.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 97}, "outside the vocabulary"),
        ({"target_layer_ids": [0, 3]}, "final layer"),
        ({"target_layer_ids": []}, "taps"),
        ({"markov_head_type": "mamba"}, "mamba"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "multiple"),
    ],
)
def test_faults_are_named_before_training(target, change, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(target, DrafterSection(**SECTION | change), "dspark", seed=0)


def test_an_incomplete_state_is_not_written(target, tmp_path):
    drafter = bootstrap(target, DrafterSection(**SECTION), "dspark", seed=0)
    state = drafter.state_dict()
    state.pop("fc.weight")
    with pytest.raises(ValueError, match="missing fc.weight"):
        save_drafter(tmp_path / "out", drafter.config, state)
    assert not (tmp_path / "out").exists()
