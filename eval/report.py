"""A summary as a Markdown table, two plots and a table in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Cell:
    """One method's τ, its interval, and its speedup over autoregressive (None where there is none)."""

    tau: float | None
    ci95: Sequence[float] | None
    gain: dict | None

    @classmethod
    def of(cls, figures: dict) -> "Cell":
        """From the figures of a benchmark or of the average."""
        return cls(figures["tau_pooled"], figures["tau_ci95"], figures["speedup"])

    @property
    def speedup(self) -> str:
        """1.87 [1.80, 1.95] (1.71): without prefill, with its interval, and of the whole request."""
        if not self.gain:
            return "-"
        return f"{interval(self.gain['value'], self.gain['ci95'])} ({self.gain['whole_request']:.2f})"

    @property
    def short(self) -> str:
        """3.46 (1.87x): τ and speedup without prefill."""
        return ("-" if self.tau is None else f"{self.tau:.2f}") + (f" ({self.gain['value']:.2f}x)" if self.gain else "")


def write_report(summary: dict, folder: Path) -> None:
    """table.md, tau_by_benchmark.png and acceptance_by_position.png into an existing folder."""
    (folder / "table.md").write_text(markdown(summary), encoding="utf-8")
    plot_tau(summary, folder / "tau_by_benchmark.png")
    plot_positions(summary, folder / "acceptance_by_position.png")


def grid(summary: dict) -> dict[str, list[Cell]]:
    """A row per benchmark, then the averages; a cell per method."""
    methods = summary["methods"].values()
    names = next(iter(methods))["benchmarks"]
    rows = {name: [Cell.of(figures["benchmarks"][name]) for figures in methods] for name in names}
    averages = [figures["average"] for figures in methods]
    rows["pooled average"] = [Cell.of(average) for average in averages]
    rows["macro average"] = [Cell(average["tau_macro"], average["tau_macro_ci95"], None) for average in averages]
    return rows


def interval(value: float | None, ci95: Sequence[float] | None, digits: int = 2) -> str:
    """3.46 [3.41, 3.52]; one without spread is the value alone."""
    if value is None:
        return "-"
    low, high = ci95
    return f"{value:.{digits}f}" + ("" if low == high == value else f" [{low:.{digits}f}, {high:.{digits}f}]")


def markdown(summary: dict) -> str:
    """The report in Markdown: table, ratios, losslessness, and how to make it again."""
    header = ["benchmark", *(f"{method} {figure}" for method in summary["methods"] for figure in ("τ", "speedup"))]
    rows = [
        [name, *(text for cell in cells for text in (interval(cell.tau, cell.ci95), cell.speedup))]
        for name, cells in grid(summary).items()
    ]
    settings = summary["config"]["eval"]
    lines = [
        f"# {summary['config']['name']}" + (f", {variant}" if (variant := summary["config"].get("variant")) else ""),
        "",
        f"τ: tokens committed per target verification, bonus included, pooled over requests [95% bootstrap interval]. "
        f"Speedup: tokens a second over autoregressive without prefill (whole request in brackets). "
        f"{settings['requests'] or 'All'} requests a benchmark, at most {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']:g}, batch {settings['batch_size']}, "
        f"thinking {'on' if summary['prompts']['thinking'] else 'off'}." + early(summary),
        "",
        "| " + " | ".join(header) + " |",
        "| --- |" + " ---: |" * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"- {line}" for line in notes(summary)),
        "",
        "## Made with",
        "",
        "```",
        summary["command"],
        "```",
        "",
        f"- revision {summary['revision']}",
        "- " + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
        *(f"- {role} on {device['device']}: {device['name']}" for role, device in summary["devices"].items()),
    ]
    return "\n".join(lines) + "\n"


def early(summary: dict) -> str:
    """What `dpara` drafted behind and guessed, where that is not the paper's nothing; `auto` with what it came to."""
    settings = summary["config"]["eval"]
    taps, guesses = (settings.get(name, 0) for name in ("in_flight_taps", "bonus_guesses"))
    if taps == guesses == 0:
        return ""
    chosen = [f"{found['in_flight_taps']} and {found['bonus_guesses']}" for found in summary.get("auto", {}).values()]
    came_to = f" (came to {', '.join(chosen)})" if chosen else ""
    return f" `dpara` with {taps} taps in flight and {guesses} guessed bonuses{came_to}."


def notes(summary: dict) -> list[str]:
    """Ratios, fallbacks and losslessness, a sentence each."""
    lines = [
        f"τ, {name.replace('_', ' ')}: {interval(ratio['value'], ratio['ci95'], digits=3)} (pooled, paired by request)"
        for name, ratio in summary["ratios"].items()
        if ratio
    ]
    lines += [
        f"{method}: {average['fallback_rounds']} fallback rounds and {average['cold_starts']} cold starts in "
        f"{average['rounds']} rounds of {average['requests']} requests"
        for method, average in ((method, figures["average"]) for method, figures in summary["methods"].items())
        if method != "autoregressive"
    ]
    if same := summary["lossless"]:
        identical, total = same["greedy_identical"], same["greedy_total"]
        lines.append(f"greedy answers identical to autoregressive: {identical} of {total}")
        if differing := same["divergences"]:
            explained = sum(found["explained"] for found in differing)
            lines.append(f"of the {len(differing)} others rounding explains {explained} (margins in summary.json)")
    return lines


def print_report(summary: dict, console: Console | None = None) -> None:
    """The table without its intervals, and its notes, in the terminal."""
    table = Table("benchmark", *summary["methods"], title="τ (and speedup without prefill)")
    for name, cells in grid(summary).items():
        table.add_row(name, *(cell.short for cell in cells))
    console = console or Console()
    console.print(table)
    for line in notes(summary):
        console.print(line, highlight=False)


def plot_tau(summary: dict, file: Path) -> None:
    """Pooled τ by benchmark, a bar per method with its interval."""
    figure, axes = canvas(width=10)
    methods = summary["methods"]
    share = 0.8 / len(methods)
    names = [*next(iter(methods.values()))["benchmarks"], "average"]
    for index, (method, figures) in enumerate(methods.items()):
        shown = [(i, f) for i, f in enumerate([*figures["benchmarks"].values(), figures["average"]]) if f["tau_pooled"]]
        taus = [f["tau_pooled"] for _, f in shown]
        # a percentile interval may leave out the value itself by a rounding error
        below = [max(0.0, f["tau_pooled"] - f["tau_ci95"][0]) for _, f in shown]
        above = [max(0.0, f["tau_ci95"][1] - f["tau_pooled"]) for _, f in shown]
        places = [i + (index - (len(methods) - 1) / 2) * share for i, _ in shown]
        axes.bar(places, taus, share, yerr=[below, above], capsize=2, color=f"C{index}", label=method)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("acceptance length τ (tokens per verification)")
    save(figure, axes, file)


def plot_positions(summary: dict, file: Path) -> None:
    """Conditional acceptance by draft position, a line per speculative method, over all benchmarks."""
    figure, axes = canvas(width=6)
    for index, (method, figures) in enumerate(summary["methods"].items()):
        conditional = figures["average"]["positions"]["conditional"]
        if conditional:
            values = [float("nan") if value is None else value for value in conditional]
            axes.plot(range(1, len(values) + 1), values, marker="o", color=f"C{index}", label=method)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft position")
    axes.set_ylabel("acceptance, given all earlier positions")
    axes.set_ylim(0, 1.05)
    save(figure, axes, file)


def canvas(width: float):
    """A figure that needs no display. width: inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save(figure, axes, file: Path, columns: int = 5) -> None:
    """Legend (when there is something to name), grid, file."""
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=columns, frameon=False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(file, dpi=120)
