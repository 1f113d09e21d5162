"""LoRA: what trains, what the merge gives, what a checkpoint holds, resume. ZeRO: test_trainer.py."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target, make_tokenizer
from safetensors.torch import load_file

import recipes.train_mdflash as recipe_script
from mdflash import load_drafter
from mdflash.drafter.checkpoint import unfilled
from mdflash.recipe import LORA_TARGETS, LoraSection, read_recipe
from mdflash.training.lora import add_adapters, is_adapted, merged

LORA = LoraSection(r=4, alpha=6.0)
ATTENTION_ONLY = LoraSection(r=4, alpha=6.0, targets=["q_proj", "v_proj"])


def by_hand(base: dict, adapters: dict, lora: LoraSection) -> dict:
    """base + B·A·alpha/r, its tensors named as in a checkpoint's lora.safetensors (without the engine's prefix)."""
    pairs = {key: key.removesuffix(".weight") for key in base if is_adapted(key, lora)}
    a, b = ({key: adapters[f"{layer}.lora_{side}.default.weight"] for key, layer in pairs.items()} for side in "AB")
    update = {key: b[key] @ a[key] * lora.alpha / lora.r for key in pairs}
    assert 2 * len(pairs) == len(adapters)
    return {key: tensor + update[key] if key in update else tensor for key, tensor in base.items()}


@pytest.mark.parametrize("lora", [LORA, ATTENTION_ONLY], ids=["all", "q v"])
def test_only_adapters_train_and_the_merge_is_exact(target, lora):
    """A gated head has a `gate_proj` of its own: it gets no adapter."""
    drafter = make_drafter(target, head="gated").freeze()
    base = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    add_adapters(drafter, lora, seed=0)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    linears = 2 * len(set(lora.targets) - {"fc"}) + ("fc" in lora.targets)
    assert len(trained) == 2 * linears
    assert all(".lora_" in name and name.startswith(("layers.", "fc.")) for name in trained)
    assert all(torch.equal(merged(drafter, drafter.state_dict())[key], base[key]) for key in base)  # B starts at zero

    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.3)
    state = merged(drafter, drafter.state_dict())
    assert state.keys() == base.keys()
    for key, tensor in by_hand(base, trained, lora).items():
        torch.testing.assert_close(state[key], tensor)
        assert is_adapted(key, lora) or torch.equal(state[key], base[key])
    plain = unfilled(drafter.config)
    plain.load_state_dict(state, assign=True)
    features, block = torch.randn(2, 5, drafter.feature_width), torch.randint(0, 90, (2, drafter.draft_length + 1))
    ours, theirs = plain.tree_logits(features, block), drafter.tree_logits(features, block)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_adapters_follow_their_seed_alone(target):
    first = []
    for seed in (0, 0, 1):
        drafter = make_drafter(target)
        torch.rand(seed + 1)
        before = torch.random.get_rng_state()
        first.append(add_adapters(drafter, LORA, seed).fc.lora_A["default"].weight)
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A tiny target, its answers and a DSpark drafter."""
    folder = tmp_path_factory.mktemp("project")
    tokenizer = make_tokenizer()
    target = make_target(vocab=len(tokenizer))
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter = make_drafter(target, taps=(0, 2), mask_token_id=3)
    drafter.embed_tokens.weight.data, drafter.lm_head.weight.data = target.embed_tokens.weight, target.lm_head.weight
    drafter.save_pretrained(folder / "base")
    rows = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "abc "[: 1 + i % 4] * 9}]
        for i in range(19)
    ]
    lines = [json.dumps({"id": f"p{i}@t0.0", "messages": messages}) for i, messages in enumerate(rows)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def train(folder: Path, project: Path, monkeypatch, **overrides) -> tuple[dict, list[dict]]:
    """Run the mdflash stage in `folder`; returns training.json and the drafters that held-out decoding saw."""
    (folder / "runs" / "x" / "answers").mkdir(parents=True, exist_ok=True)
    (folder / "runs" / "x" / "answers" / "answers.jsonl").write_text((project / "answers.jsonl").read_text())
    stage = dict(
        learning_rate=1e-2, max_steps=10, global_batch_size=8, micro_batch_size=4, starts_per_text=4, max_length=128,
        bf16=False, logging_steps=1, deepspeed=None, save_steps=5, eval_steps=5, lora={"r": LORA.r, "alpha": LORA.alpha},
    ) | overrides  # fmt: skip
    data = {
        "name": "x", "target": {"path": str(project / "target"), "dtype": "float32"}, "data": {"held_out": 3},
        "drafter": {"base": str(project / "base")}, "mdflash": stage,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(data))
    seen = []

    def recording(*_):
        return lambda drafter: seen.append(drafter.state_dict()) or {"tau": 1.0}

    monkeypatch.chdir(folder)
    monkeypatch.setattr(recipe_script, "held_out_acceptance", recording)
    recipe_script.run(read_recipe(["--config", "recipe.yaml"])[0])
    return json.loads((folder / "runs" / "x" / "mdflash" / "training.json").read_text()), seen


def test_run_checkpoints_and_resume(project, tmp_path, monkeypatch):
    """One run and its second half again: bit-identical. Every folder it writes is a plain drafter, merged."""
    uncut, seen = train(tmp_path / "whole", project, monkeypatch)
    whole = tmp_path / "whole" / "runs" / "x" / "mdflash"
    losses = [entry["loss"] for entry in uncut["loss_curve"] if "loss" in entry]
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])

    base, finished = load_drafter(project / "base").state_dict(), load_drafter(whole).state_dict()
    halfway = load_drafter(whole / "checkpoint-5").state_dict()
    for key in base:  # norms, heads, embeddings and LM head are as they were
        assert torch.equal(finished[key], base[key]) != is_adapted(key, LORA), key
    assert set(uncut["frozen_sha256"]) == {key for key in base if not is_adapted(key, LORA)}
    adapters = load_file(whole / "checkpoint-5" / "lora.safetensors")
    adapters = {key.removeprefix("drafter."): tensor for key, tensor in adapters.items()}
    for key, tensor in by_hand(base, adapters, LORA).items():
        torch.testing.assert_close(halfway[key], tensor)
    assert [file.name for file in whole.glob("*.safetensors")] == ["model.safetensors"]
    for decoded, written in ((seen[0], halfway), (seen[-1], finished)):  # held-out decoding saw the merged drafter
        assert all(torch.equal(decoded[key], written[key]) for key in written)

    stage = tmp_path / "again" / "runs" / "x" / "mdflash"
    stage.mkdir(parents=True)
    (stage / "checkpoint-5").symlink_to(whole / "checkpoint-5")
    (stage / "stage.json").write_text((whole / "stage.json").read_text())
    resumed, _ = train(tmp_path / "again", project, monkeypatch)
    assert resumed["loss_curve"] == uncut["loss_curve"]
    ours = load_file(stage / "model.safetensors")
    assert all(torch.equal(ours[key], finished[key]) for key in finished)
    last = Path("checkpoint-10") / "lora.safetensors"
    assert (stage / last).read_bytes() == (whole / last).read_bytes()


def test_every_target_names_a_weight(drafter):
    for name in LORA_TARGETS:
        lora = LoraSection(targets=[name])
        assert any(is_adapted(key, lora) for key in drafter.state_dict()), name
