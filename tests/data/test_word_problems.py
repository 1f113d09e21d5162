"""The generator is deterministic, keeps its splits apart, calculates correctly and repairs what was torn."""

import json
import re

import pytest

from data.word_problems import ENDINGS, FAMILIES, OPERATORS, distinct, generate, write

STEP = re.compile(r"(\d+) ([*+-]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("problems")
    write(folder, texts=3000, prompts=300, held_out=20)
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_same_arguments_same_problem():
    assert generate("travel", 7, 0, "train") == generate("travel", 7, 0, "train")
    others = [("travel", 8, 0, "train"), ("travel", 7, 1, "train"), ("travel", 7, 0, "prompts")]
    assert all(generate(*other) != generate("travel", 7, 0, "train") for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_every_answer_is_correct(family):
    for index in range(500):
        question, answer = (message["content"] for message in generate(family, index, 0, "train")["messages"])
        steps = STEP.findall(answer)
        assert len(steps) == answer.count("=") >= 2
        for left, symbol, right, total in steps:
            assert OPERATORS[symbol](int(left), int(right)) == int(total) > 0
        assert [step[0] for step in steps[1:]] == [step[3] for step in steps[:-1]], "a step goes on from the last one"
        assert answer.endswith(tuple(f"\n{ending} {steps[-1][3]}." for ending in ENDINGS))
        assert all(2 <= int(number) <= 9 for number in re.findall(r"\d+", question))
        assert "{" not in question + answer


def test_questions_are_distinct_over_all_files(written):
    questions = [row["messages"][0]["content"] for row in rows(written / "texts.jsonl")]
    for name in ["prompts.jsonl", *(f"benchmarks/{family}.jsonl" for family in FAMILIES)]:
        questions += [turn for row in rows(written / name) for turn in row["turns"]]
    assert len(questions) == len(set(questions)) == 3000 + 300 + 20 * len(FAMILIES)


def test_a_colliding_question_is_dropped():
    first, second = (generate("storage", index, 0, "heldout") for index in range(2))
    seen = {first["messages"][0]["content"]}
    assert next(distinct("storage", 0, "heldout", seen)) == second


def test_up_to_date_output_is_left_alone_and_torn_output_is_redone(written, capsys):
    texts, manifest = written / "texts.jsonl", written / "manifest.json"
    before, modified = texts.read_bytes(), texts.stat().st_mtime_ns
    arguments = {"texts": 3000, "prompts": 300, "held_out": 20}
    write(written, **arguments)
    assert "up to date" in capsys.readouterr().out
    assert texts.stat().st_mtime_ns == modified

    for tear in (lambda: texts.write_bytes(before[:-100]), manifest.unlink, lambda: manifest.write_text("{")):
        tear()
        write(written, **arguments)
        assert texts.read_bytes() == before
        assert json.loads(manifest.read_text())["files"]["texts.jsonl"]["rows"] == 3000


def test_other_settings_are_not_up_to_date(tmp_path):
    write(tmp_path, texts=10, prompts=5, held_out=2)
    write(tmp_path, texts=10, prompts=5, held_out=2, seed=1)
    assert json.loads((tmp_path / "manifest.json").read_text())["settings"]["seed"] == 1
    assert rows(tmp_path / "texts.jsonl")[0]["messages"] == generate("shopping", 0, 1, "train")["messages"]


def test_errors_name_the_value_and_the_remedy(tmp_path):
    with pytest.raises(ValueError, match="'cooking' is unknown; use one of shopping"):
        generate("cooking", 0, 0, "train")
    with pytest.raises(ValueError, match="prompts=0 must be at least 1"):
        write(tmp_path, prompts=0)
