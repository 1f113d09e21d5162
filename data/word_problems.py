"""Word problems with step-by-step answers: a tiny model learns them, a drafter can almost predict them.

A template is a question, an answer and a chain of operators. Operands are small (2..9), names and items
vary, and the answer restates both, so a model has to copy from the question as well as to calculate.

    python -m data.word_problems --output demo
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, mul, sub
from pathlib import Path

from jsonargparse import auto_cli

SPLITS = ("train", "prompts", "heldout")
SMALLEST, LARGEST = 2, 9
OPERATORS = {"+": add, "-": sub, "*": mul}
WORDS = {
    kind: words.split()
    for kind, words in {
        "name": """
            Alice Boris Carla Diego Elena Felix Grace Hugo Irene Jonas Klara Leo Maria Noah Olga Pedro
            Quinn Rosa Samir Tara Viktor Wanda Yusuf Zoe
        """,
        "items": """
            apples bottles candles carrots cookies flowers hammers jackets kettles lanterns lemons marbles
            mirrors notebooks pencils pillows plates ribbons shirts spoons stamps tickets towels whistles
        """,
        "place": """
            bakery bridge castle farm forest garden harbor island library market museum river school
            station temple village
        """,
    }.items()
}

# Interchangeable wordings, drawn for every sentence: a target's choice among them is hard to foresee and easy to
# continue once made, which is what leaves a drafter something to learn.
CONNECTIVES = (", so ", ", which means that ", "; this tells us that ")
OPENINGS = ("", "Then ", "After that we see: ", "Now comes the next step: ")
ENDINGS = ("The answer is", "In the end that makes", "This brings the final result to")


@dataclass(frozen=True)
class Template:
    """Wording of one kind of problem: `operators[i]` joins the result so far to the next of a, b, c, d.

    `question` and `answer` may use the operands, any key of WORDS, a second name (`friend`), the written
    steps `s1`, `s2`, `s3` ("4 * 3 = 12") and the last `result`.
    """

    operators: str
    question: str
    answer: str


FAMILIES = {
    "shopping": (
        Template(
            "*+",
            "{name} buys {a} {items} at {b} dollars each and pays {c} dollars for a bag. The {items} are "
            "for {friend}. How much does {name} pay?",
            "{name} buys {a} {items} at {b} dollars each, so the {items} cost {s1} dollars.\n"
            "The bag costs {c} dollars more, so {name} pays {s2} dollars.\n"
            "The answer is {result}.",
        ),
        Template(
            "*-",
            "At the {place} {name} sells {a} {items} for {b} dollars each. {name} spends {c} dollars on "
            "lunch. How much does {name} keep?",
            "At the {place} {name} sells {a} {items} for {b} dollars each, so {name} gets {s1} dollars.\n"
            "{name} spends {c} dollars on lunch, so {name} keeps {s2} dollars.\n"
            "The answer is {result}.",
        ),
        Template(
            "*++",
            "{name} orders {a} {items} at {b} dollars each and pays {c} dollars for delivery. {friend} "
            "orders a bag for {d} dollars more. How much do {name} and {friend} pay?",
            "{name} orders {a} {items} at {b} dollars each, so the {items} cost {s1} dollars.\n"
            "With {c} dollars for delivery, {name} pays {s2} dollars.\n"
            "{friend} orders a bag for {d} dollars more, so they pay {s3} dollars.\n"
            "The answer is {result}.",
        ),
    ),
    "travel": (
        Template(
            "*+",
            "{name} drives {a} hours at {b} miles per hour to the {place}. From the {place} {name} walks "
            "{c} miles to {friend}. How far does {name} go?",
            "{name} drives {a} hours at {b} miles per hour, so the {place} is {s1} miles away.\n"
            "From the {place} {name} walks {c} miles to {friend}, so {name} goes {s2} miles.\n"
            "The answer is {result}.",
        ),
        Template(
            "*-",
            "{name} makes {a} trips to the {place} with {b} {items} on each trip. On the way {name} "
            "loses {c} {items}. How many {items} reach the {place}?",
            "{name} makes {a} trips with {b} {items} on each trip, so {name} sends {s1} {items}.\n"
            "On the way {name} loses {c} {items}, so {s2} {items} reach the {place}.\n"
            "The answer is {result}.",
        ),
        Template(
            "*++",
            "{name} cycles {a} days at {b} miles a day and then walks {c} miles to the {place}. {friend} "
            "goes {d} miles more than {name}. How far does {friend} go?",
            "{name} cycles {a} days at {b} miles a day, so {name} cycles {s1} miles.\n"
            "With {c} miles to the {place}, {name} goes {s2} miles.\n"
            "{friend} goes {d} miles more than {name}, so {friend} goes {s3} miles.\n"
            "The answer is {result}.",
        ),
    ),
    "storage": (
        Template(
            "*+",
            "{name} fills {a} boxes with {b} {items} each and keeps {c} more {items} in the {place}. "
            "How many {items} does {name} have?",
            "{name} fills {a} boxes with {b} {items} each, so the boxes hold {s1} {items}.\n"
            "{name} keeps {c} more {items} in the {place}, so {name} has {s2} {items}.\n"
            "The answer is {result}.",
        ),
        Template(
            "*-",
            "In the {place} {name} has {a} shelves with {b} {items} each. {name} gives {c} {items} to "
            "{friend}. How many {items} are left in the {place}?",
            "In the {place} {name} has {a} shelves with {b} {items} each, so {name} has {s1} {items}.\n"
            "{name} gives {c} {items} to {friend}, so {s2} {items} are left in the {place}.\n"
            "The answer is {result}.",
        ),
        Template(
            "++-",
            "{name} brings {a} {items} and {friend} brings {b} {items} to the {place}. There {name} "
            "finds {c} more {items} and sells {d} {items}. How many {items} are left?",
            "{name} brings {a} {items} and {friend} brings {b} {items}, which makes {s1} {items}.\n"
            "In the {place} {name} finds {c} more {items}, so there are {s2} {items}.\n"
            "{name} sells {d} {items}, so {s3} {items} are left.\n"
            "The answer is {result}.",
        ),
    ),
}


def generate(family: str, index: int, seed: int, split: str) -> dict:
    """Problem number `index` of a family and split, as `{"id", "family", "messages"}`."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    rng = random.Random(f"{seed}/{split}/{family}/{index}")
    template = rng.choice(FAMILIES[family])
    fields = _draw_words(rng) | _draw_numbers(rng, template.operators)
    return {
        "id": f"{family}-{split}-{index}",
        "family": family,
        "messages": [
            {"role": "user", "content": template.question.format(**fields)},
            {"role": "assistant", "content": _reword(template.answer.format(**fields), rng)},
        ],
    }


def _reword(answer: str, rng: random.Random) -> str:
    """The answer with a drawn connective in each sentence, a drawn opening from the second on, and a drawn ending."""
    lines = [re.sub(", so ", lambda _: rng.choice(CONNECTIVES), line) for line in answer.split("\n")]
    lines[1:-1] = [rng.choice(OPENINGS) + line for line in lines[1:-1]]
    lines[-1] = lines[-1].replace("The answer is", rng.choice(ENDINGS))
    return "\n".join(lines)


def _draw_words(rng: random.Random) -> dict[str, str]:
    words = {kind: rng.choice(choices) for kind, choices in WORDS.items()}
    words["name"], words["friend"] = rng.sample(WORDS["name"], 2)
    return words


def _draw_numbers(rng: random.Random, operators: str) -> dict[str, str | int]:
    """Operands a, b, ..., the written steps s1, s2, ... and the result, which stays positive."""
    result = rng.randint(SMALLEST, LARGEST)
    numbers = {"a": result}
    for step, symbol in enumerate(operators, start=1):
        operand = rng.randint(SMALLEST, min(LARGEST, result - 1) if symbol == "-" else LARGEST)
        total = OPERATORS[symbol](result, operand)
        numbers |= {"abcd"[step]: operand, f"s{step}": f"{result} {symbol} {operand} = {total}"}
        result = total
    return numbers | {"result": result}


def distinct(family: str, seed: int, split: str, seen: set[str]) -> Iterator[dict]:
    """Endless problems of a family with questions not in `seen`; every question handed out joins `seen`."""
    index = 0
    while True:
        problem = generate(family, index, seed, split)
        question = problem["messages"][0]["content"]
        if question not in seen:
            seen.add(question)
            yield problem
        index += 1


def write(output: Path, texts: int = 20_000, prompts: int = 2_000, held_out: int = 40, seed: int = 0) -> None:
    """Write training texts, prompts and benchmarks; do nothing where `output` already holds exactly these.

    Args:
        output: folder for texts.jsonl, prompts.jsonl, benchmarks/<family>.jsonl and manifest.json.
        texts: question-and-answer texts to train a target on, over all families.
        prompts: questions for the target to answer, over all families.
        held_out: benchmark questions of each family; none of them is a training text or a prompt.
        seed: every problem follows from it.
    """
    counts = {"texts": texts, "prompts": prompts, "held_out": held_out}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1; pass a larger --{name}")
    settings = {"seed": seed, **counts}
    if _is_complete(output, settings):
        print(f"{output}: up to date")
        return
    (output / "manifest.json").unlink(missing_ok=True)

    seen: set[str] = set()
    files = {
        "texts.jsonl": _mixed("train", texts, seed, seen),
        "prompts.jsonl": [_as_prompt(problem) for problem in _mixed("prompts", prompts, seed, seen)],
    }
    for family in FAMILIES:
        problems = distinct(family, seed, "heldout", seen)
        files[f"benchmarks/{family}.jsonl"] = [_as_prompt(next(problems)) for _ in range(held_out)]

    for name, rows in files.items():
        _replace(output / name, "".join(json.dumps(row) + "\n" for row in rows))
    manifest = {
        "settings": settings,
        "templates": _templates_sha256(),
        "note": "Held-out problems share templates with the training texts; only their questions are new.",
        "files": {name: {"rows": len(rows), "sha256": _sha256(output / name)} for name, rows in files.items()},
    }
    _replace(output / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    print(f"{output}: {texts} texts, {prompts} prompts, {held_out} held-out for each of {', '.join(FAMILIES)}")


def _mixed(split: str, count: int, seed: int, seen: set[str]) -> list[dict]:
    """`count` distinct problems of a split, taking the families in turn."""
    streams = [distinct(family, seed, split, seen) for family in FAMILIES]
    return [next(streams[position % len(streams)]) for position in range(count)]


def _as_prompt(problem: dict) -> dict:
    return {"id": problem["id"], "turns": [problem["messages"][0]["content"]]}


def _is_complete(output: Path, settings: dict) -> bool:
    """Whether the manifest states these settings and templates, and every file it names is as it says."""
    try:
        manifest = json.loads((output / "manifest.json").read_text())
        return (manifest["settings"], manifest["templates"]) == (settings, _templates_sha256()) and all(
            _sha256(output / name) == entry["sha256"] for name, entry in manifest["files"].items()
        )
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return False


def _templates_sha256() -> str:
    return hashlib.sha256(
        repr((WORDS, FAMILIES, SMALLEST, LARGEST, CONNECTIVES, OPENINGS, ENDINGS)).encode()
    ).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    auto_cli(write, as_positional=False)
