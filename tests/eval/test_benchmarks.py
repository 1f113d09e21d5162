"""Templates on made-up rows, the order rule, and the faults a folder of prompts can have."""

import json
import random

import pytest

from eval import benchmarks
from eval.benchmarks import BENCHMARKS, Row, load, origin, shuffled

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("name", "row", "turns"),
    [
        ("gsm8k", {"question": "Two hens lay {x} eggs.", "answer": "2"}, ("Two hens lay {x} eggs." + REASON,)),
        ("math500", {"problem": "What is $1+1$?", "level": 1}, ("What is $1+1$?" + REASON,)),
        (
            "humaneval",
            {"prompt": "def twice(x):\n", "test": "-"},
            (
                "Write a solution to the following problem and make sure that it passes the tests:\n"
                "```python\ndef twice(x):\n\n```",
            ),
        ),
        ("mbpp", {"prompt": "Write a function that waits.", "code": "-"}, ("Write a function that waits.",)),
        ("alpaca", {"instruction": "Name a colour.", "input": ""}, ("Name a colour.",)),
        ("alpaca", {"instruction": "Translate.", "input": "Noinput"}, ("Translate.\n\nInput:\nNoinput",)),
        ("codealpaca", {"instruction": "Sort it.", "input": "[2, 1]"}, ("Sort it.\n\nInput:\n[2, 1]",)),
        ("mt-bench", {"prompt": ["First.", "Second."], "category": "-"}, ("First.", "Second.")),
    ],
)
def test_templates(name, row, turns):
    assert BENCHMARKS[name].turns(row) == turns


def test_the_seven_benchmarks_pin_no_revision_themselves():
    assert list(BENCHMARKS) == ["gsm8k", "math500", "humaneval", "mbpp", "codealpaca", "alpaca", "mt-bench"]
    assert all(benchmark.revision is None for benchmark in BENCHMARKS.values())


def test_order_is_one_seeded_shuffle_of_the_source(monkeypatch):
    source = [{"prompt": f"task {i}"} for i in range(30)]
    expected = list(range(30))
    random.Random(980406).shuffle(expected)
    rows = shuffled(BENCHMARKS["mbpp"], source)
    assert [row.id for row in rows] == [f"mbpp-{i:04d}" for i in expected]
    assert all(row.turns == (f"task {int(row.id[-4:])}",) for row in rows)

    monkeypatch.setattr(benchmarks, "hub_rows", lambda benchmark: shuffled(benchmark, source))
    assert load("mbpp", requests=5) == rows[:5]
    assert load("mbpp") == rows


def test_hub_rows_use_and_record_the_resolved_commit(monkeypatch):
    asked = []

    def fake_load(dataset, config, split, revision):
        asked.append((dataset, config, split, revision))
        return [{"question": "q0"}, {"question": "q1"}]

    monkeypatch.setattr(benchmarks, "commit", lambda dataset, revision: "c0ffee")
    monkeypatch.setattr("datasets.load_dataset", fake_load)
    assert {row.id for row in load("gsm8k")} == {"gsm8k-0000", "gsm8k-0001"}
    assert asked == [("openai/gsm8k", "main", "test", "c0ffee")]
    assert origin("gsm8k") == {"dataset": "openai/gsm8k", "config": "main", "split": "test", "revision": "c0ffee"}


def test_an_unreachable_hub_names_the_way_out(monkeypatch):
    def unreachable(dataset, revision):
        raise OSError("no route")

    monkeypatch.setattr(benchmarks, "commit", unreachable)
    with pytest.raises(ConnectionError, match=r"gsm8k: the hub gave OSError .* set eval\.folder"):
        load("gsm8k")


def test_unknown_name_and_negative_requests():
    with pytest.raises(ValueError, match=r"'gsm9k' is not built in: use one of gsm8k, .* gsm9k\.jsonl"):
        load("gsm9k")
    with pytest.raises(ValueError, match="requests=-1"):
        load("gsm8k", requests=-1)


def write(folder, *lines):
    (folder / "mine.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_folder_keeps_file_order_and_takes_the_first_rows(tmp_path):
    rows = [{"id": f"r{i}", "turns": [f"text\u2028{i}", "more"]} for i in (2, 0, 1)]
    write(tmp_path, *(json.dumps(row, ensure_ascii=False) for row in rows), "")
    assert load("mine", tmp_path) == [Row(row["id"], tuple(row["turns"])) for row in rows]
    assert [row.id for row in load("mine", str(tmp_path), 2)] == ["r2", "r0"]
    assert origin("mine", tmp_path)["file"] == "mine.jsonl"


GOOD = '{"id": "a", "turns": ["x"]}'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", r"mine\.jsonl:2: not JSON"),
        ("[1]", r"mine\.jsonl:2: '\[1\]' is not an object"),
        ('{"turns": ["x"]}', r"mine\.jsonl:2: id=None"),
        ('{"id": "", "turns": ["x"]}', r"mine\.jsonl:2: id=''"),
        ('{"id": "b"}', r"mine\.jsonl:2: turns=None"),
        ('{"id": "b", "turns": "x"}', r"mine\.jsonl:2: turns='x'"),
        ('{"id": "b", "turns": []}', r"mine\.jsonl:2: turns=\[\]"),
        ('{"id": "b", "turns": ["x", ""]}', r"mine\.jsonl:2: turns="),
        (GOOD, r"mine\.jsonl:2: id 'a' is used twice"),
    ],
)
def test_a_faulty_row_is_named_with_file_and_line(tmp_path, line, fault):
    with pytest.raises(ValueError, match=fault):
        load("mine", write(tmp_path, GOOD, line))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"mine\.jsonl is missing"):
        load("mine", tmp_path)
    with pytest.raises(ValueError, match="has no rows"):
        load("mine", write(tmp_path, ""))
