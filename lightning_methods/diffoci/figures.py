"""The picture of difFOCI's claim: worst groups, what the networks look at, selection, learned features, leakage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from ..claims.expressions import t_interval
from ..claims.plots import INK, PALETTE

__all__ = ["figure"]

GREY = "#A9A9A4"
CLASSIFIERS = {"erm": "ERM", "erm_diffoci": "ERM\n+ difFOCI", "dro": "group\nDRO", "dro_diffoci": "DRO\n+ difFOCI"}


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/diffoci.json``.
        folder: the folder of the runs; the saliency maps are those of the first seed there.

    Returns:
        A figure with bars on the left and, where the maps are found, saliency on the right.
    """
    maps = _saliency(folder)
    drawing = Figure(figsize=(11.5 if maps else 6.2, 6.3))
    left = drawing
    if maps:
        left, right = drawing.subfigures(1, 2, width_ratios=[1.12, 1])
        _maps(right, maps)
    above, *below = _panels(left)
    _worst_groups(above, results)
    _errors(below[0], results)
    _leakage(below[1], results)
    return drawing


def _panels(place: Figure | SubFigure) -> list[Axes]:
    grid = place.add_gridspec(2, 2, height_ratios=[1.15, 1], width_ratios=[2, 1])
    return [place.add_subplot(grid[0, :]), place.add_subplot(grid[1, 0]), place.add_subplot(grid[1, 1])]


def _values(results: dict[str, Any], run: str, metric: str) -> list[float]:
    return results["runs"].get(run, {}).get(metric, {"values": []})["values"]


def _bar(axis: Axes, position: float, values: list[float], color: str, **kwargs: Any) -> None:
    """Mean as a bar, its 95 % interval as a line, every seed as a dot."""
    if not values:
        return
    mean, low, high = t_interval(values)
    axis.bar(position, mean, width=0.72, color=color, alpha=0.85, **kwargs)
    axis.plot([position] * 2, [low, high], color=INK, lw=1.3, solid_capstyle="butt")
    spread = [position - 0.24 + 0.48 * k / max(len(values) - 1, 1) for k in range(len(values))]
    axis.plot(spread, values, "o", ms=2.6, color="white", mec=INK, mew=0.5)


def _worst_groups(axis: Axes, results: dict[str, Any]) -> None:
    for k, run in enumerate(CLASSIFIERS):
        _bar(axis, k, _values(results, run, "test/worst_group_acc"), PALETTE[0] if "diffoci" in run else GREY)
        average = _values(results, run, "test/acc")
        if average:
            mean = sum(average) / len(average)
            axis.plot([k - 0.36, k + 0.36], [mean, mean], color=PALETTE[1], lw=1.6, label=None if k else "all images")
    axis.set_xticks(range(len(CLASSIFIERS)), list(CLASSIFIERS.values()))
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, 1)
    axis.set_ylabel("test accuracy")
    axis.set_title("Worst group: digits on a spurious background", pad=16)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, handlelength=1.6)


def _errors(axis: Axes, results: dict[str, Any]) -> None:
    bars = [
        ("selection", "test/mse_foci", "FOCI", GREY),
        ("selection", "test/mse", "difFOCI", PALETTE[0]),
        ("features_xor", "test/mse_inputs", "inputs", GREY),
        ("features_xor", "test/mse", "learned", PALETTE[0]),
        ("features_sin3", "test/mse_inputs", "inputs", GREY),
        ("features_sin3", "test/mse", "learned", PALETTE[0]),
    ]
    places = [0, 1, 2.6, 3.6, 5.2, 6.2]
    for place, (run, metric, _, color) in zip(places, bars, strict=True):
        _bar(axis, place, _values(results, run, metric), color)
    axis.set_xticks(places, [name for _, _, name, _ in bars], fontsize=8)
    axis.tick_params(axis="x", length=0)
    top = axis.get_ylim()[1]
    for place, name in ((0.5, "selection, xor"), (3.1, "one feature, xor"), (5.7, "one feature, sin3")):
        axis.annotate(name, (place, top), ha="center", va="bottom", fontsize=8, color="#5A5A5A")
    axis.set_ylim(0, top * 1.08)
    axis.set_ylabel("error of the regression on it")
    axis.set_title("Selected and learned features")


def _leakage(axis: Axes, results: dict[str, Any]) -> None:
    for k, (run, color) in enumerate((("unfair", GREY), ("fair", PALETTE[0]))):
        _bar(axis, k, _values(results, run, "test/leakage"), color)
    axis.axhline(0.5, color=PALETTE[1], lw=1, ls=(0, (4, 3)))
    axis.annotate("chance", (1.42, 0.55), fontsize=8, color=PALETTE[1], ha="right")
    axis.set_xticks([0, 1], ["T(y, x)", "T(y, x | S)"])
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, 1.05)
    axis.set_ylabel("S is told with accuracy")
    axis.set_title("Sensitive S")


# saliency


def _misled(maps: dict[str, Tensor]) -> Tensor:
    """2 for images whose background misleads, and 1 more for images that the network gets wrong; [k]."""
    return 2 * (maps["group"] != maps["y"]).int() + (maps["predicted"] != maps["y"]).int()


def _saliency(folder: Path) -> dict[str, dict[str, Tensor]]:
    """The saved maps of all four classifiers, of the first seed in which plain training is misled by a background."""
    found: dict[str, dict[str, Tensor]] = {}
    for first in sorted((folder / "erm").glob("seed*/saliency.pt"), key=lambda p: int(p.parent.name[4:])):
        paths = {run: folder / run / first.parent.name / first.name for run in CLASSIFIERS}
        if not all(path.is_file() for path in paths.values()):
            continue
        maps = {run: torch.load(path, weights_only=True) for run, path in paths.items()}
        if (_misled(maps["erm"]) == 3).any():
            return maps
        found = found or maps
    return found


def _maps(place: SubFigure, saved: dict[str, dict[str, Tensor]], rows: int = 5) -> None:
    """Images whose background misleads, and where each network looks; framed where it is wrong."""
    erm, robust = saved["erm"], saved["erm_diffoci"]
    # Misleading backgrounds first, of these the ones that plain training gets wrong, and of these those set right.
    set_right = (robust["predicted"] == robust["y"]).int()
    chosen = (2 * _misled(erm) + set_right).argsort(descending=True, stable=True)[:rows].tolist()
    axes = place.subplots(len(chosen), 1 + len(saved), squeeze=False)
    for row, k in zip(axes, chosen, strict=True):
        row[0].imshow(erm["images"][k].clamp(0, 1).permute(1, 2, 0).numpy())
        for axis, result in zip(row[1:], saved.values(), strict=True):
            axis.imshow(result["maps"][k].numpy(), cmap="magma", vmin=0, vmax=1)
            wrong = result["predicted"][k] != result["y"][k]
            for spine in axis.spines.values():
                spine.set(visible=True, color=PALETTE[1] if wrong else "#FCFCFA", linewidth=2.4 if wrong else 0.5)
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].spines[:].set_visible(False)
    for axis, name in zip(axes[0], ("image", *CLASSIFIERS.values()), strict=True):
        axis.set_title(name, fontsize=9, loc="center")
    place.supxlabel("saliency on test images with the other class's colour; orange frame: wrong", fontsize=8.5)
