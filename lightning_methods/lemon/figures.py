"""The picture of the claim: accuracy over epochs for every way to start the large network."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.plots import PALETTE

__all__ = ["figure", "read_curves"]

NAMES = {
    "lemon": ("LEMON", PALETTE[0], "-"),
    "fpi": ("FPI: even split", PALETTE[5], "-"),
    "aki": ("AKI: rows of the next block", PALETTE[2], "-"),
    "stack": ("StackBERT", PALETTE[4], "-"),
    "scratch": ("from scratch", PALETTE[1], "-"),
}
LONG = "scratch_14"


def read_curves(folder: Path, run: str, metric: str) -> list[list[float]]:
    """A metric of every seed by epoch, cut to the shortest; empty if nothing was logged.

    Args:
        folder: the folder of the runs; ``<run>/seed<k>`` has ``metrics.csv`` somewhere below it.
        run: the run's name.
        metric: the column.
    """
    curves = []
    for path in sorted((folder / run).glob("seed*/**/metrics.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            values = [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]
        if values:
            curves.append(values)
    shortest = min(map(len, curves), default=0)
    return [curve[:shortest] for curve in curves]


def _draw(axis: Axes, curves: list[list[float]], color: str, style: str) -> tuple[int, float]:
    """Mean over the seeds and the range between them; the last point."""
    epochs = range(1, len(curves[0]) + 1)
    mean = [math.fsum(values) / len(values) for values in zip(*curves, strict=True)]
    low, high = ([pick(values) for values in zip(*curves, strict=True)] for pick in (min, max))
    axis.fill_between(epochs, low, high, color=color, alpha=0.12, lw=0)
    axis.plot(epochs, mean, style, color=color, lw=1.8, marker="o", ms=3.2)
    return epochs[-1], mean[-1]


def _label(axis: Axes, ends: list[tuple[float, str, str]], last: float) -> None:
    """Names at the right ends of the curves, apart from each other, in the order of the curves."""
    low, high = axis.get_ylim()
    gap, places = 0.065 * (high - low), []
    for value, _, _ in sorted(ends):
        places.append(max(value, places[-1] + gap) if places else value)
    shift = math.fsum(place - end[0] for place, end in zip(places, sorted(ends), strict=True)) / max(len(ends), 1)
    for place, (_, name, color) in zip(places, sorted(ends), strict=True):
        axis.annotate(name, (last, place - shift), xytext=(7, 0), textcoords="offset points", color=color, fontsize=8.8,
                      va="center", annotation_clip=False)  # fmt: skip


def _small(axis: Axes, results: dict[str, Any], at: float, lift: float) -> None:
    """The small network's accuracy as a line."""
    if "small" in results["runs"]:
        level = results["runs"]["small"]["test/acc"]["mean"]
        axis.axhline(level, color="#8A8A8A", lw=0.9, ls=(0, (4, 3)))
        axis.annotate("the small network", (at, level), xytext=(0, lift), textcoords="offset points", fontsize=8.5,
                      color="#5A5A5A", ha="right")  # fmt: skip


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/lemon.json``.
        folder: the folder of the runs, with the accuracy after every epoch.

    Returns:
        Two panels: all methods over the short training with the long one from scratch, and what lies above the small
        network enlarged. Without curves, the accuracies of the runs.
    """
    from ..claims.plots import overview

    curves = {run: read_curves(folder, run, "val/acc") for run in (*NAMES, LONG)}
    if not any(curves.values()):
        return overview(results, folder)
    drawing = Figure(figsize=(11, 4.2))
    left, right = drawing.subplots(1, 2, width_ratios=[1.25, 1])
    _panel_all(left, results, curves)
    _panel_close(right, results, curves)
    seeds = len(results["seeds"])
    drawing.supxlabel(f"mean of {seeds} seeds; band from the lowest seed to the highest", fontsize=8.5, color="#5A5A5A")
    drawing.get_layout_engine().set(w_pad=0.1)
    return drawing


def _panel_all(axis: Axes, results: dict[str, Any], curves: dict[str, list[list[float]]]) -> None:
    ends = []
    for run, (name, color, style) in NAMES.items():
        if curves[run]:
            ends.append((*_draw(axis, curves[run], color, style), name, color))
    last = max((end[0] for end in ends), default=1)
    axis.set_ylim(0, 1)
    if curves[LONG]:
        last, value = _draw(axis, curves[LONG], PALETTE[6], "-")
        axis.annotate("from scratch,\nlonger schedule", (last, value), xytext=(7, 0), textcoords="offset points",
                      color=PALETTE[6], fontsize=8.8, va="center", annotation_clip=False)  # fmt: skip
    for end, value, name, color in ends:
        if name in ("LEMON", "from scratch"):
            axis.annotate(name, (end, value), xytext=(7, 0), textcoords="offset points", color=color, fontsize=8.8,
                          va="center")  # fmt: skip
    _small(axis, results, last, 5)
    axis.set_xlim(0.7, last + 0.2)
    axis.grid(axis="y")
    axis.set_xlabel("epoch of the large network")
    axis.set_title("Accuracy on held-out digits")


def _panel_close(axis: Axes, results: dict[str, Any], curves: dict[str, list[list[float]]]) -> None:
    ends = []
    for run, (name, color, style) in NAMES.items():
        if curves[run] and run != "scratch":
            last, value = _draw(axis, curves[run], color, style)
            ends.append((value, name, color))
    lowest = min((min(map(min, curves[run])) for run in NAMES if run != "scratch" and curves[run]), default=0)
    highest = max((max(map(max, curves[run])) for run in NAMES if run != "scratch" and curves[run]), default=1)
    axis.set_ylim(max(0.0, lowest - 0.03), min(1.0, highest + 0.03))
    if ends:
        axis.set_xlim(0.8, last + 0.1)
        _small(axis, results, last, -11)
        _label(axis, ends, last)
    axis.grid(axis="y")
    axis.set_xlabel("epoch of the large network")
    axis.set_title("The ways to start from the small network")
