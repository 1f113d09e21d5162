"""A study's parts as one result: figures of record, tables and plots, from what its commands left behind.

    python -m eval.study --config recipes/NAME.yaml --output docs/results/FILE.json [--latency '[GRID.json, ..]']

Reads from results/NAME (`make study` fills it; a part that is not there is named under "missing" and its figures are null):
`greedy/` and `sampled/` (evaluations at the full length), `speed/*/` (evaluations made for their times), `replay/*.json`
(offline replays: `early` holds the grid of taps and guesses, `seeds` the paper's finetune under several seeds, every other
file an idea's), and from runs/NAME the finetunes' curves. `--latency` names grids of `eval.decoding_speed` whose measured
steps the projection divides by. Beside FILE.json it writes FILE.md, FILE_curves.png and FILE_shares.png.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mdflash.recipe import Recipe, read_recipe, require

from .statistics import Record, by_branch
from .study_page import page, plot_curves, plot_shares

MADE = ("command", "revision", "versions", "devices")
SUMMARY, REPLAY, GRID = (*MADE, "config", "methods", "ratios", "lossless"), (*MADE, "replays"), (*MADE, "ms")
HIDDEN = 0.99  # share of rounds whose drafting must be done before the verify pass for a schedule to count as hidden


def main(args: list[str] | None = None) -> dict:
    """Gather, write, and return what the JSON holds."""
    recipe, values = read_recipe(args, __doc__.splitlines()[0], extra=arguments)
    output = Path(values.output)
    require(output.suffix == ".json", "output", values.output, "name a .json file; page and plots lie beside it")
    require(
        len({Path(file).stem for file in values.latency}) == len(values.latency),
        "latency",
        values.latency,
        "give each file a name of its own",
    )
    parts = Parts(recipe, [Path(file) for file in values.latency])
    rule = "nothing is measured there yet; run `make study-measure`"
    require(bool(parts.all()), "results", str(recipe.results_dir), rule)
    found = study(parts)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page(found, output.stem), encoding="utf-8")
    plot_curves(found["curves"], output.with_name(f"{output.stem}_curves.png"))
    plot_shares(found["shares"], output.with_name(f"{output.stem}_shares.png"))
    print(json.dumps(found["figures"], indent=1))
    if found["missing"]:
        print(f"not measured yet: {', '.join(found['missing'])}")
    return found


def arguments(parser) -> None:
    """What this command adds to a recipe's."""
    parser.add_argument(
        "--output", type=str, required=True, help="JSON file of the study; page and plots lie beside it"
    )
    parser.add_argument("--latency", type=list[str], default=[], help="grids of eval.decoding_speed to project with")


class Parts:
    """What is there, as read: None or {} for what is not."""

    def __init__(self, recipe: Recipe, latency: list[Path]):
        folder = recipe.results_dir
        greedy, sampled, *speed = (folder / "greedy", folder / "sampled", *sorted(folder.glob("speed/*")))
        self.greedy, self.sampled = (read(part / "summary.json", SUMMARY) for part in (greedy, sampled))
        self.speed = {part.name: read(part / "summary.json", SUMMARY) for part in speed}
        self.speed = {name: summary for name, summary in self.speed.items() if summary}
        self.replays = {file.stem: read(file, REPLAY) for file in sorted(folder.glob("replay/*.json"))}
        self.branches = branches(greedy / "requests.jsonl")
        curves = sorted(recipe.run_dir.glob("*/training.json"))
        self.trained = {file.parent.name: read(file, ("loss_curve",)) for file in curves}
        for file in latency:
            require(file.is_file(), "latency", str(file), "no such file; name grids of eval.decoding_speed")
        self.latency = {file.stem: read(file, GRID) for file in latency}

    def all(self) -> list[dict]:
        """Every measured file."""
        single = [part for part in (self.greedy, self.sampled) if part]
        return [*single, *self.speed.values(), *self.replays.values(), *self.latency.values()]

    @property
    def missing(self) -> list[str]:
        """Parts of a whole study that are not there."""
        there = {
            "greedy": self.greedy, "sampled": self.sampled, "speed": self.speed, "replay/early": self.replays.get("early"),
            "replay/seeds": self.replays.get("seeds"), "latency": self.latency, "curves": self.trained,
        }  # fmt: skip
        return [name for name, part in there.items() if not part]


def read(file: Path, keys: Sequence[str]) -> dict | None:
    """A JSON file, None where there is none. ValueError names one that is torn or lacks one of the keys."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): run its command again, or delete it") from error
    missing = [key for key in keys if not isinstance(found, dict) or key not in found]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}: run its command again, or delete it")
    return found


def branches(file: Path) -> dict[str, dict[int, dict]]:
    """By method and r: rounds, their tokens and conditional acceptance by position, of an evaluation's requests."""
    if not file.is_file():
        return {}
    records: dict[str, list[Record]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = Record(**json.loads(line))
        records.setdefault(record.method, []).append(record)
    return {
        method: {
            r: {name: found[name] for name in ("rounds", "tau", "conditional")}
            for r, found in by_branch(of).items()
        }
        for method, of in records.items()
    }  # fmt: skip


def study(parts: Parts) -> dict:
    """Everything the JSON holds."""
    shares = {name: share_table(replay) for name, replay in parts.replays.items()}
    projections = {name: project(grid, shares.get("early", {})) for name, grid in parts.latency.items()}
    measured = parts.all()
    return {
        "command": [part["command"] for part in measured],
        "revision": sorted({part["revision"] for part in measured}),
        "versions": measured[0]["versions"],
        "devices": sorted({name for part in measured for name in device_names(part)}),
        "missing": parts.missing,
        "figures": headline(parts, shares, projections),
        "curves": {curve_name(name, run): curve(run) for name, run in parts.trained.items()},
        "greedy": taus(parts.greedy),
        "sampled": taus(parts.sampled),
        "ratios": {name: (part or {}).get("ratios") for name, part in (("greedy", parts.greedy), ("sampled", parts.sampled))},
        "lossless": losslessness(parts.greedy),
        "shares": shares,
        "gap": gap(shares.get("early", {})),
        "positions": positions(parts),
        "speed": {name: speeds(summary) for name, summary in parts.speed.items()},
        "projections": projections,
    }  # fmt: skip


def device_names(part: dict) -> list[str]:
    """Names of the devices that a part ran on."""
    devices = part["devices"]
    return [device["name"] for device in devices.values()] if isinstance(devices, dict) else devices


def headline(parts: Parts, shares: dict, projections: dict) -> dict:
    """The figures of record."""
    greedy, early = parts.greedy or {"methods": {}, "ratios": {}}, shares.get("early", {})
    untuned, ours = greedy["ratios"].get("dpara_over_untuned"), greedy["ratios"].get("dpara_over_dspark")
    best = {
        name: max((row["over_dspark"] for row in rows if row["batch"] == 1 and row["hidden"]), default=None)
        for name, rows in projections.items()
    }

    def tau(method: str) -> float | None:
        return greedy["methods"].get(method, {}).get("average", {}).get("tau_macro")

    def most(taps: int) -> float | None:
        rows = (row for row in early.values() if row["taps"] == taps and row["guesses"] <= 4 and not row["oracle"])
        return max((row["share"] for row in rows), default=None)

    return {
        "tau_dspark": tau("dspark"),
        "tau_untuned": tau("dpara-untuned"),
        "tau_mdflash": tau("dpara"),
        "ratio_untuned": untuned and untuned["value"],
        "ratio_untuned_low": untuned and untuned["ci95"][0],
        "ratio_dspark": ours and ours["value"],
        "ratio_3taps": most(3),
        "ratio_4taps": most(4),
        "serial_kept": next((row["share"] for row in early.values() if row["serial"] and row["finetuned"]), None),
        "projected_over_dspark_14b_b1": next((value for name, value in best.items() if "14b" in name), None),
    }


def share_table(replay: dict) -> dict[str, dict]:
    """Each replay's setting, acceptance length and share of DSpark's."""
    return {
        name: {
            "taps": found["in_flight_taps"], "guesses": found["guesses"], "source": found["guess_source"],
            "oracle": found["bonus_known"], "serial": found["serial"], "finetuned": name not in ("dspark", "dpara-untuned"),
            "tau": found["tau_macro"], "share": found["share_of_dspark"]["value"], "ci95": found["share_of_dspark"]["ci95"],
            "hit_rate": found["hit_rate"], "after_r": found["tau_after_r"],
        }
        for name, found in replay["replays"].items()
        if found["share_of_dspark"]
    }  # fmt: skip


def gap(early: dict[str, dict]) -> dict[str, float] | None:
    """DSpark's share that one checkpoint lacks, split by oracle replays: features in flight and the bonus known, one after
    the other, then what the finetune forgot of the serial mode."""
    all_taps = max((row["taps"] for row in early.values()), default=0)

    def share(taps: int, known: bool) -> float | None:
        rows = (r for r in early.values() if r["finetuned"] and not r["serial"] and r["taps"] == taps)
        return next((r["share"] for r in rows if r["oracle"] == known and (known or not r["guesses"])), None)

    kept = next((row["share"] for row in early.values() if row["serial"] and row["finetuned"]), None)
    stairs = [share(0, False), share(all_taps, False), share(all_taps, True), kept, 1.0]
    if None in stairs:
        return None
    names = ("missing features", "unknown bonus", "branch instead of serial window", "forgotten serial mode")
    steps = zip(names, stairs, stairs[1:], strict=False)
    return {"paper's mode": stairs[0]} | {name: round(above - below, 4) for name, below, above in steps}


def taus(summary: dict | None) -> dict | None:
    """Acceptance lengths of an evaluation, by method and benchmark, with intervals."""
    if not summary:
        return None
    return {
        method: {name: [of["tau_pooled"], of["tau_ci95"]] for name, of in figures["benchmarks"].items()}
        | {"macro": [figures["average"]["tau_macro"], figures["average"]["tau_macro_ci95"]]}
        for method, figures in summary["methods"].items()
        if method != "autoregressive"
    }


def positions(parts: Parts) -> dict:
    """Conditional acceptance by draft position, of all rounds and of those behind r accepted drafts."""
    methods = parts.greedy["methods"] if parts.greedy else {}
    return {
        name: {"conditional": figures["average"]["positions"]["conditional"], "by_r": parts.branches.get(name, {})}
        for name, figures in methods.items()
        if name != "autoregressive"
    }


def losslessness(summary: dict | None) -> dict | None:
    """Counts of identical and differing greedy answers, the latter's margins."""
    if not summary or not summary["lossless"]:
        return None
    differing = summary["lossless"]["divergences"]
    margins = sorted(found["margin"] for found in differing if found.get("margin") is not None)
    return {
        "identical": summary["lossless"]["greedy_identical"], "of": summary["lossless"]["greedy_total"],
        "explained": sum(found["explained"] for found in differing),
        "largest_margin": margins[-1] if margins else None,
    }  # fmt: skip


def speeds(summary: dict) -> dict:
    """Tokens a second and gains of an evaluation, with what it ran under."""
    settings = summary["config"]["eval"]
    settled = summary.get("auto", {})  # by batch size, which a short benchmark makes smaller
    settings |= settled.get(str(settings["batch_size"])) or (settled[max(settled, key=int)] if settled else {})
    return {
        "batch": settings["batch_size"], "temperature": settings["temperature"],
        "devices": ", ".join(dict.fromkeys(device["device"] for device in summary["devices"].values())),
        "taps": settings["in_flight_taps"], "guesses": settings["bonus_guesses"],
        "tokens_per_s": {name: figures["average"]["tokens_per_s"] for name, figures in summary["methods"].items()},
        "over_autoregressive": {
            name: figures["average"]["speedup"] for name, figures in summary["methods"].items() if name != "autoregressive"
        },
        "over_dspark": summary.get("speed_ratios", {}).get("dpara_over_dspark"),
    }  # fmt: skip


def project(grid: dict, early: dict[str, dict]) -> list[dict]:
    """Expected tokens a second over serial DSpark's at a shape: this study's share of DSpark's acceptance length times that
    shape's DSpark step over the measured one. For every pair of taps and guesses that both were measured for."""
    shares = {
        (row["taps"], row["guesses"]): row["share"]
        for row in early.values()
        if row["finetuned"] and not row["serial"] and not row["oracle"] and row["source"] == "spine"
    }
    rows = []
    for name, ms in grid["ms"].items():
        if not name.startswith("dpara_b") or name.count("_") != 3:
            continue
        batch, taps, guesses = (int(part[1:]) for part in name.split("_")[1:])
        if (share := shares.get((taps, guesses))) is not None:
            dspark, hidden = grid["ms"][f"dspark_b{batch}"]["step"], ms["hidden_share"]
            rows.append({
                "batch": batch, "taps": taps, "guesses": guesses, "step_ms": ms["step"], "dspark_step_ms": dspark,
                "hidden_share": hidden, "hidden": hidden >= HIDDEN, "over_dspark": round(share * dspark / ms["step"], 4),
            })  # fmt: skip
    return rows


def curve_name(stage: str, trained: dict) -> str:
    """The stage, and how its held-out acceptance length was decoded where that is not DPara."""
    serial = stage == "dspark" or trained.get("recipe", {}).get("mdflash", {}).get("windows") == "serial"
    return f"{stage} (serial)" if serial else stage


def curve(trained: dict) -> list[dict]:
    """Held-out loss and acceptance length over a stage's steps."""
    seen = {entry["step"]: entry for entry in trained["loss_curve"] if "eval_loss" in entry}
    return [
        {
            "step": step,
            "loss": round(entry["eval_loss"], 4),
            "tau": entry.get("eval_tau") and round(entry["eval_tau"], 4),
        }
        for step, entry in seen.items()
    ]


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
