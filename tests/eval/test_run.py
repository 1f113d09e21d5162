"""The whole evaluation on a random target and random drafters: what it writes, and what it refuses."""

import json
import re
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eval import offline, run, study
from mdflash import MDFlashConfig, MDFlashModel

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
METHODS = ["autoregressive", "dspark", "dflash", "dpara-untuned", "dpara"]
RECIPE = """
name: toy
target: {path: target, dtype: float32}
drafter: {block_size: 3}
eval:
  folder: prompts
  benchmarks: [alpha, beta]
  requests: 2
  max_new_tokens: 12
  devices: cpu,cpu
  methods: [autoregressive, dspark, dflash, dpara-untuned, dpara]
"""


def build_target(folder, **shape) -> Qwen3ForCausalLM:
    """A random Qwen3 with a byte-level tokenizer and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<|start|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["a small text"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=TEMPLATE).save_pretrained(folder)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=3, **SHAPE | shape))
    model.generation_config = GenerationConfig(eos_token_id=1)
    model.save_pretrained(folder)
    return model


def build_drafter(folder, target: Qwen3ForCausalLM, rank: int, **shape) -> None:
    """A random drafter of d = 3 for that target."""
    drafter = MDFlashModel(
        MDFlashConfig(
            num_hidden_layers=1, num_target_layers=3, target_layer_ids=[0, 1], block_size=3, mask_token_id=299,
            markov_rank=rank, markov_head_type="vanilla" if rank else None, **SHAPE | shape,
        )
    )  # fmt: skip
    drafter.embed_tokens.load_state_dict(target.get_input_embeddings().state_dict())
    drafter.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    drafter.save_pretrained(folder)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A working folder with target, drafters, prompts and recipe."""
    folder = tmp_path_factory.mktemp("project")
    torch.manual_seed(0)
    target = build_target(folder / "target")
    for stage, rank in (("dspark", 4), ("mdflash", 4), ("dflash", 0)):
        build_drafter(folder / "runs" / "toy" / stage, target, rank)
    (folder / "prompts").mkdir()
    for name in ("alpha", "beta"):
        rows = [{"id": f"{name}-{i}", "turns": [f"{name} asks {i}", "and again"]} for i in range(3)]
        (folder / "prompts" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "toy.yaml").write_text(RECIPE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model only loses time to threads that wait for each other
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def inside(project, monkeypatch):
    monkeypatch.chdir(project)
    return project


@pytest.fixture(scope="module")
def results(project):
    """The files of one greedy run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        run.main(["--config", "toy.yaml", f"--eval.folder={project / 'prompts'}"])
    return project / "results" / "toy"


@pytest.fixture(scope="module")
def summary(results):
    return json.loads((results / "summary.json").read_text())


def test_files(results):
    assert {file.name for file in results.iterdir()} == {
        "summary.json", "requests.jsonl", "table.md", "tau_by_benchmark.png", "acceptance_by_position.png"
    }  # fmt: skip
    assert [file.name for file in results.parent.iterdir()] == ["toy"]  # no temporary folder is left
    for name in ("tau_by_benchmark.png", "acceptance_by_position.png"):
        assert (results / name).read_bytes().startswith(b"\x89PNG")


def test_summary_says_how_it_was_made(summary, project):
    assert summary["command"] == "python -m eval.run --config toy.yaml --eval.folder=prompts"
    assert summary["config"]["eval"]["folder"] == "prompts"
    assert str(project) not in json.dumps(summary)
    assert summary["revision"]
    assert {"python", "torch", "transformers", "mdflash"} <= summary["versions"].keys()
    assert summary["devices"]["drafter"].keys() == {"device", "name"}
    prompts = summary["prompts"]
    assert (prompts["thinking"], prompts["turns"]) == (False, "first")
    assert len(prompts["sha256"]) == len(prompts["chat_template_sha256"]) == 64
    assert prompts["benchmarks"]["alpha"]["requests"] == 2
    assert prompts["benchmarks"]["alpha"]["source"]["file"] == "alpha.jsonl"


def test_summary_has_every_method_and_benchmark(summary):
    assert list(summary["methods"]) == METHODS
    for figures in summary["methods"].values():
        assert list(figures["benchmarks"]) == ["alpha", "beta"]
        for group in (figures["average"], *figures["benchmarks"].values()):
            assert group["tau_ci95"][0] <= group["tau_pooled"] <= group["tau_ci95"][1]
            assert group["speedup"].keys() == {"value", "ci95", "whole_request"}
            assert group["fallback_rounds"] == 0
        assert figures["average"]["requests"] == 4
    serial = summary["methods"]["autoregressive"]["average"]
    assert serial["tau_pooled"] == 1
    assert serial["cold_starts"] == 0
    assert summary["methods"]["dpara"]["average"]["cold_starts"] == 4
    assert len(summary["methods"]["dpara"]["average"]["positions"]["proposed"]) == 3
    assert summary["ratios"].keys() == {"dpara_over_untuned", "dpara_over_dspark"}


def test_every_method_writes_the_autoregressive_answers(summary, results):
    assert summary["lossless"] == {"greedy_total": 16, "greedy_identical": 16, "divergences": []}
    rows = [json.loads(line) for line in (results / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == len(METHODS) * 4
    answers = {row["id"]: row["token_ids"] for row in rows if row["method"] == "autoregressive"}
    for row in rows:
        assert row["token_ids"] == answers[row["id"]]
        assert row["tokens"] == len(row["token_ids"]) == 1 + sum(row["committed"])
        assert len(row["accepted"]) == len(row["proposed"]) == len(row["fallback"]) == len(row["cold_start"])


def test_table(results, summary):
    table = (results / "table.md").read_text()
    for text in ("| alpha |", "| beta |", "| pooled average |", "| macro average |", summary["command"]):
        assert text in table
    assert "τ, dpara over untuned: " in table
    assert "identical to autoregressive: 16 of 16" in table
    widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_sampling_one_method_in_batches(inside, results):
    """Without an autoregressive run there is no speedup, and losslessness cannot be read off sampled answers."""
    args = ["--eval.temperature=1", "--eval.methods=[dpara]", "--eval.batch_size=2", "--name=sampled"]
    for stage in ("dspark", "mdflash"):
        (inside / "runs" / "sampled").mkdir(exist_ok=True)
        link = inside / "runs" / "sampled" / stage
        if not link.exists():
            link.symlink_to(inside / "runs" / "toy" / stage)
    summary = run.main(["--config", "toy.yaml", *args])
    assert summary["lossless"] is None
    assert summary["ratios"] == {}
    assert summary["methods"]["dpara"]["average"]["speedup"] is None
    assert (inside / "results" / "sampled" / "table.md").is_file()


def test_a_crash_keeps_earlier_results_and_foreign_files_stay(inside, results, monkeypatch):
    before = {file.name: file.read_bytes() for file in results.iterdir()}
    monkeypatch.setattr(run, "write_report", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.write_results({}, {}, results)
    assert {file.name: file.read_bytes() for file in results.iterdir()} == before


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (["--eval.benchmarks=[]"], ValueError, r"eval\.benchmarks=\[\]"),
        (["--eval.benchmarks=[gamma]"], FileNotFoundError, r"gamma\.jsonl is missing"),
        (["--eval.benchmarks=[gamma]", "--eval.folder=null"], ValueError, "'gamma' is not built in"),
        (["--eval.benchmarks=[alpha,alpha]"], ValueError, "names one twice"),
        (["--eval.methods=[]"], ValueError, r"eval\.methods=\[\]"),
        (["--eval.methods=[pearl]"], ValueError, "eval.methods names 'pearl'"),
        (["--eval.max_new_tokens=0"], ValueError, r"eval\.max_new_tokens=0"),
        (
            ["--name=other"],
            FileNotFoundError,
            "runs/other/dspark .* `deepspeed recipes/train_mdflash.py --config toy.yaml --stage dspark`",
        ),
        (["--drafter.base=runs/toy/dflash"], ValueError, "needs a Markov head"),
    ],
)
def test_refused_before_the_target_is_loaded(inside, monkeypatch, args, error, message):
    monkeypatch.setattr(run, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    with pytest.raises(error, match=message):
        run.main(["--config", "toy.yaml", *args])


def test_long_prompts_are_refused_before_anything_is_decoded(inside, monkeypatch):
    monkeypatch.setattr(run, "decode", lambda *args, **kwargs: pytest.fail("decoding began"))
    with pytest.raises(ValueError, match="exceeds the target's 256 positions"):
        run.main(["--config", "toy.yaml", "--eval.max_new_tokens=250"])


def test_another_prompt_format_than_in_training_is_said(inside, monkeypatch):
    config = inside / "runs" / "toy" / "mdflash" / "config.json"
    saved = config.read_text()
    config.write_text(json.dumps(json.loads(saved) | {"mdflash_config": {"thinking": True}}))
    monkeypatch.setattr(run, "write_results", lambda *args: None)
    try:
        with pytest.warns(UserWarning, match="mdflash drafter was trained with thinking=True, this run has False"):
            run.main(["--config", "toy.yaml", "--eval.methods=[dpara]", "--eval.benchmarks=[alpha]"])
        with pytest.warns(UserWarning, match="runs/toy/mdflash drafter was trained with thinking=True"):
            offline.main(["--config", "toy.yaml", "--eval.benchmarks=[alpha]", "--output", "warned.json"])
    finally:
        config.write_text(saved)


def test_portable_paths(inside):
    assert run.portable(["--x=/far/away/model", str(inside / "a/b"), 3, None]) == ["--x=model", "a/b", 3, None]


def test_default_devices(monkeypatch):
    for gpus, devices in ((0, "cpu,cpu"), (1, "cuda:0,cuda:0"), (2, "cuda:0,cuda:1"), (8, "cuda:0,cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert run.default_devices() == devices


def test_features_in_flight_and_guesses_in_an_evaluation(project, monkeypatch):
    """Lossless like the rest; the finished drafter alone takes them, and its right guesses are counted. The offline replay of
    the same setting has the same acceptance length."""
    monkeypatch.chdir(project)
    extra = ["--eval.in_flight_taps", "1", "--eval.bonus_guesses", "2", "--eval.output", "results/beyond"]
    summary = run.main(["--config", "toy.yaml", *extra])
    assert summary["lossless"]["greedy_identical"] == summary["lossless"]["greedy_total"]
    guessed = {name: figures["average"]["guessed_rounds"] for name, figures in summary["methods"].items()}
    assert guessed["dpara-untuned"] == guessed["dspark"] == 0
    found = offline.main(
        ["--config", "toy.yaml", "--output", "grid.json", "--taps", "[0, 1]", "--guesses", "[0, 2, -1]"]
    )
    assert json.loads((project / "grid.json").read_text()) == json.loads(json.dumps(found))
    replayed = found["replays"]["dpara taps=1 guesses=2"]
    for name in ("tau_pooled", "tau_macro"):
        assert replayed[name] == pytest.approx(summary["methods"]["dpara"]["average"][name])
    rounds = summary["methods"]["dpara"]["average"]["rounds"] - summary["methods"]["dpara"]["average"]["cold_starts"]
    assert replayed["hit_rate"] == pytest.approx(guessed["dpara"] / rounds, abs=1e-4)
    assert found["replays"]["dspark"]["tau_macro"] == pytest.approx(
        summary["methods"]["dspark"]["average"]["tau_macro"]
    )
    assert found["replays"]["dpara taps=0 bonus known"]["hit_rate"] == 1.0
    auto = run.main(["--config", "toy.yaml", "--eval.in_flight_taps", "auto", "--eval.methods", "[dspark,dpara]"])
    assert auto["auto"] == {1: {"in_flight_taps": 0, "bonus_guesses": 0}}  # this drafter was trained for neither
    told = "`dpara` with auto taps in flight and 0 guessed bonuses (came to 0 and 0)"
    assert told in (project / "results/toy/table.md").read_text()
    assert "1 taps in flight and 2 guessed bonuses" in (project / "results/beyond/table.md").read_text()
    extra = [
        "--variants",
        '["", "other"]',
        "--oracle_taps",
        "2",
        "--live",
        "2",
        "--at_once",
        "2",
        "--eval.dtype",
        "float32",
    ]
    shutil.copytree(project / "runs/toy/mdflash", project / "runs/toy/mdflash-other")
    several = offline.main(["--config", "toy.yaml", "--output", "several.json", *extra])["replays"]
    assert several["dspark"]["tau_macro"] == found["replays"]["dspark"]["tau_macro"]
    for name in ("mdflash-serial", "dpara taps=0 guesses=0", "dpara taps=2 guesses=0", "dpara taps=2 bonus known"):
        assert several[f"mdflash: {name}"]["tau_macro"] == several[f"other: {name}"]["tau_macro"]
    assert all(x["live"]["equal"] == x["live"]["requests"] == 2 for x in several.values() if "live" in x)
    assert "live" in several["dspark"]
    assert "live" not in several["other: dpara taps=2 bonus known"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--taps", "[-1]"], "from 0 on"),
        (["--taps", "[3]"], "2 taps"),
        (["--oracle_taps", "3"], "2 taps"),
        (["--guesses", "[300]"], "300 tokens"),
        (["--guesses", "[-2]"], "-1 to know"),
        (["--guess_source", "oracle"], "spine or draft"),
        (["--variants", "[a,a]"], "name each once"),
        (["--variants", "[nope]"], "--variant nope"),
        (["--live", "99"], "4 requests"),
        (["--eval.benchmarks", "[]"], "benchmarks=[]"),
        (["--eval.benchmarks", "[alpha,alpha]"], "name each once"),
        (["--drafter.base", "runs/toy/dflash"], "Markov head"),
        (["--output", "prompts"], "not a folder"),
        (["--at_once", "0"], "at_once=0"),
    ],
)
def test_a_replay_refuses_bad_options(project, monkeypatch, options, message):
    monkeypatch.chdir(project)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        offline.main(["--config", "toy.yaml", "--output", "refused.json", *options])
    assert not (project / "refused.json").exists()


def test_a_study_names_a_file_that_it_cannot_read(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "torn.json").write_text('{"ms": ')
    (project / "other.json").write_text("{}")
    for file, message in (
        ("torn.json", "torn.json is no JSON"),
        ("other.json", "lacks"),
        ("none.json", "no such file"),
    ):
        with pytest.raises(ValueError, match=message):
            study.main(["--config", "toy.yaml", "--output", "x.json", "--latency", f"[{file}]"])
    with pytest.raises(ValueError, match="name a .json file"):
        study.main(["--config", "toy.yaml", "--output", "x.md"])


def test_a_replay_refuses_the_drafter_of_another_target(project, monkeypatch):
    monkeypatch.chdir(project)
    other = build_target(project / "another", vocab_size=301)
    build_drafter(project / "runs/toy/mdflash-foreign", other, 4, vocab_size=301)
    with pytest.raises(ValueError, match="301 against 300"):
        offline.main(["--config", "toy.yaml", "--output", "foreign.json", "--variants", "[foreign]"])


def test_a_study_is_gathered_from_its_parts(project, monkeypatch):
    """Figures of record are the parts' own; what is not there is named and null."""
    monkeypatch.chdir(project)
    shutil.rmtree("results", ignore_errors=True)
    gather = ["--config", "toy.yaml", "--output", "study/toy.json"]
    with pytest.raises(ValueError, match="nothing is measured there yet"):
        study.main(gather)
    parts = {"greedy": ["0", "2"], "sampled": ["1", "2"], "speed/one": ["0", "1"]}
    for name, (temperature, batch) in parts.items():
        settings = [
            "--eval.temperature",
            temperature,
            "--eval.batch_size",
            batch,
            "--eval.output",
            f"results/toy/{name}",
        ]
        summary = run.main(["--config", "toy.yaml", *settings])
    figures = study.main(gather)["figures"]
    assert None not in (figures["tau_dspark"], figures["ratio_dspark"])
    assert figures["serial_kept"] is figures["ratio_4taps"] is figures["projected_over_dspark_14b_b1"] is None
    grid = ["--taps", "[0, 1]", "--guesses", "[0, 1, -1]", "--oracle_taps", "2"]
    replay = offline.main(["--config", "toy.yaml", "--output", "results/toy/replay/early.json", *grid])["replays"]
    made = {"command": "bench", "revision": "r", "versions": {}, "devices": ["card"]}
    steps = {
        "dspark_b1": {"step": 2.0},
        "dpara_b1_t0_f0": {"step": 1.6, "hidden_share": 1.0},
        "dpara_b1_t1_f1": {"step": 1.0, "hidden_share": 0.5},
    }
    latency = project / "in_flight_qwen3_14b.json"
    latency.write_text(json.dumps(made | {"ms": steps}))
    found = study.main([*gather, "--latency", f"[{latency.name}]"])
    assert found["missing"] == ["replay/seeds", "curves"]
    greedy = json.loads((project / "results/toy/greedy/summary.json").read_text())
    figures, share = found["figures"], replay["dpara taps=0 guesses=0"]["share_of_dspark"]["value"]
    assert figures["tau_mdflash"] == greedy["methods"]["dpara"]["average"]["tau_macro"]
    assert figures["ratio_untuned_low"] == greedy["ratios"]["dpara_over_untuned"]["ci95"][0]
    assert figures["projected_over_dspark_14b_b1"] == pytest.approx(
        share * 2.0 / 1.6, abs=1e-4
    )  # the faster one is not hidden
    assert figures["serial_kept"] == replay["mdflash-serial"]["share_of_dspark"]["value"]
    assert found["speed"]["one"]["over_dspark"] == json.loads(json.dumps(summary["speed_ratios"]["dpara_over_dspark"]))
    assert sum(found["gap"].values()) == pytest.approx(1.0, abs=1e-3)
    assert "card" in found["devices"]
    behind = found["positions"]["dpara"]["by_r"]
    rounds, requests = (greedy["methods"]["dpara"]["average"][name] for name in ("rounds", "requests"))
    assert sum(of["rounds"] for of in behind.values()) == rounds - requests
    page = (project / "study/toy.md").read_text()
    assert "| taps in flight | F = 0 | F = 1 | bonus known |" in page
    assert "| dpara, r = 0 |" in page
    assert "best hidden: 0 taps, 0 guesses" in page
    assert "replay/seeds" in page
    for suffix in ("curves", "shares"):
        assert (project / f"study/toy_{suffix}.png").stat().st_size
