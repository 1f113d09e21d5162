"""The study's makefile: every command that it would run is one that its recipe allows."""

import shlex
import subprocess
from pathlib import Path

import pytest

from eval import offline, study
from mdflash.recipe import read_recipe

ROOT = Path(__file__).parents[2]
EXTRA = {"eval.offline": offline.arguments, "eval.study": study.arguments}


def commands(*goals: str, **variables: str) -> list[list[str]]:
    """What `make` would run for goals, in order, none of it done yet."""
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *goals, *given, "PORT=1"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in printed.replace("\\\n", "").splitlines()]


def test_the_study_asks_for_what_a_recipe_allows(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = commands("study", "study-ideas", SPEED_ARGS="--eval.requests 8")
    names = []
    for words in found:
        if words[:2] == ["python", "-m"] and words[2].startswith(("eval.", "data.")):
            recipe, _ = read_recipe(words[3:], "", extra=EXTRA.get(words[2]))
            names.append(f"{words[2]} {recipe.variant or ''}")
        elif words[:1] == ["deepspeed"]:
            recipe, _ = read_recipe(words[words.index("--config") :], "")
            names.append(f"{recipe.stage} {recipe.variant or ''}")
    assert names[:3] == ["data.answers ", "dspark ", "mdflash "]
    finetunes = {name.split()[1] for name in names if name.startswith("mdflash ") and name != "mdflash "}
    assert finetunes == {"early", "seed1", "seed2", "control", "head", "independent", "decay", "long"}
    assert names.count("eval.offline early") == 2
    assert "eval.study " in names
    speeds = [words for words in found if words[:1] == ["for"]]
    assert [word for words in speeds for word in words].count("--eval.requests") == 3


@pytest.mark.parametrize("goal", ["study-train", "study-measure", "study-ideas"])
def test_a_study_of_another_recipe_has_its_own_folders(goal):
    text = " ".join(word for words in commands(goal, STUDY="recipes/tiny.yaml") for word in words)
    assert "recipes/tiny.yaml" in text
    assert "smollm2" not in text
