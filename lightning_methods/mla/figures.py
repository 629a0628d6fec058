"""The picture of MLA's claim: where the boundaries lie, what adjusting does to rare classes, who agrees with whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.expressions import t_interval
from ..claims.plots import PALETTE
from .functional import additive_boundary_angles, multiplicative_boundary_angles, optimal_boundary_angles

__all__ = ["boundary_angles", "figure"]

NAMES = {"none": "unadjusted", "additive": "ALA", "multiplicative": "MLA", "one_vs_one": "1-vs-1"}
COLORS = {"none": "#BDBDB8", "additive": PALETTE[4], "multiplicative": PALETTE[0], "one_vs_one": PALETTE[2]}


def boundary_angles(
    ratios: torch.Tensor, num_classes: int = 10, gamma: float = 0.5, tau: float = 1.0, feature_norm: float = 4.0
) -> dict[str, torch.Tensor]:
    """Angle between a class and its boundary against another, by how much more frequent the other is.

    Args:
        ratios: ``n_j / n_i``, [n].
        num_classes: K.
        gamma: strength of the 1-vs-1 adjuster and of MLA.
        tau: strength of ALA.
        feature_norm: length of the features, which ALA's boundary depends on.

    Returns:
        Degrees by adjustment, [n] each; nan where ALA has no boundary.
    """
    norms = torch.full((num_classes,), float(feature_norm))
    angles: dict[str, list[torch.Tensor]] = {name: [] for name in ("one_vs_one", "multiplicative", "additive")}
    for ratio in ratios.tolist():
        counts = torch.ones(num_classes)
        counts[1] = ratio
        angles["one_vs_one"].append(optimal_boundary_angles(counts, gamma)[0, 1])
        angles["multiplicative"].append(multiplicative_boundary_angles(counts, gamma)[0, 1])
        angles["additive"].append(additive_boundary_angles(counts, norms, tau)[0, 1])
    return {name: torch.stack(values).rad2deg() for name, values in angles.items()}


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/mla.json``.
        folder: the folder of the runs; not needed.

    Returns:
        A figure with three panels.
    """
    drawing = Figure(figsize=(11.5, 3.7))
    left, middle, right = drawing.subplots(1, 3, width_ratios=[1.15, 1.25, 1])
    norm = results["runs"]["strong"].get("test/feature_norm", {"mean": 4.0})["mean"]
    _angles(left, norm)
    _shots(middle, results["runs"]["strong"])
    _agreement(right, results["runs"])
    drawing.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8.5)
    return drawing


def _angles(axis: Axes, feature_norm: float) -> None:
    ratios = torch.logspace(-2, 2, 121)
    for name, degrees in boundary_angles(ratios, feature_norm=feature_norm).items():
        style = {"lw": 4.5, "alpha": 0.45} if name == "one_vs_one" else {"lw": 1.7}
        axis.plot(ratios, degrees, color=COLORS[name], label=NAMES[name], **style)
    axis.set_xscale("log")
    axis.axvline(1, color="#D5D5D0", lw=0.8, zorder=0)
    axis.set_xlabel("how much more frequent the other class is")
    axis.set_ylabel("angle to the boundary (degrees)")
    axis.set_title("Boundaries, 10 classes")
    axis.annotate("1-vs-1 (optimal)", (30, 82), xytext=(-8, 6), textcoords="offset points", fontsize=8, ha="right",
                  color=COLORS["one_vs_one"])  # fmt: skip


def _bar(axis: Axes, position: float, values: list[float], name: str, label: str | None) -> None:
    mean, low, high = t_interval(values)
    axis.bar(position, 100 * mean, width=0.86, color=COLORS[name], label=label)
    axis.plot([position] * 2, [100 * low, min(100 * high, 100)], color="#2B2B2B", lw=1.1, solid_capstyle="butt")


def _shots(axis: Axes, run: dict[str, Any]) -> None:
    ticks = []
    for block, shot in enumerate(("many", "medium", "few", "acc")):
        start = block * (len(NAMES) + 0.9)
        ticks.append(start + (len(NAMES) - 1) / 2)
        for offset, name in enumerate(NAMES):
            values = run[f"test/{shot}_{name}"]["values"]
            _bar(axis, start + offset, values, name, NAMES[name] if block == 0 else None)
    axis.set_xticks(ticks, ["many", "medium", "few", "all"])
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, 105)
    axis.set_ylabel("test accuracy, mean over classes (%)")
    axis.set_xlabel("training images of the class")
    axis.grid(axis="y")
    axis.set_title("Accuracy, 100 to 2 images of a class")


def _agreement(axis: Axes, runs: dict[str, Any]) -> None:
    ticks = []
    for block, run in enumerate(("strong", "mild")):
        start = block * 3.9
        ticks.append(start + 1)
        for offset, name in enumerate(("none", "additive", "multiplicative")):
            _bar(axis, start + offset, runs[run][f"test/agreement_{name}"]["values"], name, None)
    axis.set_xticks(ticks, ["100 to 2", "100 to 5"])
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(75, 101)
    axis.grid(axis="y")
    axis.set_ylabel("same prediction as 1-vs-1 (%)")
    axis.set_xlabel("training images of a class")
    axis.set_title("Agreement with 1-vs-1")
