"""Plots of a decoding bench: what a round is made of, and how a step grows with the batch."""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

SCHEDULES = {
    "ar": "autoregressive",
    "dspark": "DSpark",
    "dpara_one_gpu": "DPara, one GPU",
    "dpara_heads_on_target": "DPara, heads on the target's GPU",
    "dpara": "DPara",
}


def critical_path(ms: dict[str, float]) -> dict[str, float]:
    """A step's parts in ms, one behind the other: the verify pass, what drafting adds behind it, and what is left."""
    parts = {"verify": ms["verify"]}
    serial = {"append features": "append", "backbone": "serial", "LM and Markov head": "window"}
    parts |= {label: ms[name] for label, name in serial.items() if "serial" in ms and name in ms}
    if "branch" in ms:
        parts["LM and Markov head"] = ms["branch"]
    return parts | {"links and gaps": max(ms["step"] - sum(parts.values()), 0.0)}


def plot_anatomy(found: dict, file: Path) -> None:
    """Stacked bars of the batch-1 round of every schedule; a line marks the drafting device's hidden work."""
    rounds = {label: found["ms"][f"{name}_b1"] for name, label in SCHEDULES.items() if f"{name}_b1" in found["ms"]}
    parts = {label: critical_path(ms) for label, ms in rounds.items()}
    names = list(dict.fromkeys(name for bar in parts.values() for name in bar))
    figure, axes = plt.subplots(figsize=(9, 1 + 0.7 * len(rounds)))
    left = [0.0] * len(parts)
    for name in names:
        widths = [bar.get(name, 0.0) for bar in parts.values()]
        axes.barh(list(parts), widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, ms in enumerate(rounds.values()):
        axes.text(left[row], row, f" {ms['step']:.2f}", va="center")
        if "tree" in ms:
            axes.plot([0, ms["tree"] + ms["append"]], [row - 0.3] * 2, color="black", lw=2)
    axes.plot([], [], color="black", lw=2, label="beside the verify pass: append, tree")
    axes.set_xlabel(f"ms a round, batch 1, context {found['context']}")
    axes.set_xlim(right=1.18 * max(left))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, file)


def plot_batches(found: dict, file: Path) -> None:
    """Step by batch size."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, label in SCHEDULES.items():
        points = sorted(
            (int(key.removeprefix(f"{name}_b")), ms["step"])
            for key, ms in found["ms"].items()
            if key.removeprefix(f"{name}_b").isdigit()
        )
        if len(points) > 1:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xlabel("batch size")
    axes.set_ylabel("ms a round")
    axes.set_ylim(bottom=0)
    axes.legend()
    save(figure, file)


def save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
