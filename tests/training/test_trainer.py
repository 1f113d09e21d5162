"""The trainer: exact normalisation, ranks, accumulation, resume, frozen tensors, checkpoints."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_target, make_tokenizer
from safetensors.torch import load_file

from mdflash import load_drafter
from mdflash.drafter.model import HEADS_OF_DSPARK
from mdflash.recipe import BEYOND, Recipe, TargetSection
from mdflash.training.checkpoints import ASIDE, newest_first
from mdflash.training.frozen import check_unchanged, frozen_part, hashes
from recipes import train_mdflash

ROOT = Path(__file__).resolve().parents[2]
ACCIDENT = Path(__file__).with_name("accident.py")
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


def recipe(folder: Path, shard: bool = False, **overrides) -> Path:
    settings = SETTINGS | overrides
    data = {
        "name": "x", "target": {"path": "target", "dtype": "float32", "shard": shard}, "data": {"held_out": 3},
        "drafter": {"num_hidden_layers": 1, "target_layer_ids": [0, 2], "block_size": 3, "mask_token_id": 3, "markov_rank": 8},
        "dspark": settings | {"lora": None} | BEYOND, "mdflash": settings,
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
    """8x1 with padded texts, 2x4 and two ranks over gloo with packed ones, these with everything offloaded and checkpointed
    (ZeRO-3, decoding held-out prompts midway) or with a sharded target (ZeRO-1): the same loss and gradient norm. The last
    global batch is padded, not dropped."""
    engines = ROOT / "recipes" / "deepspeed"
    offloaded = {"deepspeed": str(engines / "zero3_offload.json"), "activation_checkpointing": True, "eval_steps": 2}
    runs = [
        train(
            fresh(project, tmp_path / name), ranks=ranks, micro_batch_size=micro, max_steps=5, loss_rows=rows, **engine
        )
        for name, ranks, micro, rows, engine in (
            ("whole", 1, 8, 4096, {"packing": False}),
            ("accumulated", 1, 2, 12, {}),
            ("offloaded", 2, 2, 12, offloaded),
            ("sharded", 2, 2, 12, {"deepspeed": str(engines / "zero1.json"), "shard": True, "eval_steps": 2}),
        )
    ]
    reference = losses(runs[0])
    assert len(reference) == 5  # 26 texts: batches of 8, 8, 8, 2, then the next epoch
    for run in runs[1:]:
        for ours, theirs in zip(losses(run), reference, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-4)
        assert run["metrics"]["eval_loss"] == pytest.approx(runs[0]["metrics"]["eval_loss"], rel=1e-4)
    assert [run["ranks"] for run in runs] == [1, 1, 2, 2]
    assert "eval_tau" in runs[2]["metrics"]
    assert "eval_tau" not in runs[3]["metrics"]  # a sharded target decodes nothing


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
        for name, tensor in frozen_part(base, HEADS_OF_DSPARK).items():
            assert torch.equal(state[name], tensor), name
        assert not torch.equal(state["layers.0.mlp.up_proj.weight"], base["layers.0.mlp.up_proj.weight"])
    config = json.loads((stage / "config.json").read_text())
    assert config["mdflash_config"]["anchor_counts"] == [1, 2, 3, 4]
    assert config["architectures"] == ["Qwen3DSparkModel"]
    repeated = train(folder, launcher=launcher, deepspeed=zero1, max_steps=3)
    assert repeated == record  # a finished stage is left alone


def test_the_markov_head_trains_on_demand(project, tmp_path):
    """`train_head` frees it and nothing else of what a finetune leaves alone."""
    folder = fresh(project, tmp_path)
    record = train(folder, train_head=True, max_steps=2, windows="serial")
    before, after = (load_drafter(folder / "runs" / "x" / stage).state_dict() for stage in ("dspark", "mdflash"))
    same = {name.split(".")[0] for name in before if torch.equal(before[name], after[name])}
    assert same == {"embed_tokens", "lm_head", "confidence_head"}
    assert not any(name.startswith("markov_head") for name in record["frozen_sha256"])
    config = json.loads((folder / "runs" / "x" / "mdflash" / "config.json").read_text())
    assert config["mdflash_config"]["beyond_the_paper"]["train_head"] is True
    assert config["mdflash_config"]["anchor_counts"] == [0]


@pytest.mark.parametrize(("stage", "windows", "expected"), [
    ("mdflash", "trees", "dpara"),
    ("mdflash", "serial", "dspark"),
    ("dflash", "trees", "dflash"),
])  # fmt: skip
def test_held_out_acceptance_decodes_as_the_stage_does(monkeypatch, target, stage, windows, expected):
    methods = []

    def decode(target, drafter, prompts, method, *rest, **options):
        methods.append(method)
        return []

    monkeypatch.setattr(train_mdflash, "decode", decode)
    recipe = Recipe(name="x", stage=stage, target=TargetSection("t"))
    recipe.mdflash.windows = windows
    assert train_mdflash.held_out_acceptance(recipe, target, [[1]])(None) == {"tau": 0}
    assert methods == [expected]


def run(folder, kind="none", step=0, rank=0, ranks=1, **settings):
    """Train in own processes with one accident: exit status, output, and what each step trained on."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    launcher = launcher if "deepspeed" in settings else []
    record = folder / f"{kind}-{step}-{ranks}"
    command = [sys.executable, *launcher, str(ACCIDENT), kind, str(step), str(rank), str(record), "--config"]
    done = subprocess.run([*command, str(recipe(folder, **settings))], cwd=folder, capture_output=True, text=True)
    trained = {}
    for file in sorted(folder.glob(record.name + ".*")):
        for line in file.read_text().splitlines():
            at, key = json.loads(line)
            trained.setdefault(at, []).append(key)
    return done.returncode, done.stdout + done.stderr, {at: sorted(keys) for at, keys in trained.items()}


def stage(folder):
    return folder / "runs" / "x" / "mdflash"


def record_of(folder):
    return json.loads((stage(folder) / "training.json").read_text())


@pytest.fixture(scope="module")
def uncut(project, tmp_path_factory):
    """The uninterrupted run; it ends within its third epoch."""
    folder = fresh(project, tmp_path_factory.mktemp("uncut"))
    status, output, trained = run(folder, packing=False, save_steps=2, eval_steps=5, micro_batch_size=2)
    assert status == 0, output[-4000:]
    return folder, trained


@pytest.mark.slow
def test_killed_runs_resume_bit_for_bit(uncut, project, tmp_path):
    """Killed while step 4 is saved, then within step 8, then finished: samples, windows, learning rates, losses and
    weights are the uninterrupted run's."""
    folder = fresh(project, tmp_path)
    settings = dict(packing=False, save_steps=2, eval_steps=5, micro_batch_size=2)
    status, output, _ = run(folder, "mid-save", 4, **settings)
    assert status == -signal.SIGKILL, output[-4000:]
    assert [path.name for path in newest_first(stage(folder))] == ["checkpoint-2"]
    assert (stage(folder) / ASIDE / "checkpoint-4" / "model.safetensors").is_file()
    status, output, trained = run(folder, "mid-step", 8, **settings)
    assert status == -signal.SIGKILL, output[-4000:]
    assert min(trained) == 3
    assert not (stage(folder) / ASIDE / "checkpoint-4").exists()
    (stage(folder) / "checkpoint-7").mkdir()
    status, output, trained = run(folder, **settings)
    assert status == 0, output[-4000:]
    assert "checkpoint-7 is torn (no readable sealed.json): passed over" in output
    assert trained == {at: keys for at, keys in uncut[1].items() if at > 6}
    assert record_of(folder)["loss_curve"] == record_of(uncut[0])["loss_curve"]
    assert [path.name for path in newest_first(stage(folder))] == ["checkpoint-10", "checkpoint-8"]
    ours, theirs = (load_file(stage(place) / "model.safetensors") for place in (folder, uncut[0]))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    (
        stage(folder) / "training.json"
    ).unlink()  # killed after its last step: it evaluates and exports, but does not train
    status, output, trained = run(folder, "again", **settings)
    assert status == 0, output[-4000:]
    assert not trained
    assert record_of(folder)["steps"] == 10
    again = load_file(stage(folder) / "model.safetensors")
    assert all(torch.equal(again[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_ranks_may_change_and_nan_stops_all(uncut, project, tmp_path):
    """ZeRO-3: two ranks stopped by a NaN on one of them, one rank killed, two ranks to the end: the plain run's samples,
    windows, learning rates and, to fp32 rounding, losses."""
    folder = fresh(project, tmp_path)
    settings = dict(
        packing=False, save_steps=2, eval_steps=5, deepspeed=str(ROOT / "recipes" / "deepspeed" / "zero3.json")
    )
    status, output, _ = run(folder, "nan", 4, rank=1, ranks=2, micro_batch_size=2, **settings)
    assert status != 0
    message = "error: NaN or infinity at step 4, first in the gradient of layers.0.mlp.up_proj.weight"
    assert output.count(message) == 2, output[-4000:]  # on both ranks
    assert [path.name for path in newest_first(stage(folder))] == ["checkpoint-2"]
    status, output, one = run(folder, "mid-step", 8, micro_batch_size=4, **settings)
    assert "Signal 9 (SIGKILL)" in output, output[-4000:]
    assert "checkpoint-2 was written by 2 rank(s), 1 run now" in output
    status, output, two = run(folder, ranks=2, micro_batch_size=1, **settings)
    assert status == 0, output[-4000:]
    assert "checkpoint-6 was written by 1 rank(s), 2 run now" in output
    assert {at: keys for at, keys in (one | two).items()} == {at: keys for at, keys in uncut[1].items() if at > 2}
    ours, theirs = record_of(folder), record_of(uncut[0])
    for mine, other in zip(ours["loss_curve"], theirs["loss_curve"], strict=True):
        assert mine.get("learning_rate") == other.get("learning_rate")
    for mine, other in zip(losses(ours), losses(theirs), strict=True):
        assert mine == pytest.approx(other, rel=2e-4)
    assert ours["metrics"]["eval_loss"] == pytest.approx(theirs["metrics"]["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_adapters_under_zero3_on_two_ranks(project, tmp_path):
    """The plain one-process run's losses, merged weights and adapters, gathered from their shards."""
    settings = dict(lora={"r": 4}, learning_rate=1e-2, micro_batch_size=2, max_steps=2, save_steps=2)
    folders = [fresh(project, tmp_path / name) for name in ("plain", "ranks")]
    zero3 = str(ROOT / "recipes" / "deepspeed" / "zero3.json")
    runs = [train(folders[0], **settings), train(folders[1], ranks=2, deepspeed=zero3, **settings)]
    for ours, theirs in zip(*map(losses, runs), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    for file in ("model.safetensors", "checkpoint-2/model.safetensors", "checkpoint-2/lora.safetensors"):
        theirs, ours = (load_file(folder / "runs" / "x" / "mdflash" / file) for folder in folders)
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-4)


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
    settings = folder / "runs" / "x" / "mdflash" / "stage.json"
    older = {name: value for name, value in json.loads(settings.read_text()).items() if name != "slot_decay"}
    settings.write_text(json.dumps(older))  # a run from before a setting existed had its default
    assert train(folder, max_steps=1)["steps"] == 1
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
