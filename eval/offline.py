"""Greedy decoding replayed on known answers (replay.py): an independent check of the decoders, and a quick way to measure many
settings.

    python -m eval.offline --config recipes/NAME.yaml --output FILE.json [--taps '[0,3,4]'] [--guesses '[0,4]']

decodes the recipe's benchmarks autoregressively once (greedy), replays DSpark, its checkpoint untuned in DPara mode and the
M-DFlash drafter under every pair of taps and guesses on those answers, and writes each one's acceptance length and its share of
DSpark's. `--variants '[a,b]'` replays several finetunes; `--live 20` decodes that many requests live and counts equal ones.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

from mdflash import MDFlashModel, RequestResult, Target, decode, load_drafter
from mdflash.chat import Chat
from mdflash.decoding.build import check_method
from mdflash.decoding.fast import why_not_fast
from mdflash.decoding.types import Round
from mdflash.recipe import EvalSection, Recipe, Stage, read_recipe, require
from mdflash.target.target import check_pair
from mdflash.training.checkpoints import write_whole

from .benchmarks import load
from .replay import Setting, Texts, comparable, replay
from .run import check_settings, checkpoint, compare_training, load_recipe_target, provenance
from .statistics import Record, by_branch, summarise, tau_ratio

GUESS_SOURCES = ("spine", "draft")


def main(args: list[str] | None = None) -> dict:
    """Replay the grid, rewriting the output file after every setting; returns what it holds."""
    recipe, values = read_recipe(args, __doc__.splitlines()[0], extra=arguments)
    check_values(values)
    check_settings(recipe)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    kinds = grid(values.variants, values.taps, values.guesses, values.guess_source, values.oracle_taps)
    config_file = str(values.config[-1]) if values.config else "RECIPE.yaml"
    folders = {
        name: checkpoint(recipe if variant is None else replace(recipe, variant=variant), stage, config_file)
        for name, (stage, variant, _) in kinds.items()
    }
    by_folder = {
        folder: {name: kinds[name][2] for name in kinds if folders[name] == folder} for folder in folders.values()
    }
    drafters = {folder: load_one(recipe, folder, device) for folder in by_folder}
    target = load_recipe_target(recipe, device)
    for folder, settings in by_folder.items():
        check_pair(target, drafters[folder])
        check_drafter(drafters[folder], settings)
    reason = why_not_fast(target) if values.live and recipe.eval.runner == "fast" else None
    require(not reason, "eval.runner", "fast", f"{reason}; use auto or eager")
    chat = Chat(target.tokenizer, target.stop_ids, recipe.target.thinking)
    compare_training(drafters, chat)
    asked, prompts = questions(recipe, chat)
    require(values.live <= len(asked), "live", values.live, f"there are {len(asked)} requests; use a number up to that")
    output = Path(values.output)
    made = provenance("eval.offline", args) | {"recipe": recipe.name, "requests": len(asked), "replays": {}}
    answers = greedy_answers(target, prompts, recipe.eval, device)
    some = prompts[:: len(prompts) // values.live][: values.live] if values.live else []
    base: list[Record] = []
    for folder, settings in by_folder.items():
        for name, records in replayed(target, drafters[folder], asked, prompts, answers, settings, values.at_once):
            base = base or records
            made["replays"][name] = asdict(settings[name]) | figures(records, base, recipe)
            if some and not settings[name].bonus_known:
                made["replays"][name]["live"] = live_agreement(
                    target, drafters[folder], some, settings[name], recipe.eval
                )
            write_whole(output, json.dumps(made, indent=1) + "\n")
            print(line(name, made["replays"][name]), flush=True)
    return made


def line(name: str, found: dict) -> str:
    """A replay's figures for the terminal."""
    share = found["share_of_dspark"]
    tau = f"macro tau {found['tau_macro']:.3f}  pooled tau {found['tau_pooled']:.3f}" if share else "no rounds"
    text = f"{name:32} {tau}" + (f" ({share['value']:.3f} of DSpark's)" if share else "")
    live = f"  live {found['live']['equal']} of {found['live']['requests']}" if "live" in found else ""
    return text + f"  bonuses guessed {found['hit_rate']:.2f}" + live


def check_values(values) -> None:
    """What can be wrong in the command's own options before anything is loaded."""
    require(min(values.taps, default=0) >= 0, "taps", values.taps, "use counts from 0 on")
    require(
        min(values.guesses, default=0) >= -1, "guesses", values.guesses, "use counts from 0 on, or -1 to know the bonus"
    )
    require(
        values.guess_source in GUESS_SOURCES, "guess_source", values.guess_source, f"use {' or '.join(GUESS_SOURCES)}"
    )
    require(len(set(values.variants)) == len(values.variants), "variants", values.variants, "name each once")
    require(values.live >= 0, "live", values.live, "use 0 for none, or a number of requests")
    require(values.at_once > 0, "at_once", values.at_once, "use a positive number of texts")
    folder = not values.output or Path(values.output).is_dir()
    require(not folder, "output", values.output, "name a JSON file, not a folder")
    Path(values.output).parent.mkdir(parents=True, exist_ok=True)
    require(values.oracle_taps >= 0, "oracle_taps", values.oracle_taps, "use 0 for none, or a count of taps")


def check_drafter(drafter: MDFlashModel, settings: dict[str, Setting]) -> None:
    """Whether the drafter can do what is asked of it; a rank-0 one is no DSpark drafter."""
    check_method("dspark", drafter)
    vocabulary = drafter.config.vocab_size
    for setting in settings.values():
        drafter.config.check_taps("taps", setting.in_flight_taps)
        rule = f"the vocabulary has {vocabulary} tokens; use a few"
        require(setting.guesses < vocabulary, "guesses", setting.guesses, rule)


def load_one(recipe: Recipe, folder: str, device: str) -> MDFlashModel:
    """A replayed drafter, a published one at its pinned revision."""
    revision = recipe.drafter.base_revision if folder == recipe.drafter.base else None
    return load_drafter(folder, recipe.eval.dtype or recipe.target.dtype, device, revision)


def arguments(parser) -> None:
    """What this command adds to a recipe's."""
    parser.add_argument("--output", type=str, required=True, help="JSON file that the figures are written to")
    parser.add_argument("--taps", type=list[int], default=[0], help="counts of taps in flight to replay")
    parser.add_argument(
        "--guesses", type=list[int], default=[0], help="counts of guessed bonuses to replay; -1 knows it"
    )
    parser.add_argument(
        "--oracle_taps", type=int, default=0, help="also with so many taps, guessing nothing and knowing it"
    )
    parser.add_argument("--guess_source", type=str, default="spine", help="where guesses come from: spine or draft")
    parser.add_argument("--variants", type=list[str], default=[], help="finetunes to replay; else the recipe's variant")
    parser.add_argument("--live", type=int, default=0, help="decode so many requests live too and compare the rounds")
    parser.add_argument("--at_once", type=int, default=1024, help="texts replayed at once; bounded by memory")


def grid(
    variants: Sequence[str],
    taps: Sequence[int],
    guesses: Sequence[int],
    source: str = "spine",
    oracle_taps: int = 0,
) -> dict[str, tuple[Stage, str | None, Setting]]:
    """The replays by name: whose drafter (a stage's; of a variant, None for the recipe's) under which setting."""
    kinds: dict[str, tuple[Stage, str | None, Setting]] = {
        "dspark": ("dspark", None, Setting(serial=True)),
        "dpara-untuned": ("dspark", None, Setting()),
    }
    for variant in variants or [None]:
        prefix = "" if variant is None else f"{variant or 'mdflash'}: "
        kinds[f"{prefix}mdflash-serial"] = "mdflash", variant, Setting(serial=True)
        for count, guess in [*product(taps, guesses), *product([oracle_taps] * bool(oracle_taps), (0, -1))]:
            known = "bonus known" if guess < 0 else f"guesses={guess}"
            setting = Setting(False, count, max(guess, 0), guess < 0, source)
            kinds[f"{prefix}dpara taps={count} {known}"] = "mdflash", variant, setting
    return kinds


def questions(recipe: Recipe, chat: Chat) -> tuple[list[tuple[str, str]], list[list[int]]]:
    """(benchmark, row id) and prompt of every request, benchmarks in order."""
    rows = [
        (name, row) for name in recipe.eval.benchmarks for row in load(name, recipe.eval.folder, recipe.eval.requests)
    ]
    prompts = [chat.prompt([{"role": "user", "content": row.turns[0]}]) for _, row in rows]
    return [(name, row.id) for name, row in rows], prompts


def greedy_answers(target: Target, prompts: list[list[int]], settings: EvalSection, device: str) -> list[Sequence[int]]:
    """The target's own answers."""
    given = {"max_new_tokens": settings.max_new_tokens, "devices": device, "batch_size": settings.batch_size}
    return [result.token_ids for result in decode(target, None, prompts, "autoregressive", **given)]


def replayed(
    target: Target, drafter: MDFlashModel, asked: list[tuple[str, str]], prompts: list[list[int]],
    answers: list[Sequence[int]], settings: dict[str, Setting], at_once: int,
) -> Iterator[tuple[str, list[Record]]]:  # fmt: skip
    """Every setting with its records, the first one's first; `at_once` texts share a pass."""
    records: dict[str, list[Record]] = {name: [] for name in settings}
    for part in (slice(i, i + at_once) for i in range(0, len(asked), at_once)):
        texts = Texts(target, drafter, prompts[part], answers[part])
        for name, setting in tqdm(settings.items(), desc="replays", unit="setting"):
            found = zip(asked[part], prompts[part], answers[part], texts.rounds(setting), strict=True)
            records[name] += [record(name, *of, *one) for of, *one in found]
            if len(records[name]) == len(asked):
                yield name, records[name]


def live_agreement(
    target: Target, drafter: MDFlashModel, prompts: list[list[int]], setting: Setting, settings: EvalSection
) -> dict[str, int]:
    """Decode prompts live and replay those answers: of how many requests every round is the same. Exact in fp32."""
    beyond = {name: getattr(setting, name) for name in ("in_flight_taps", "guess_source")}
    given = {} if setting.serial else beyond | {"bonus_guesses": setting.guesses}
    method, devices = ("dspark" if setting.serial else "dpara"), f"{target.device},{target.device}"
    results = decode(
        target, drafter, prompts, method, settings.max_new_tokens, devices=devices, batch_size=settings.batch_size,
        runner=settings.runner, **given,
    )  # fmt: skip
    (found,) = replay(target, drafter, prompts, [result.token_ids for result in results], [setting])
    pairs = zip(results, found, strict=True)
    equal = sum(comparable(result.rounds) == comparable(rounds) for result, rounds in pairs)
    return {"requests": len(prompts), "equal": equal, "rounds": sum(map(len, found))}


def record(
    method: str, benchmark: str, row_id: str, prompt: list[int], answer: Sequence[int], rounds: list[Round]
) -> Record:
    """A replay as the statistics take it; it has no times."""
    return Record.of(
        method, benchmark, row_id, RequestResult(tuple(answer), "stop", tuple(rounds), len(prompt), 0.0, 0.0)
    )


def figures(records: list[Record], dspark: list[Record], recipe: Recipe) -> dict:
    """Acceptance lengths, the share of DSpark's, guesses that were right, and what a round commits by how many drafts the
    round before accepted (its branch)."""
    seed, found = recipe.eval.seed, summarise(records, None, recipe.eval.seed)
    drafted = found["rounds"] - found["cold_starts"]
    names = ("tau_pooled", "tau_ci95", "tau_macro", "tau_macro_ci95", "positions")
    return {
        **{name: found[name] for name in names},
        "benchmarks": {
            name: summarise([x for x in records if x.benchmark == name], None, seed)["tau_pooled"]
            for name in recipe.eval.benchmarks
        },
        "share_of_dspark": tau_ratio(records, dspark, seed),
        "hit_rate": round(found["guessed_rounds"] / drafted, 4) if drafted else 0.0,
        "tau_after_r": {r: branch["tau"] for r, branch in by_branch(records).items()},
    }


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
