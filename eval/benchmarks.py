"""The seven benchmarks, and any folder of prompts in their place. Prompts only: nothing is graded here.

No dataset revision is pinned in this file. `revision=None` means the head of the dataset's main branch when it is
loaded; the commit that stood there is looked up first, used for the download and recorded with the results (`origin`).
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ORDER_SEED = 980406


@dataclass(frozen=True)
class Row:
    """One request. turns: the user's texts in order; the evaluation asks the first."""

    id: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """A dataset on the Hugging Face hub and how its rows become user turns. revision: None takes main when loading."""

    name: str
    dataset: str
    config: str | None
    split: str
    turns: Callable[[Mapping], tuple[str, ...]]
    revision: str | None = None


def reasoning(field: str) -> Callable[[Mapping], tuple[str, ...]]:
    """A problem followed by the request to reason and to box the answer."""
    return lambda row: (f"{row[field]}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",)


def completion(row: Mapping) -> tuple[str, ...]:
    """A function to complete, fenced."""
    request = "Write a solution to the following problem and make sure that it passes the tests:"
    return (f"{request}\n```python\n{row['prompt']}\n```",)


def instruction(row: Mapping) -> tuple[str, ...]:
    """An instruction, with its input below when it has one."""
    return (f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"],)


def single(row: Mapping) -> tuple[str, ...]:
    """The prompt, unchanged."""
    return (row["prompt"],)


def conversation(row: Mapping) -> tuple[str, ...]:
    """Every turn, unchanged."""
    return tuple(row["prompt"])


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark("gsm8k", "openai/gsm8k", "main", "test", reasoning("question")),
        Benchmark("math500", "HuggingFaceH4/MATH-500", None, "test", reasoning("problem")),
        Benchmark("humaneval", "openai/openai_humaneval", None, "test", completion),
        Benchmark("mbpp", "google-research-datasets/mbpp", "sanitized", "test", single),
        Benchmark("codealpaca", "sahil2801/CodeAlpaca-20k", None, "train", instruction),
        Benchmark("alpaca", "tatsu-lab/alpaca", None, "train", instruction),
        Benchmark("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", conversation),
    )
}


def load(name: str, folder: str | Path | None = None, requests: int = 0) -> list[Row]:
    """The first `requests` rows of a benchmark (0: all).

    folder: rows of `folder/NAME.jsonl` ({"id", "turns"}) in file order, under any name. Without one, a built-in
    benchmark from the hub, shuffled once from source order with a fixed seed: everybody has the same first rows.
    Raises ValueError for an unknown name or a faulty row, FileNotFoundError for a missing file.
    """
    if requests < 0:
        raise ValueError(f"requests={requests}: use a positive number of requests, or 0 for all")
    rows = read_rows(Path(folder) / f"{name}.jsonl") if folder else hub_rows(built_in(name))
    return rows[:requests] if requests else rows


def origin(name: str, folder: str | Path | None = None) -> dict:
    """Where the rows of `load` come from: dataset and commit, or file name and sha256."""
    if folder:
        file = Path(folder) / f"{name}.jsonl"
        return {"file": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    benchmark = built_in(name)
    return {
        "dataset": benchmark.dataset,
        "config": benchmark.config,
        "split": benchmark.split,
        "revision": commit(benchmark.dataset, benchmark.revision),
    }


def built_in(name: str) -> Benchmark:
    """A benchmark of this file by its name."""
    if name not in BENCHMARKS:
        raise ValueError(
            f"benchmark {name!r} is not built in: use one of {', '.join(BENCHMARKS)}, or set eval.folder to a folder "
            f"with {name}.jsonl"
        )
    return BENCHMARKS[name]


@cache
def commit(dataset: str, revision: str | None) -> str:
    """The commit a dataset's revision stands at; one look-up a process."""
    from huggingface_hub import dataset_info

    return dataset_info(dataset, revision=revision).sha


def hub_rows(benchmark: Benchmark) -> list[Row]:
    """The dataset's rows in the evaluation's order."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("built-in benchmarks need `datasets`: pip install datasets, or set eval.folder") from error
    try:
        revision = commit(benchmark.dataset, benchmark.revision)
        source = load_dataset(benchmark.dataset, benchmark.config, split=benchmark.split, revision=revision)
    except Exception as error:
        raise ConnectionError(
            f"{benchmark.name}: the hub gave {type(error).__name__} for {benchmark.dataset}; check the network, or set "
            f"eval.folder to a folder with {benchmark.name}.jsonl"
        ) from error
    return shuffled(benchmark, source)


def shuffled(benchmark: Benchmark, source: Iterable[Mapping]) -> list[Row]:
    """Rows in source order, shuffled once; the number in an id is the row's place in the source."""
    rows = [Row(f"{benchmark.name}-{index:04d}", benchmark.turns(row)) for index, row in enumerate(source)]
    random.Random(ORDER_SEED).shuffle(rows)
    return rows


def read_rows(file: Path) -> list[Row]:
    """The rows of a JSONL file; a fault is named with file and line."""
    if not file.is_file():
        raise FileNotFoundError(f'{file} is missing: eval.folder holds NAME.jsonl with rows {{"id", "turns"}}')
    rows, seen = [], set()
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            row = parse_row(line, f"{file}:{number}")
            if row.id in seen:
                raise ValueError(f"{file}:{number}: id {row.id!r} is used twice; give every row its own")
            seen.add(row.id)
            rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no rows: a benchmark needs at least one")
    return rows


def parse_row(line: str, place: str) -> Row:
    """One line of JSON as a Row. place: "file:line", for the error."""
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}); write one object a line") from error
    if not isinstance(raw, dict):
        raise ValueError(f'{place}: {line.strip()[:40]!r} is not an object; write {{"id": .., "turns": [..]}}')
    identity, turns = raw.get("id"), raw.get("turns")
    if not isinstance(identity, str) or not identity:
        raise ValueError(f"{place}: id={identity!r}; give the row a non-empty string")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{place}: turns={turns!r}; give the row a list of at least one non-empty user text")
    return Row(identity, tuple(turns))
