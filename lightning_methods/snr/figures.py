"""The picture of the claim: online accuracy from task to task, and the units that died."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.plots import INK, PALETTE

__all__ = ["figure", "read_curves"]

# Runs that are known by name here; others are drawn in grey.
NAMES = {
    "snr_02": ("SNR, η = 0.02", PALETTE[0], "-"),
    "snr_08": ("SNR, η = 0.08", PALETTE[5], "-"),
    "redo": ("ReDo", PALETTE[2], "-"),
    "l2_init": ("L2 Init", PALETTE[4], "-"),
    "cbp": ("continual backprop", PALETTE[3], "-"),
    "none": ("no intervention", PALETTE[1], "-"),
}
SMOOTH = 7  # tasks in the running mean


def read_curves(folder: Path, run: str, metric: str) -> list[list[float]]:
    """One metric of every seed, in the order of the epochs.

    Args:
        folder: the folder of the runs; ``<run>/seed<k>`` has ``metrics.csv`` somewhere below it.
        run: the run's name.
        metric: the column; one that ends in "/..." takes the first column with that ending ("/dead_fraction").

    Returns:
        A list of values for each seed, cut to the shortest; empty if nothing was logged.
    """
    curves = []
    for path in sorted((folder / run).glob("seed*/**/metrics.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        column = next(
            (name for name in (rows[0] if rows else ()) if name == metric or name.endswith(f"{metric}")), None
        )
        values = [float(row[column]) for row in rows if column and row[column]]
        if values:
            curves.append(values)
    shortest = min(map(len, curves), default=0)
    return [curve[:shortest] for curve in curves]


def _smooth(values: list[float]) -> list[float]:
    """Running mean over the tasks up to each one."""
    return [math.fsum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - SMOOTH + 1) : i + 1])]


def _draw(axis: Axes, curves: list[list[float]], color: str, style: str) -> float:
    """Mean over the seeds and the range between them; the last value."""
    smooth = [_smooth(curve) for curve in curves]
    tasks = range(1, len(smooth[0]) + 1)
    mean = [math.fsum(values) / len(values) for values in zip(*smooth, strict=True)]
    low, high = ([pick(values) for values in zip(*smooth, strict=True)] for pick in (min, max))
    axis.fill_between(tasks, low, high, color=color, alpha=0.13, lw=0)
    axis.plot(tasks, mean, style, color=color, lw=1.7)
    return mean[-1]


def _label(axis: Axes, ends: list[tuple[float, str, str]], last: int) -> None:
    """Write the names at the right ends of the curves, apart from each other."""
    low, high = axis.get_ylim()
    gap = 0.062 * (high - low)
    place = -math.inf
    for value, name, color in sorted(ends):
        place = max(value, place + gap)
        axis.annotate(name, (last, place), xytext=(7, 0), textcoords="offset points", color=color, fontsize=8.8,
                      va="center", annotation_clip=False)  # fmt: skip


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/snr.json``.
        folder: the folder of the runs, with the curves of every task.

    Returns:
        A figure of two panels; of one, the means of the first and the last tasks, where the curves are not there.
    """
    curves = {run: read_curves(folder, run, "train/task_acc") for run in results["runs"]}
    if not any(curves.values()):
        return _bars(results)
    drawing = Figure(figsize=(10.6, 4.1))
    left, right = drawing.subplots(1, 2, width_ratios=[1.5, 1])
    for axis, metric, title in (
        (left, "train/task_acc", "Online accuracy on a stream of permuted digits"),
        (right, "/dead_fraction", "Units silent for 1000 examples"),
    ):
        ends, last = [], 1
        for run in results["runs"]:
            found = curves[run] if axis is left else read_curves(folder, run, metric)
            if not found:
                continue
            name, color, style = NAMES.get(run, (run, PALETTE[6], "-"))
            ends.append((_draw(axis, found, color, style), name, color))
            last = len(found[0])
        axis.set_title(title)
        axis.set_xlabel("task")
        axis.set_xlim(1, last)
        axis.set_ylim(0, 0.8 if axis is left else 1)
        axis.grid(axis="y")
        _label(axis, ends, last)
    left.axhline(0.1, color="#8A8A8A", lw=0.9, ls=(0, (4, 3)))
    left.annotate("chance", (2, 0.1), xytext=(0, -10), textcoords="offset points", fontsize=8.5, color="#5A5A5A")
    seeds = len(results["seeds"])
    drawing.supxlabel(
        f"running mean over {SMOOTH} tasks, mean of {seeds} seeds; band from the lowest seed to the highest",
        fontsize=8.5,
        color="#5A5A5A",
    )
    drawing.get_layout_engine().set(w_pad=0.1)
    return drawing


def _bars(results: dict[str, Any]) -> Figure:
    """First against last tasks, from the numbers alone."""
    drawing = Figure(figsize=(6.5, 3.4))
    axis = drawing.subplots()
    for row, (run, metrics) in enumerate(results["runs"].items()):
        name, color, _ = NAMES.get(run, (run, PALETTE[6], "-"))
        first, last = (metrics[f"test/{which}_tasks_acc"]["mean"] for which in ("first", "last"))
        axis.plot([first, last], [row, row], color=color, lw=2, alpha=0.5)
        axis.plot(first, row, "o", color=color, mfc="white", ms=7)
        axis.plot(last, row, "o", color=color, ms=7)
        axis.annotate(name, (0, row), xytext=(-6, 0), textcoords="offset points", ha="right", va="center", color=INK)
    axis.set_yticks([])
    axis.set_xlim(0, 0.8)
    axis.set_ylim(len(results["runs"]) - 0.5, -0.5)
    axis.grid(axis="x")
    axis.set_xlabel("online accuracy: first tenth of the tasks (open), last tenth (filled)")
    axis.set_title("Plasticity kept and lost")
    return drawing
