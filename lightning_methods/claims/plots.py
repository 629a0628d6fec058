"""The picture of a claim: the method's own where it has one, else every run's values with their interval."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .expressions import t_interval
from .tables import shown_metrics

__all__ = ["INK", "PALETTE", "overview", "picture", "style"]

# Okabe and Ito's colours: told apart by colour-blind readers, and dark enough for a light ground.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
INK = "#2B2B2B"


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The look of all pictures: an opaque light ground, so that they read the same on a dark page, and little ink."""
    import matplotlib as mpl

    settings = {
        "figure.facecolor": "#FCFCFA",
        "axes.facecolor": "#FCFCFA",
        "savefig.facecolor": "#FCFCFA",
        "figure.dpi": 110,
        "savefig.dpi": 160,
        "figure.constrained_layout.use": True,
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "semibold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8A8A8A",
        "axes.linewidth": 0.8,
        "axes.labelcolor": INK,
        "axes.grid": False,
        "axes.axisbelow": True,
        "axes.prop_cycle": mpl.cycler(color=PALETTE),
        "grid.color": "#E2E2DE",
        "grid.linewidth": 0.8,
        "text.color": INK,
        "xtick.color": "#5A5A5A",
        "ytick.color": "#5A5A5A",
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "image.cmap": "viridis",
    }
    with mpl.rc_context(settings):
        yield


def overview(results: dict[str, Any], folder: Path) -> Any:
    """Every run's seeds as dots with mean and 95 % interval, one panel for each metric that the claim looks at.

    Args:
        results: the content of ``docs/claims/<slug>.json``.
        folder: the folder of the runs; not needed here, every picture gets it.

    Returns:
        a matplotlib figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics = shown_metrics(results)[:4]
    runs = list(results["runs"])
    longest = max(map(len, runs))
    width = 0.08 * longest + 3.4 * len(metrics)
    figure = Figure(figsize=(max(5.5, width), 1.25 + 0.34 * len(runs)))
    axes = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        for row, run in enumerate(runs):
            values = results["runs"][run].get(metric, {"values": []})["values"]
            values = [value for value in values if value is not None and math.isfinite(value)]
            if not values:
                continue
            color = PALETTE[row % len(PALETTE)]
            mean, low, high = t_interval(values)
            if math.isfinite(low):
                axis.plot([low, high], [row, row], color=color, lw=5, alpha=0.22, solid_capstyle="round")
            axis.plot(values, [row] * len(values), "o", ms=5, color=color, alpha=0.75, mec="white", mew=0.6)
            axis.plot([mean, mean], [row - 0.27, row + 0.27], color=color, lw=2.2)
        axis.set_title(metric)
        axis.grid(axis="x")
        axis.set_yticks(range(len(runs)), runs)
        axis.set_ylim(len(runs) - 0.5, -0.5)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
    seeds = len(results["seeds"])
    figure.supxlabel(
        f"each dot one of {seeds} seeds, bar the mean, band its 95 % interval", fontsize=8.5, color="#5A5A5A"
    )
    return figure


def picture(results: dict[str, Any], folder: Path, path: Path) -> None:
    """Draw and save a claim's picture, by ``lightning_methods.<slug>.figures.figure`` if there is one.

    Args:
        results: the content of the JSON file.
        folder: ``runs/claims/<slug>``; each ``<run>/seed<k>`` has ``result.json``, checkpoints and ``metrics.csv``.
        path: the PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    package = f"lightning_methods.{results['slug']}"
    draw = overview
    if importlib.util.find_spec(package) and importlib.util.find_spec(f"{package}.figures"):
        draw = importlib.import_module(f"{package}.figures").figure
    with style():
        figure = draw(results, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
