"""A study in Markdown, with its plots."""

from pathlib import Path

from .report import canvas, interval, save


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, numbers to the right; nothing without rows."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""] if rows else []


def number(value: float | None, digits: int = 3) -> str:
    """3.490; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def page(found: dict, stem: str) -> str:
    """The study in Markdown."""
    lines = [f"# {stem}", "", "Made by `make study`; every figure is in the JSON beside this page.", ""]
    if found["missing"]:
        lines += [f"Not measured yet: {', '.join(found['missing'])}.", ""]
    lines += table(["figure", "value"], [[f"`{name}`", number(value)] for name, value in found["figures"].items()])
    for title, key in (("Greedy", "greedy"), ("Temperature 1", "sampled")):
        lines += acceptance_section(title, found[key], found["ratios"][key])
    if same := found["lossless"]:
        told = f"Greedy answers identical to autoregressive: {same['identical']} of {same['of']}"
        if same["identical"] < same["of"]:
            told += f"; of the others rounding explains {same['explained']} (largest margin {number(same['largest_margin'])})"
        lines += [f"{told}.", ""]
    for name, rows in found["shares"].items():
        lines += [f"## Share of DSpark's acceptance length: {name}", "", *shares_table(rows)]
        if name == "early":
            lines += [f"![Shares by taps and guesses]({stem}_shares.png)", ""]
    if found["gap"]:
        lines += [
            "## What limits τ",
            "",
            *table(["share of DSpark's", ""], [[k, number(v)] for k, v in found["gap"].items()]),
        ]
    lines += positions_section(found["positions"])
    lines += speed_section(found["speed"])
    for name, rows in found["projections"].items():
        lines += projection_section(name, rows)
    lines += ["## Curves", "", f"![Held-out acceptance length]({stem}_curves.png)", "", "## Made with", "", "```"]
    lines += [
        *found["command"],
        "```",
        "",
        f"Revision {', '.join(found['revision'])} on {', '.join(found['devices'])}.",
    ]
    return "\n".join(lines) + "\n"


def acceptance_section(title: str, methods: dict | None, ratios: dict | None) -> list[str]:
    """τ by benchmark and method, and the paired ratios."""
    if not methods:
        return []
    names = next(iter(methods.values()))
    rows = [[name, *(interval(*figures[name]) for figures in methods.values())] for name in names]
    told = [
        f"- {name.replace('_', ' ')}: {interval(ratio['value'], ratio['ci95'], 3)} (pooled, paired by request)"
        for name, ratio in (ratios or {}).items()
        if ratio
    ]
    return [f"## {title}", "", *table(["τ", *methods], rows), *told, ""]


def shares_table(rows: dict[str, dict]) -> list[str]:
    """Replays under several counts of taps as a grid by guesses, the others a line each."""
    drawn = [row for row in rows.values() if row["finetuned"] and not row["serial"]]
    counts = sorted({row["taps"] for row in drawn})
    if len(counts) < 2:
        return shares_lines(rows)
    lines = shares_lines({name: row for name, row in rows.items() if row not in drawn})
    cells = {(row["taps"], "known" if row["oracle"] else row["guesses"]): row for row in drawn}
    columns = sorted({row["guesses"] for row in drawn}) + ["known"]

    def cell(taps: int, guesses: int | str) -> str:
        if (row := cells.get((taps, guesses))) is None:
            return "-"
        hits = f", {row['hit_rate']:.0%} right" if guesses not in (0, "known") else ""
        return interval(row["share"], row["ci95"], 3) + hits

    header = ["taps in flight", *(f"bonus {of}" if of == "known" else f"F = {of}" for of in columns)]
    return [*lines, *table(header, [[str(taps), *(cell(taps, of) for of in columns)] for taps in counts])]


def shares_lines(rows: dict[str, dict]) -> list[str]:
    """One line a replay."""
    told = [
        [name, number(row["tau"]), interval(row["share"], row["ci95"], 3), number(row["hit_rate"], 2)]
        for name, row in rows.items()
    ]
    return table(["replay", "τ", "share", "guessed right"], told)


def positions_section(methods: dict[str, dict]) -> list[str]:
    """Conditional acceptance by draft position, of every method and by the branch that a round took."""
    if not methods:
        return []
    told = "Of the drafts at a position whose predecessors were accepted, the share that was accepted too."
    behind = [
        [f"{name}, r = {r}", str(found["rounds"]), number(found["tau"], 2), *(number(v, 2) for v in found["conditional"])]
        for name, of in methods.items()
        for r, found in of["by_r"].items()
    ]  # fmt: skip
    width = max(len(of["conditional"]) for of in methods.values())
    header = [str(position) for position in range(1, width + 1)]
    by_method = [[name, *(number(v, 2) for v in of["conditional"])] for name, of in methods.items()]
    lines = ["## Acceptance by position", "", told, "", *table(["position", *header], by_method)]
    behind = [row + ["-"] * (len(header) + 3 - len(row)) for row in behind]
    why = "By r, the drafts that the round before accepted (a branch has r + 1 anchors): rounds, τ, acceptance by position."
    return [*lines, why, "", *table(["after", "rounds", "τ", *header], behind)] if behind else lines


def speed_section(speed: dict) -> list[str]:
    """Measured gains, a line for every run and method."""
    rows = []
    for name, run in speed.items():
        for method, gain in run["over_autoregressive"].items():
            ours = method == "dpara"
            over = run["over_dspark"] if ours else None
            rows.append([
                name, f"{method}, {run['taps']} taps, {run['guesses']} guesses" if ours else method, run["devices"],
                str(run["batch"]), f"{run['temperature']:g}", number(run["tokens_per_s"][method], 0),
                interval(gain["value"], gain["ci95"]) if gain else "-",
                interval(over["value"], over["ci95"]) if over else "-",
            ])  # fmt: skip
    header = ["run", "method", "devices", "batch", "temperature", "tokens/s of a request", "over AR", "over DSpark"]
    return ["## Measured speed", "", *table(header, rows)] if rows else []


def projection_section(name: str, rows: list[dict]) -> list[str]:
    """The projection of one shape, its best hidden schedule of every batch first named."""
    lines = [
        f"## Projection: {name}",
        "",
        "Share of this model times the measured steps of that shape: no measurement.",
        "",
    ]
    for batch in sorted({row["batch"] for row in rows}):
        hidden = [row for row in rows if row["batch"] == batch and row["hidden"]]
        if best := max(hidden, key=lambda row: row["over_dspark"], default=None):
            told = f"{best['taps']} taps, {best['guesses']} guesses: {best['over_dspark']:.3f} x DSpark's tokens/s"
            lines.append(f"- batch {batch}, best hidden: {told}")
    header = ["batch, taps, guesses", "step, ms", "DSpark step, ms", "hidden", "over DSpark"]
    told = [
        [
            f"{row['batch']}, {row['taps']}, {row['guesses']}", number(row["step_ms"], 2), number(row["dspark_step_ms"], 2),
            number(row["hidden_share"], 2), number(row["over_dspark"]),
        ]
        for row in rows
    ]  # fmt: skip
    return [*lines, "", *table(header, told)]


def plot_curves(curves: dict[str, list[dict]], file: Path) -> None:
    """Held-out acceptance length by step, a line a stage."""
    figure, axes = canvas(width=7)
    for index, (name, points) in enumerate(curves.items()):
        shown = [(point["step"], point["tau"]) for point in points if point["tau"]]
        axes.plot(*zip(*shown, strict=True), marker="o", color=f"C{index}", label=name) if shown else None
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("held-out τ, decoded as trained")
    save(figure, axes, file, columns=3)


def plot_shares(shares: dict[str, dict], file: Path) -> None:
    """Share of DSpark's τ by guesses, a line for every count of taps."""
    figure, axes = canvas(width=7)
    rows = [r for r in shares.get("early", {}).values() if r["finetuned"] and not r["serial"] and not r["oracle"]]
    for index, taps in enumerate(sorted({row["taps"] for row in rows})):
        line = sorted((row["guesses"], row["share"]) for row in rows if row["taps"] == taps)
        axes.plot(*zip(*line, strict=True), marker="o", color=f"C{index}", label=f"{taps} taps in flight")
    axes.set_xlabel("guessed bonuses a boundary")
    axes.set_ylabel("share of DSpark's τ")
    axes.set_xticks(sorted({row["guesses"] for row in rows}))
    save(figure, axes, file, columns=3)
