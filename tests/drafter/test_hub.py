"""Export and push: the contract survives, the card tells the origin, nothing else is uploaded and no token leaks."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FIXTURES
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from mdflash import load_drafter
from mdflash.drafter import hub

BLOCK = {
    "version": 1, "draft_length": 7, "anchor_counts": [1, 2, 3, 4, 5, 6, 7, 8], "base_checkpoint": "owner/dspark-base",
    "base_revision": "baserev", "target": "owner/target", "target_revision": "targetrev", "data_sha256": "d" * 64,
    "chat_template_sha256": "c" * 64, "thinking": False,
}  # fmt: skip
TRAINING = {
    "stage": "mdflash", "steps": 450, "texts": 1952,
    "recipe": {"data": {"prompts": "/somewhere/private/prompts.jsonl"}},
    "loss_curve": [{"loss": 1.0}], "frozen_sha256": {"embed_tokens.weight": "e" * 64},
}  # fmt: skip
SUMMARY = {
    "methods": {
        "dspark": {
            "average": {"tau_pooled": 5.67, "tau_ci95": [5.5, 5.8], "tau_macro": 5.6, "tau_macro_ci95": [5.4, 5.7]},
            "benchmarks": {"shopping": {"tau_pooled": 5.9, "tau_ci95": [5.7, 6.1]}},
        },
        "dpara": {
            "average": {"tau_pooled": 5.17, "tau_macro": 5.1, "tau_ci95": [5.0, 5.3]},
            "benchmarks": {"shopping": {"tau_pooled": None, "tau_ci95": None}},
        },
    },
    "ratios": {"mdflash_over_dspark": {"value": 0.9118, "ci95": [0.9, 0.92]}, "mdflash_over_untuned": None},
    "command": "python -m eval.run --config recipes/tiny.yaml",
    "revision": "abc123",
    "versions": {"torch": "2.9"},
    "devices": {"target": {"device": "cpu", "name": "a CPU"}, "drafter": {"device": "cpu", "name": "a CPU"}},
}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A finished M-DFlash stage, checkpoints of the trainer beside it."""
    folder = tmp_path / "mdflash"
    shutil.copytree(FIXTURES / "dspark_tiny_vanilla", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mdflash_config": BLOCK}))
    (folder / "training.json").write_text(json.dumps(TRAINING))
    (folder / "checkpoint-450").mkdir()
    return folder


@pytest.fixture
def exported(checkpoint, tmp_path) -> Path:
    return hub.export(checkpoint, tmp_path / "export")


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_export_keeps_every_tensor_and_field(tmp_path, head):
    source = FIXTURES / f"dspark_tiny_{head}"
    folder = hub.export(source, tmp_path / "export")
    before, after = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    fields, kept = (json.loads((place / "config.json").read_text()) for place in (source, folder))
    assert {name: kept.get(name) for name in fields} == fields
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_exported_config_holds_the_mdflash_block(exported):
    assert load_drafter(exported).config.mdflash_config == BLOCK


def test_card_tells_the_origin(exported):
    card = ModelCard.load(exported / "README.md")
    assert card.data.base_model == "owner/target"
    assert (card.data.library_name, card.data.license) == ("mdflash", "apache-2.0")
    assert card.data.pipeline_tag == "text-generation"
    for fact in ("targetrev", "owner/dspark-base", "baserev", "d" * 64, "c" * 64, "thinking | off", "steps: 450"):
        assert fact in card.text
    assert 'mdflash.load_target("owner/target", dtype="float32", revision="targetrev")' in card.text
    assert "mdflash.load_drafter(" in card.text
    assert 'method="dpara"' in card.text
    assert "engines that read DSpark drafters load it unchanged" in card.text


def test_card_tells_what_goes_beyond_the_paper(checkpoint, tmp_path):
    """And decodes with it; settings left as the paper has them are not told."""
    config = json.loads((checkpoint / "config.json").read_text())
    early = {
        "in_flight_taps": [0, 1],
        "known_bonus": 0.5,
        "serial_windows": False,
        "spine_loss": 0.0,
        "train_head": True,
    }
    config["mdflash_config"]["beyond_the_paper"] = early
    (checkpoint / "config.json").write_text(json.dumps(config))
    text = (hub.export(checkpoint, tmp_path / "early") / "README.md").read_text()
    assert "in_flight_taps: [0, 1], known_bonus: 0.5, train_head: True" in text
    assert 'in_flight_taps="auto", bonus_guesses="auto"' in text


def test_card_leaves_out_paths_of_one_machine_and_long_lists(exported):
    text = (exported / "README.md").read_text()
    assert "prompts: prompts.jsonl" in text
    assert "/somewhere" not in text
    assert "loss_curve" not in text
    assert "Acceptance length" not in text


def test_card_shows_the_figures_with_their_intervals(checkpoint, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    folder = hub.export(checkpoint, tmp_path / "export", tmp_path / "summary.json", license="mit")
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "mit"
    assert "| dspark | 5.90 [5.70, 6.10] | 5.67 [5.50, 5.80] | 5.60 [5.40, 5.70] |" in card.text
    assert "| dpara | - | 5.17 [5.00, 5.30] | 5.10 |" in card.text
    assert "mdflash over dspark: 0.912 [0.900, 0.920]" in card.text
    assert "`python -m eval.run --config recipes/tiny.yaml`, code revision abc123, torch 2.9" in card.text
    assert "drafter cpu (a CPU)" in card.text


def test_card_of_a_local_target_names_no_base_model(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["mdflash_config"]["target"] = str(tmp_path / "target")
    (checkpoint / "config.json").write_text(json.dumps(config))
    card = ModelCard.load(hub.export(checkpoint, tmp_path / "export") / "README.md")
    assert card.data.base_model is None
    assert str(tmp_path) not in str(card)


def test_card_of_a_dspark_drafter_says_so(tmp_path):
    text = (hub.export(FIXTURES / "dspark_tiny_gated", tmp_path / "export") / "README.md").read_text()
    assert "# DSpark drafter for its target" in text
    assert 'method="dspark"' in text
    assert "DPara" not in text


def test_export_refuses_faulty_checkpoints_before_it_writes(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hub.export(tmp_path / "nowhere", tmp_path / "export")
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        hub.export(checkpoint, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"NaN or infinity in norm\.weight"):
        hub.export(checkpoint, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_dry_run_lists_files_and_needs_no_network(exported, monkeypatch, capsys):
    monkeypatch.setattr(hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    assert hub.push(exported, "owner/name", private=True, dry_run=True) is None
    out = capsys.readouterr().out
    assert "would upload to owner/name (private)" in out
    for name in ("README.md", "config.json", "model.safetensors"):
        assert name in out
    assert " kB" in out


def test_push_uploads_the_listed_files_only(exported, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, repo_id, private, exist_ok):
            calls.append(("repo", repo_id, private, exist_ok))

        def create_branch(self, repo_id, branch, exist_ok):
            calls.append(("branch", branch))

        def upload_folder(self, repo_id, folder_path, revision, allow_patterns):
            calls.append(("upload", revision, sorted(allow_patterns)))
            return SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(hub, "HfApi", Api)
    (exported / "notes.txt").write_text("stays here")
    assert hub.push(exported, "owner/name", revision="v1") == "https://hub/commit"
    files = ["README.md", "config.json", "model.safetensors"]
    assert calls == [("repo", "owner/name", False, True), ("branch", "v1"), ("upload", "v1", files)]


def test_failing_push_names_the_remedy_and_no_token(exported, monkeypatch, capsys):
    class Api:
        def create_repo(self, *args, **kwargs):
            raise OSError("403 for hf_AbCd1234 and other-secret")

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setenv("HF_TOKEN", "other-secret")
    with pytest.raises(hub.PushError) as caught:
        hub.push(exported, "owner/name")
    text = str(caught.value) + "".join(capsys.readouterr())
    assert "403 for [token] and [token]" in text
    assert "hf auth login" in text
    assert "AbCd1234" not in text
    assert "other-secret" not in text
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "training_args.bin", "checkpoint-5/model.safetensors", "global_step5/x"]
)
def test_push_refuses_training_state(exported, name):
    (exported / name).parent.mkdir(exist_ok=True)
    (exported / name).write_text("x")
    with pytest.raises(ValueError, match=r"training state .*mdflash export"):
        hub.push(exported, "owner/name", dry_run=True)


def test_push_refuses_a_folder_without_card(exported):
    (exported / "README.md").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks README\.md"):
        hub.push(exported, "owner/name", dry_run=True)


@pytest.mark.parametrize("repo_id", ["name", "a/b/c", "owner/na me", "owner/", "--/x"])
def test_bad_repo_id(exported, repo_id):
    with pytest.raises(ValueError, match="use owner/name"):
        hub.push(exported, repo_id, dry_run=True)
