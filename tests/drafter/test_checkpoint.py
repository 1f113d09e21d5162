"""The checkpoint contract: known answers, strict loading, saving."""

import json
import shutil

import pytest
import torch
from conftest import FIXTURES, make_drafter, make_target
from safetensors.torch import load_file, save_file

from mdflash import MDFlashModel, load_drafter

HEADS = ("vanilla", "gated", "rnn")


@pytest.mark.parametrize("head", HEADS)
def test_known_answers(head):
    folder = FIXTURES / f"dspark_tiny_{head}"
    drafter, expected = load_drafter(folder), load_file(folder / "expected.safetensors")
    for case in json.loads((folder / "expected.json").read_text()):
        want = {key.split(".", 1)[1]: value for key, value in expected.items() if key.startswith(f"{case['case']}.")}
        with torch.no_grad():
            hidden = drafter.serial_hidden(want["features"], want["anchor"])
            base = drafter.serial_logits(want["features"], want["anchor"])
            tokens, q = drafter.head.sample(base, want["anchor"], 0.0, hidden=hidden)
            previous = torch.cat([want["anchor"][:, None], tokens[:, :-1]], 1)
            logits = base + drafter.head.biases(previous, hidden)
            confidence = drafter.confidence_logits(hidden, previous)
        assert torch.equal(tokens, want["draft_tokens"])
        assert torch.equal(q.argmax(-1), tokens)
        assert torch.equal(q.sum(-1), torch.ones_like(q[..., 0]))
        pairs = {"hidden": hidden, "base_logits": base, "draft_logits": logits, "confidence_logits": confidence}
        for name, ours in pairs.items():
            torch.testing.assert_close(ours, want[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_untouched_checkpoint_saves_identically(head, tmp_path):
    folder = FIXTURES / f"dspark_tiny_{head}"
    load_drafter(folder).save_pretrained(tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["model_type"] == "qwen3"


@pytest.mark.parametrize(
    ("heads", "kv", "d", "theta", "hidden"),
    [(10, 2, 7, 1e6, 40), (4, 4, 5, 1e4, 32), (3, 1, 16, 5e5, 48), (40, 8, 1, 1e6, 80)],
)
def test_other_shapes_round_trip(heads, kv, d, theta, hidden, tmp_path):
    target = make_target(vocab=50, hidden=hidden)
    rope = {"rope_type": "default", "rope_theta": theta}
    drafter = make_drafter(
        target, d=d, num_attention_heads=heads, num_key_value_heads=kv, head_dim=8, rope_parameters=rope
    )
    drafter.save_pretrained(tmp_path)
    again = MDFlashModel.from_pretrained(tmp_path)
    features, anchor = torch.randn(2, 9, drafter.feature_width), torch.tensor([3, 4])
    assert drafter.serial_logits(features, anchor).shape == (2, d, 50)
    assert torch.equal(drafter.serial_logits(features, anchor), again.serial_logits(features, anchor))
    assert torch.equal(drafter.rotary_emb.inv_freq, again.rotary_emb.inv_freq)
    wrong_base = make_drafter(target, d=d, num_attention_heads=heads, num_key_value_heads=kv, head_dim=8)
    wrong_base.load_state_dict(drafter.state_dict())
    if theta != 1e4:  # the base matters, so it must have survived
        assert not torch.allclose(wrong_base.serial_logits(features, anchor), drafter.serial_logits(features, anchor))


def test_context_may_be_empty(drafter):
    features = torch.zeros(1, 0, drafter.feature_width)
    assert drafter.serial_logits(features, torch.tensor([5])).shape == (1, 3, 97)
    assert drafter.tree_logits(features, torch.tensor([[5, 6, 7, 8]])).shape == (1, 4, 3, 97)
    with pytest.raises(ValueError, match="d\\+1 = 4"):
        drafter.tree_logits(features, torch.tensor([[5, 6]]))


def edited(tmp_path, edit_config=lambda c: None, edit_tensors=lambda t: None):
    folder = tmp_path / "copy"
    shutil.copytree(FIXTURES / "dspark_tiny_gated", folder)
    config = json.loads((folder / "config.json").read_text())
    edit_config(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    edit_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("mask_token_id"), "mask_token_id"),
        (lambda c: c.update(mask_token_id=None), "mask_token_id"),
        (lambda c: c.update(mask_token_id=400), "outside the vocabulary"),
        (lambda c: c.update(target_layer_ids=[0, 2, 6]), "final layer"),
        (lambda c: c.update(target_layer_ids=[2, 0, 4]), "ascending"),
        (lambda c: c.pop("block_size"), "block_size"),
        (lambda c: c.pop("markov_head_type"), "markov_head_type"),
        (lambda c: c.update(markov_head_type="mamba"), "mamba"),
        (lambda c: c.pop("confidence_head_with_markov"), "confidence_head_with_markov"),
        (lambda c: c.pop("rope_parameters"), "RoPE"),
        (lambda c: c.pop("num_target_layers"), "num_target_layers"),
        (lambda c: c.update(hidden_size=32), "fc.weight"),
        (lambda c: c.update(markov_head_type="vanilla"), "unexpected markov_head.gate_proj.bias"),
        (lambda c: c.update(markov_rank=0, confidence_head_with_markov=False), "unexpected markov_head"),
        (lambda c: c.update(markov_rank=0), "needs a Markov head"),
    ],
)
def test_faulty_config_is_refused_by_name(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_drafter(edited(tmp_path, edit_config=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), "norm.weight is \\[3\\]"),
    ],
)
def test_faulty_tensors_are_refused_by_name(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_drafter(edited(tmp_path, edit_tensors=change))


def test_older_rope_theta_is_read(tmp_path):
    def older(config):
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]

    ours = load_drafter(edited(tmp_path, edit_config=older))
    assert torch.equal(ours.rotary_emb.inv_freq, load_drafter(FIXTURES / "dspark_tiny_gated").rotary_emb.inv_freq)


def test_missing_folder_and_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_drafter(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text((FIXTURES / "dspark_tiny_rnn" / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load_drafter(tmp_path)


def test_rank_zero_checkpoint_has_no_head_fields(target, tmp_path):
    make_drafter(target, rank=0).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "markov_head_type" not in config
    assert not any("markov" in key or "confidence" in key for key in load_file(tmp_path / "model.safetensors"))
    assert load_drafter(tmp_path).config.markov_rank == 0


def test_dtype_and_device(tmp_path):
    drafter = load_drafter(FIXTURES / "dspark_tiny_vanilla", dtype="bfloat16", device="cpu")
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="not a floating-point torch dtype"):
        load_drafter(FIXTURES / "dspark_tiny_vanilla", dtype="bf17")
