"""The trainer: exact normalisation, ranks, accumulation, resume, frozen tensors, checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_target, make_tokenizer
from safetensors.torch import load_file

from mdflash import load_drafter
from mdflash.training.frozen import check_unchanged, frozen_part, hashes

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = dict(
    learning_rate=1e-3, max_steps=10, global_batch_size=8, micro_batch_size=4, starts_per_text=4, max_length=128, bf16=False,
    logging_steps=1, deepspeed=None, eval_requests=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a tiny target, answers and a bootstrapped DSpark drafter."""
    folder = tmp_path_factory.mktemp("project")
    tokenizer = make_tokenizer()
    target = make_target(vocab=len(tokenizer))
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    answers = folder / "runs" / "x" / "answers"
    answers.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    with (answers / "answers.jsonl").open("w") as file:
        for i in range(29):
            length = torch.randint(8, 40, (), generator=generator).item()
            text = "".join("abc "[j] for j in torch.randint(0, 4, (length,), generator=generator))
            messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"id": f"p{i}@t0.0", "messages": messages}) + "\n")
    train(folder, "dspark")
    return folder


def recipe(folder: Path, **overrides) -> Path:
    settings = SETTINGS | overrides
    data = {
        "name": "x", "target": {"path": "target", "dtype": "float32"}, "data": {"held_out": 3},
        "drafter": {"num_hidden_layers": 1, "target_layer_ids": [0, 2], "block_size": 3, "mask_token_id": 3, "markov_rank": 8},
        "dspark": settings, "mdflash": settings,
    }  # fmt: skip
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(data))
    return file


def train(folder: Path, stage: str = "mdflash", ranks: int = 1, launcher: list[str] | None = None, **overrides) -> dict:
    """Run a stage in its own process(es); returns training.json."""
    launcher = launcher or [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    if ranks == 1 and launcher[1:2] == ["-m"]:
        launcher = [sys.executable]
    command = [*launcher, str(ROOT / "recipes" / "train_mdflash.py"), "--config", str(recipe(folder, **overrides))]
    done = subprocess.run([*command, "--stage", stage], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "runs" / "x" / stage / "training.json").read_text())


def fresh(project: Path, tmp_path: Path) -> Path:
    """A copy of the project whose mdflash stage is untouched (files are linked, runs are its own)."""
    folder = tmp_path / "run"
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "target").symlink_to(project / "target")
    for part in ("answers", "dspark"):
        (folder / "runs" / "x" / part).symlink_to(project / "runs" / "x" / part)
    return folder


def losses(record: dict) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in record["loss_curve"] if "loss" in entry]


@pytest.mark.slow
def test_global_batch_is_normalised_exactly(project, tmp_path):
    """8x1 with padded texts, 2x4 and two ranks over gloo (ZeRO-3, decoding held-out prompts midway) with packed ones: the same
    loss and gradient norm. The last global batch is padded, not dropped."""
    zero3 = {"deepspeed": str(ROOT / "recipes" / "deepspeed" / "zero3.json"), "eval_steps": 2}
    runs = [
        train(
            fresh(project, tmp_path / name), ranks=ranks, micro_batch_size=micro, max_steps=5, loss_rows=rows, **engine
        )
        for name, ranks, micro, rows, engine in (
            ("whole", 1, 8, 4096, {"packing": False}),
            ("accumulated", 1, 2, 12, {}),
            ("ranks", 2, 2, 12, zero3),
        )
    ]
    reference = losses(runs[0])
    assert len(reference) == 5  # 26 texts: batches of 8, 8, 8, 2, then the next epoch
    for run in runs[1:]:
        for ours, theirs in zip(losses(run), reference, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4)
        assert run["metrics"]["eval_loss"] == pytest.approx(runs[0]["metrics"]["eval_loss"], rel=1e-4)
    assert runs[2]["ranks"] == 2


@pytest.mark.slow
def test_ten_steps_equal_five_and_five(project, tmp_path):
    """Sample order, windows, learning rate, loss and weights; the cut falls inside the second epoch."""
    whole = fresh(project, tmp_path / "whole")
    uncut = train(whole, save_steps=5, eval_steps=5)
    resumed = fresh(project, tmp_path / "resumed")
    stage = resumed / "runs" / "x" / "mdflash"
    source = whole / "runs" / "x" / "mdflash"
    stage.mkdir()
    (stage / "checkpoint-5").symlink_to(source / "checkpoint-5")
    (stage / "stage.json").write_text((source / "stage.json").read_text())
    (stage / "checkpoint-7").mkdir()  # torn by a kill: named and passed over
    again = train(resumed, save_steps=5, eval_steps=5)
    assert [{k: v for k, v in e.items()} for e in again["loss_curve"]] == uncut["loss_curve"]
    ours, theirs = load_file(stage / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_deepspeed_launcher_and_contract(project, tmp_path):
    """The command users run: same losses as the plain Trainer; a complete checkpoint; frozen tensors proven."""
    folder = fresh(project, tmp_path / "ds")
    zero1 = str(ROOT / "recipes" / "deepspeed" / "zero1.json")
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--master_port=29717"]
    record = train(folder, launcher=launcher, deepspeed=zero1, max_steps=3, save_steps=2)
    plain = train(fresh(project, tmp_path / "plain"), max_steps=3)
    for ours, theirs in zip(losses(record), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    stage = folder / "runs" / "x" / "mdflash"
    base = load_drafter(project / "runs" / "x" / "dspark").state_dict()
    for place in (stage, stage / "checkpoint-2"):
        state = load_drafter(place).state_dict()
        for name, tensor in frozen_part(base, heads=True).items():
            assert torch.equal(state[name], tensor), name
        assert not torch.equal(state["layers.0.mlp.up_proj.weight"], base["layers.0.mlp.up_proj.weight"])
    config = json.loads((stage / "config.json").read_text())
    assert config["mdflash_config"]["anchor_counts"] == [1, 2, 3, 4]
    assert config["architectures"] == ["Qwen3DSparkModel"]
    repeated = train(folder, launcher=launcher, deepspeed=zero1, max_steps=3)
    assert repeated == record  # a finished stage is left alone


def test_zero_learning_rate_changes_no_bit(project, tmp_path):
    folder = fresh(project, tmp_path / "zero")
    train(folder, learning_rate=0.0, max_steps=1, windows="independent")
    base = load_file(project / "runs" / "x" / "dspark" / "model.safetensors")
    ours = load_file(folder / "runs" / "x" / "mdflash" / "model.safetensors")
    assert ours.keys() == base.keys()
    assert all(torch.equal(ours[key], base[key]) for key in base)


def test_other_settings_are_refused(project, tmp_path):
    folder = fresh(project, tmp_path / "other")
    train(folder, max_steps=1)
    command = [sys.executable, str(ROOT / "recipes" / "train_mdflash.py"), "--config", str(recipe(folder, max_steps=2))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode != 0
    assert "max_steps 1 there, 2 here" in done.stderr
    bad = subprocess.run(
        [*command, "--mdflash.micro_batch_size", "3", "--name", "y"], cwd=folder, capture_output=True, text=True
    )
    assert bad.returncode != 0


def test_a_changed_frozen_tensor_is_an_error():
    before = hashes({"lm_head.weight": torch.ones(2), "markov_head.markov_w1.weight": torch.zeros(3)}.items())
    check_unchanged(before, dict(before), "drafter")
    after = before | hashes({"lm_head.weight": torch.tensor([1.0, 1.0000001])}.items())
    with pytest.raises(RuntimeError, match="lm_head.weight"):
        check_unchanged(before, after, "drafter")
