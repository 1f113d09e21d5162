"""Decode every benchmark with every method and write what came of it to results/NAME.

    python -m eval.run --config recipes/NAME.yaml [--eval.requests 10 ...]

Each method reads the same token ids. Files: summary.json, requests.jsonl, table.md and two plots. `dspark` and
`dpara-untuned` read the recipe's DSpark drafter, `dpara` runs/NAME/mdflash, `dflash` runs/NAME/dflash (put a published
DFlash checkpoint there to measure it). Benchmarks of several turns are asked their first.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import mdflash
from mdflash import MDFlashModel, Target, decode, load_drafter, load_target
from mdflash.chat import Chat
from mdflash.decoding.build import check_method
from mdflash.decoding.deployment import Deployment, default_devices, share_cores, usable_device
from mdflash.decoding.requests import Request, check_prompts
from mdflash.decoding.tuning import settled
from mdflash.recipe import EvalSection, Recipe, Stage, read_recipe, resolved

from .benchmarks import Row, built_in, load, origin
from .margins import add_margins
from .report import print_report, write_report
from .statistics import Record, check_proposed, lossless, speedup, summarise, tau_ratio

WARM_UP_TOKENS = 16
RATIOS = {"dpara_over_untuned": ("dpara", "dpara-untuned"), "dpara_over_dspark": ("dpara", "dspark")}


@dataclass(frozen=True)
class Method:
    """schedule: the `method` of `mdflash.decode`. stage: which drafter it reads; None needs no drafter."""

    schedule: str
    stage: Stage | None


METHODS = {
    "autoregressive": Method("autoregressive", None),
    "dspark": Method("dspark", "dspark"),
    "dflash": Method("dflash", "dflash"),
    "dpara-untuned": Method("dpara", "dspark"),
    "dpara": Method("dpara", "mdflash"),
}


def main(args: list[str] | None = None) -> dict:
    """Run an evaluation; returns the summary."""
    recipe, values = read_recipe(args, "Measure acceptance and speedup of a recipe's drafters.")
    config_file = str(values.config[-1]) if values.config else "RECIPE.yaml"
    command = ["python", "-m", "eval.run", *(sys.argv[1:] if args is None else args)]
    made_by = {"command": shlex.join(portable(word) for word in command), "revision": revision()}

    check_settings(recipe)
    rows = {name: load(name, recipe.eval.folder, recipe.eval.requests) for name in recipe.eval.benchmarks}
    devices = recipe.eval.devices or default_devices()
    for device in devices.split(","):
        usable_device(device)
    share_cores(devices)
    drafters = load_drafters(recipe, config_file, devices)
    target = load_recipe_target(recipe, devices)

    chat = Chat(target.tokenizer, target.stop_ids, recipe.target.thinking)
    compare_training(drafters, chat)
    prompts = {name: [chat.prompt([{"role": "user", "content": row.turns[0]}]) for row in rows[name]] for name in rows}
    for ids in prompts.values():
        check_prompts(target, [Request(i, prompt) for i, prompt in enumerate(ids)], recipe.eval.max_new_tokens)

    records = measure(recipe, target, drafters, rows, prompts, devices)
    summary = {
        **made_by,
        "versions": versions(),
        "devices": device_names(devices),
        "config": portable(resolved(recipe)),
        "prompts": describe_prompts(recipe, chat, prompts),
        "auto": settled(drafters["mdflash"]) if "mdflash" in drafters else {},
        **figures(recipe, records),
    }
    if same := summary["lossless"]:
        asked = {(name, row.id): ids for name in rows for row, ids in zip(rows[name], prompts[name], strict=True)}
        answers = {record.key: record.token_ids for record in records["autoregressive"]}
        add_margins(target, asked, answers, same["divergences"])
    write_results(summary, records, recipe.results_dir)
    print_report(summary)
    unexplained = [found for found in (same or {"divergences": []})["divergences"] if not found["explained"]]
    if unexplained:
        raise RuntimeError(
            f"{len(unexplained)} greedy answers differ from the autoregressive ones by more than rounding explains, the first "
            f"{unexplained[0]}: decoding is not lossless here; {recipe.results_dir}/summary.json has them all"
        )
    return summary


def check_settings(recipe: Recipe) -> None:
    """What can be wrong before anything is loaded."""
    settings = recipe.eval
    if not settings.benchmarks:
        raise ValueError("eval.benchmarks=[]: name at least one built-in benchmark, or a NAME.jsonl of eval.folder")
    if not settings.methods:
        raise ValueError(f"eval.methods=[]: name at least one of {', '.join(METHODS)}")
    for name, listed in (("benchmarks", settings.benchmarks), ("methods", settings.methods)):
        if len(set(listed)) < len(listed):
            raise ValueError(f"eval.{name}={listed}: names one twice; name each once")
    for method in settings.methods:
        if method not in METHODS:
            raise ValueError(f"eval.methods names {method!r}: use {', '.join(METHODS)}")
    Deployment(**deployment_settings(settings, "dpara"))
    for name in ("max_new_tokens", "batch_size"):
        if getattr(settings, name) < 1:
            raise ValueError(f"eval.{name}={getattr(settings, name)}: use a positive integer")
    if not settings.folder:
        for name in settings.benchmarks:
            built_in(name)


def deployment_settings(settings: EvalSection, method: str) -> dict:
    """How a method decodes; what goes beyond the paper is for the finished drafter alone."""
    beyond = {} if method == "dpara" else {"in_flight_taps": 0, "bonus_guesses": 0}
    return settings.deployment | beyond


def load_drafters(recipe: Recipe, config_file: str, devices: str) -> dict[Stage, MDFlashModel]:
    """The drafters that the methods read, each loaded once and checked against its methods."""
    methods = [METHODS[name] for name in recipe.eval.methods]
    stages = dict.fromkeys(method.stage for method in methods if method.stage)
    sources = {stage: checkpoint(recipe, stage, config_file) for stage in stages}
    drafters = {}
    for stage, path in sources.items():
        published = recipe.drafter.base if stage == "dspark" else None
        drafters[stage] = load_drafter(
            path,
            dtype=recipe.eval.dtype or recipe.target.dtype,
            device=devices.split(",")[-1],
            revision=recipe.drafter.base_revision if published else None,
        )
    for method in methods:
        check_method(method.schedule, drafters.get(method.stage))
    return drafters


def checkpoint(recipe: Recipe, stage: Stage, config_file: str) -> str:
    """Folder or hub id of a stage's drafter; FileNotFoundError says which command makes a missing one."""
    if stage == "dspark" and recipe.drafter.base:
        return recipe.drafter.base
    folder = recipe.stage_dir(stage)
    if not (folder / "config.json").is_file():
        variant = f" --variant {recipe.variant}" if recipe.variant and stage == "mdflash" else ""
        raise FileNotFoundError(
            f"{folder} holds no finished drafter: make it with "
            f"`deepspeed recipes/train_mdflash.py --config {config_file} --stage {stage}{variant}`"
        )
    return str(folder)


def load_recipe_target(recipe: Recipe, devices: str) -> Target:
    """The target where decoding wants it."""
    section = recipe.target
    extra = {"gguf_file": section.gguf_file} if section.gguf_file else {}
    return load_target(
        section.path,
        dtype=recipe.eval.dtype or section.dtype,
        device=devices.split(",")[0],
        revision=section.revision,
        attn_implementation="sdpa",
        **extra,
    )


def compare_training(drafters: Mapping[str, MDFlashModel], chat: Chat) -> None:
    """Warn when a drafter (by stage or folder) was trained on another prompt format: it moves acceptance far."""
    now = {"thinking": chat.thinking, "chat_template_sha256": chat.template_hash}
    for drafter_name, drafter in drafters.items():
        trained = drafter.config.mdflash_config or {}
        for name, value in now.items():
            if trained.get(name, value) != value:
                warnings.warn(
                    f"the {drafter_name} drafter was trained with {name}={trained[name]!r}, this run has {value!r}"
                )


def measure(
    recipe: Recipe,
    target: Target,
    drafters: dict[Stage, MDFlashModel],
    rows: dict[str, list[Row]],
    prompts: dict[str, list[list[int]]],
    devices: str,
) -> dict[str, list[Record]]:
    """Records of every method, benchmarks in order. One `decode` call a benchmark and method: request i is the same one
    in all of them, and so is its noise. Each method is warmed up once, untimed."""
    settings = recipe.eval

    def answer(name: str, ids: list[list[int]], max_new_tokens: int, on_round=None):
        method = METHODS[name]
        return decode(
            target,
            drafters.get(method.stage),
            ids,
            method=method.schedule,
            max_new_tokens=max_new_tokens,
            temperature=settings.temperature,
            devices=devices,
            batch_size=settings.batch_size,
            seed=settings.seed,
            top_k=settings.top_k,
            top_p=settings.top_p,
            on_round=on_round,
            **deployment_settings(settings, name),
        )

    records = {name: [] for name in settings.methods}
    first = next(iter(prompts.values()))[: settings.batch_size]
    with progress(settings.methods, sum(map(len, rows.values()))) as advance:
        for name in settings.methods:
            answer(name, first, min(WARM_UP_TOKENS, settings.max_new_tokens))
        for benchmark, ids in prompts.items():
            for name in settings.methods:
                results = answer(name, ids, settings.max_new_tokens, on_round=advance(name))
                found = [Record.of(name, benchmark, row.id, r) for row, r in zip(rows[benchmark], results, strict=True)]
                if METHODS[name].stage:
                    check_proposed(f"{name} on {benchmark}", found)
                records[name] += found
    return records


@contextmanager
def progress(methods: list[str], requests: int) -> Iterator:
    """A bar per method that counts finished requests; yields advance(method), which is an `on_round` for `decode`."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, refresh_per_second=2) as bars:  # drawn seldom: it shares the host with the decoding
        tasks = {method: bars.add_task(method, total=requests) for method in methods}

        def advance(method: str):
            def on_round(index: int, request: Request) -> None:
                if request.finish_reason:
                    bars.advance(tasks[method])

            return on_round

        yield advance


def figures(recipe: Recipe, records: dict[str, list[Record]]) -> dict:
    """The measured part of the summary: methods, ratios, losslessness."""
    seed, baseline = recipe.eval.seed, records.get("autoregressive")

    def of(method: str, benchmark: str | None = None) -> dict:
        chosen, base = (
            [r for r in found if benchmark in (None, r.benchmark)] for found in (records[method], baseline or [])
        )
        return summarise(chosen, base or None, seed)

    methods = {
        method: {"average": of(method), "benchmarks": {name: of(method, name) for name in recipe.eval.benchmarks}}
        for method in records
    }
    compared = {
        name: (records[ours], records[theirs])
        for name, (ours, theirs) in RATIOS.items()
        if ours in records and theirs in records
    }
    speculative = [record for method in records if METHODS[method].stage for record in records[method]]
    greedy = recipe.eval.temperature == 0 and baseline and speculative
    return {
        "methods": methods,
        "ratios": {name: tau_ratio(*pair, seed) for name, pair in compared.items()},
        "speed_ratios": {name: speedup(*pair, seed) for name, pair in compared.items()},
        "lossless": lossless(speculative, baseline) if greedy else None,
    }


def describe_prompts(recipe: Recipe, chat: Chat, prompts: dict[str, list[list[int]]]) -> dict:
    """Hashes of what every method was given, and where it came from."""
    return {
        "sha256": digest(list(prompts.values())),
        "thinking": chat.thinking,
        "chat_template_sha256": chat.template_hash,
        "turns": "first",
        "benchmarks": {
            name: {"requests": len(ids), "sha256": digest(ids), "source": origin(name, recipe.eval.folder)}
            for name, ids in prompts.items()
        },
    }


def digest(ids: list) -> str:
    """sha256 of nested lists of token ids."""
    return hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()


def write_results(summary: dict, records: dict[str, list[Record]], folder: Path) -> None:
    """Write everything beside the folder, then move it in file by file: a crash on the way keeps earlier results, and
    other files of the folder stay. summary.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        made = Path(name)
        with (made / "requests.jsonl").open("w", encoding="utf-8") as file:
            for record in (record for found in records.values() for record in found):
                file.write(json.dumps(asdict(record), separators=(",", ":")) + "\n")
        write_report(summary, made)
        for file in made.iterdir():
            os.replace(file, folder / file.name)
        (made / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(made / "summary.json", folder / "summary.json")


def portable(value):
    """Text (also inside lists and dicts) without the machine's paths: one below the working folder becomes relative,
    one elsewhere keeps its last name only."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if not isinstance(value, str):
        return value
    key, equals, text = value.partition("=") if value.startswith("--") else ("", "", value)
    path = Path(text)
    if path.is_absolute():
        text = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return key + equals + text


def provenance(module: str, args: list[str] | None) -> dict:
    """What a result must name: command, revision, versions, devices."""
    command = ["python", "-m", module, *(sys.argv[1:] if args is None else args)]
    return {
        "command": shlex.join(portable(word) for word in command),
        "revision": revision(),
        "versions": versions(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [cpu_name()],
    }


def revision() -> str:
    """This code's git commit, "-dirty" when tracked files differ from it; "unknown" without git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def versions() -> dict[str, str]:
    """Of everything that could change a figure."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mdflash": mdflash.__version__,
        "numpy": importlib.metadata.version("numpy"),
    }
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def device_names(devices: str) -> dict[str, dict[str, str]]:
    """Device and hardware name of target and drafter (DPara's; serial methods draft on the target's device)."""
    names = devices.split(",")
    return {
        role: {"device": device, "name": torch.cuda.get_device_name(device) if "cuda" in device else cpu_name()}
        for role, device in (("target", names[0]), ("drafter", names[-1]))
    }


def cpu_name() -> str:
    """Model and threads in use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
