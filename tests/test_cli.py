"""The console script: what each command prints, and that every error is one line and exit code 2."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FIXTURES, make_drafter, make_target, make_tokenizer

from mdflash import cli, live
from mdflash.drafter import hub

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only slow such small models down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A random target with its tokenizer, and a drafter for it."""
    folder = tmp_path_factory.mktemp("models")
    target, tokenizer = make_target(vocab=300), make_tokenizer()
    target.model.generation_config.eos_token_id = tokenizer.eos_token_id
    target.model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter(target).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def recipe(tmp_path, monkeypatch, models) -> str:
    """A recipe in a working folder of its own, with a finished mdflash stage."""
    monkeypatch.chdir(tmp_path)
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/mdflash").symlink_to(models / "drafter")
    settings = {"name": "tiny", "target": {"path": str(models / "target"), "dtype": "float32"}}
    Path("tiny.yaml").write_text(json.dumps(settings))
    return "tiny.yaml"


@pytest.fixture
def answers(recipe) -> None:
    folder = Path("runs/tiny/answers")
    folder.mkdir()
    question = {"role": "user", "content": "Say [red]!"}
    rows = [
        {"id": "a@t0", "messages": [question, {"role": "assistant", "content": "hé [x]", "finish_reason": "stop"}]},
        {"id": "b@t0", "messages": [question]},
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*args: str) -> int:
    return cli.main(list(args))


def error_of(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_a_further_config_overrides_the_one_before(recipe, tmp_path):
    """As in a variant's file; what the command line says comes last."""
    more = tmp_path / "more.yaml"
    more.write_text("variant: early\nmdflash: {known_bonus: 0.5, spine_loss: 0.5}\n")
    args = ["--config", recipe, "--config", str(more), "--mdflash.spine_loss", "0.25"]
    found = cli.parse(cli.Parser(), args)[1]
    assert (found.name, found.variant) == (cli.parse(cli.Parser(), ["--config", recipe])[1].name, "early")
    assert (found.mdflash.known_bonus, found.mdflash.spine_loss) == (0.5, 0.25)


# generate


def test_generate_streams_the_answer_and_reports(recipe, capsys):
    command = ["generate", "--config", recipe, "--prompt", "hello", "--max_new_tokens", "12"]
    assert run(*command) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "τ" in err
    assert "tokens/s" in err
    assert "finish reason" in err

    assert run(*command, "--method", "autoregressive") == 0
    plain, err = capsys.readouterr()
    assert plain == out
    assert "τ 1.00" in err


def test_generate_takes_folders_and_stdin(models, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    pair = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    assert run("generate", *pair, "--max_new_tokens", "5", "--devices", "cpu,cpu", "--method", "dspark") == 0
    assert "5 tokens" in capsys.readouterr().err


def test_generate_passes_its_options_on(recipe, monkeypatch, capsys):
    seen = {}

    def decode(target, drafter, prompts, method, max_new_tokens, temperature, **rest):
        seen.update(rest, prompts=prompts, method=method, max_new_tokens=max_new_tokens, temperature=temperature)
        return [SimpleNamespace(token_ids=(1,), rounds=(), decode_s=0.0, finish_reason="length")]

    monkeypatch.setattr("mdflash.decode", decode)
    options = (
        "--max_new_tokens 9 --temperature 0.5 --top_p 0.9 --top_k 4 --seed 3 --stop END \n\n --thinking --devices cpu "
        "--drafter_address 127.0.0.1:29600"
    )
    assert run("generate", "--config", recipe, "--prompt", "x", *options.split(" ")) == 0
    del seen["on_round"]
    assert seen == {
        "prompts": ["x"], "method": "dpara", "max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
        "seed": 3, "stop_strings": ["END", "\n\n"], "thinking": True, "devices": "cpu",
        "drafter_address": "127.0.0.1:29600", "runner": "auto", "lm_head": "auto", "head_device": "drafter",
        "in_flight_taps": 0, "bonus_guesses": 0, "guess_source": "spine",
    }  # fmt: skip
    assert "1 tokens, τ -, - tokens/s, finish reason length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "x"], "no target"),
        (["--target", "t", "--prompt", "x"], "needs a drafter"),
        (["--target", "t", "--method", "autoregressive", "--prompt", " "], "prompt is empty"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_generate_errors(options, message, capsys):
    assert run("generate", *options) == 2
    assert message in error_of(capsys)


def test_serve_errors(models, capsys):
    drafter = str(models / "drafter")
    assert run("serve", "--drafter", drafter, "--address", "29600", "--device", "cpu") == 2
    assert "address='29600': use HOST:PORT" in error_of(capsys)
    assert run("serve", "--drafter", drafter, "--address", "127.0.0.1:1", "--device", "tpu") == 2
    assert "device 'tpu'" in error_of(capsys)


def test_generate_with_an_unknown_method_or_missing_drafter(recipe, models, capsys):
    files = ["--target", str(models / "target"), "--drafter", str(models / "drafter")]
    assert run("generate", *files, "--method", "magic", "--prompt", "x") == 2
    assert "method='magic': use one of" in error_of(capsys)
    assert run("generate", "--config", recipe, "--method", "dspark", "--prompt", "x") == 2
    assert "runs/tiny/dspark: no such folder" in error_of(capsys)


def test_stream_holds_incomplete_characters_back(capsys):
    tokenizer = make_tokenizer()
    ids = tokenizer("aé→b", add_special_tokens=False)["input_ids"]
    stream, written = live.Stream(tokenizer), []
    with stream:
        for count in range(1, len(ids) + 1):
            stream.on_round(0, SimpleNamespace(token_ids=ids[:count]))
            written.append(capsys.readouterr().out)
    assert "".join(written) == "aé→b"
    assert "\ufffd" not in "".join(written)
    assert "" in written  # a first byte alone shows nothing


def test_stream_writes_what_stays_incomplete_at_the_end(capsys):
    tokenizer = make_tokenizer()
    ids = tokenizer("aé", add_special_tokens=False)["input_ids"]
    with live.Stream(tokenizer) as stream:
        stream.on_round(0, SimpleNamespace(token_ids=ids[:-1]))
    assert capsys.readouterr().out == "a\ufffd\n"


def test_live_stream_ends_with_the_whole_text(capsys):
    tokenizer = make_tokenizer()
    ids = tokenizer("one [b]\ntwo", add_special_tokens=False)["input_ids"]
    with live.LiveStream(tokenizer) as stream:
        for count in (3, len(ids)):
            stream.on_round(0, SimpleNamespace(token_ids=ids[:count], rounds=[], decode_s=0.0))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.index("one [b]") < lines.index("two")


# train


def test_train_prints_the_line_it_stands_for(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    overrides = ["--stage", "dspark", "--dspark.deepspeed", "recipes/deepspeed/zero1.json"]
    assert run("train", "--config", "recipes/tiny.yaml", "--print_only", *overrides) == 0
    line = "deepspeed recipes/train_mdflash.py --config recipes/tiny.yaml " + " ".join(overrides)
    assert capsys.readouterr().out == line + "\n"


def test_train_runs_the_recipe_and_returns_its_exit_code(recipe, monkeypatch, capfd):
    Path("recipes").mkdir()
    cli.TRAINER.write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    assert run("train", "--config", recipe, "--mdflash.deepspeed", "null") == 3
    arguments = ["--config", recipe, "--mdflash.deepspeed", "null"]
    assert capfd.readouterr().out.splitlines() == [
        f"python recipes/train_mdflash.py {' '.join(arguments)}",
        str(arguments),
    ]


def test_train_errors(recipe, capsys):
    assert run("train") == 2
    assert "give --config" in error_of(capsys)
    assert run("train", "--config", recipe) == 2
    assert "from the root of the checkout" in error_of(capsys)
    with pytest.raises(SystemExit, match="2"):
        run("train", "--config", recipe, "--mdflash.no_such_key", "1")
    assert "no_such_key" in capsys.readouterr().err


# export and push


def test_export_and_push_by_recipe(recipe, capsys):
    assert run("export", "--config", recipe) == 0
    assert "without figures" in capsys.readouterr().out
    assert Path("runs/tiny/export/README.md").is_file()
    assert run("push", "--config", recipe, "--repo_id", "owner/name", "--dry_run") == 0
    assert "would upload to owner/name (public)" in capsys.readouterr().out


def test_export_takes_the_recipes_summary(recipe, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(hub, "export", lambda *args: seen.append(args) or args[1])
    Path("results/tiny").mkdir(parents=True)
    Path("results/tiny/summary.json").write_text("{}")
    assert run("export", "--config", recipe, "--output", "out") == 0
    assert [str(arg) for arg in seen[0]] == ["runs/tiny/mdflash", "out", "results/tiny/summary.json", "apache-2.0"]
    assert "with the figures of results/tiny/summary.json" in capsys.readouterr().out


def test_export_and_push_by_folder(tmp_path, capsys):
    folder = str(tmp_path / "out")
    assert run("export", "--checkpoint", str(FIXTURES / "dspark_tiny_rnn"), "--output", folder) == 0
    assert run("push", "--folder", folder, "--repo_id", "owner/name", "--dry_run", "--private") == 0
    assert "(private)" in capsys.readouterr().out


def test_export_and_push_errors(tmp_path, recipe, monkeypatch, capsys):
    assert run("export") == 2
    assert "nothing to export" in error_of(capsys)
    assert run("push", "--repo_id", "owner/name") == 2
    assert "nothing to push" in error_of(capsys)
    assert run("push", "--config", recipe, "--repo_id", "owner/name") == 2
    assert "make it with `mdflash export`" in error_of(capsys)

    def refuse(*args):
        raise hub.PushError("upload failed")

    monkeypatch.setattr(hub, "push", refuse)
    assert run("push", "--folder", "x", "--repo_id", "owner/name") == 2
    assert "upload failed" in error_of(capsys)


# show-sample


def test_show_sample_marks_the_supervised_text(answers, recipe, capsys):
    assert run("show-sample", "--config", recipe, "--no_color") == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user\nSay [red]!<|im_end|>\n<|im_start|>assistant\n⟦hé [x]<|im_end|>⟧\n" in out
    assert "row 0 of 2 (a@t0): a@t0: " in out
    assert "of them supervised" in out
    assert "thinking off" in out


def test_show_sample_gives_ids_on_demand(answers, recipe, capsys):
    assert run("show-sample", "--config", recipe, "--no_color", "--ids") == 0
    ids = make_tokenizer()("hé [x]<|im_end|>", add_special_tokens=False)["input_ids"]
    assert "⟦" + "".join(f"{token} " for token in ids) + "⟧" in capsys.readouterr().out


def test_show_sample_colours_on_a_terminal(answers, recipe, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert run("show-sample", "--config", recipe) == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32mhé [x]<|im_end|>\x1b[0m" in out
    assert "⟦" not in out


def test_show_sample_without_an_assistant_turn_and_out_of_range(answers, recipe, capsys):
    assert run("show-sample", "--config", recipe, "--index", "1") == 0
    assert "no assistant token" in capsys.readouterr().out
    assert run("show-sample", "--config", recipe, "--index", "2") == 2
    assert "holds rows 0..1" in error_of(capsys)


# the script itself


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("args", [[], ["frobnicate"], ["generate", "--no_such"], ["push", "--folder", "x"]])
def test_faulty_command_lines(args, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*args)
    error_of(capsys)


def test_the_script_runs_and_loads_no_model_code_for_itself():
    code = (
        "import sys; sys.modules['mdflash'] = m = type(sys)('mdflash'); m.__path__ = ['mdflash']; import mdflash.cli; "
    )
    code += "print(sorted({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "[]\n"
