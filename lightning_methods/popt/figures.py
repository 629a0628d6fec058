"""The picture of PopT's claim: what every run reaches, and how the channels of a subject never seen hang together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..claims.expressions import t_interval

__all__ = ["figure"]

TASKS = {"test/ensemble_auroc": "consecutive or not", "test/channel_auroc": "swapped or genuine"}
PRETRAINING = {
    "pretrained": ("PopT", "#0072B2"),
    "no_coordinates": ("no coordinates", "#56B4E9"),
    "no_position": ("nor ensembles", "#E69F00"),
    "untrained": ("untrained", "#7F7F7F"),
}
DECODING = {
    "decode_pretrained": ("fine-tuned", "#0072B2"),
    "decode_frozen": ("frozen", "#56B4E9"),
    "decode_scratch": ("from scratch", "#7F7F7F"),
    "decode_logistic": ("logistic regression", "#D55E00"),
}


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/popt.json``.
        folder: the folder of the runs; the maps are those of the first seed there.

    Returns:
        A figure; without the maps where they are not found.
    """
    found = sorted((folder / "pretrained").glob("seed*/**/maps.pt"))
    drawing = Figure(figsize=(11, 6.2 if found else 2.9))
    rows = drawing.subfigures(2, 1, height_ratios=[1.25, 1]) if found else [drawing]
    if found:
        (maps,) = list(torch.load(found[0], weights_only=True).values())[:1]
        _maps(rows[0], maps)
    axes = rows[-1].subplots(1, 3)
    for axis, (metric, title) in zip(axes, TASKS.items(), strict=False):
        _runs(axis, results, PRETRAINING, metric, f"{title} (AUROC)")
    _runs(axes[2], results, DECODING, "test/auroc", "20 labels (AUROC)")
    return drawing


def _order(similarity: Tensor) -> Tensor:
    """Channels such that alike ones are neighbours: by the Fiedler vector of the similarity."""
    weight = similarity.double().clamp_min(0)
    laplacian = torch.diag(weight.sum(dim=1)) - weight
    return torch.linalg.eigh(laplacian).eigenvectors[:, 1].argsort()


def _maps(drawing: Any, maps: dict[str, Tensor]) -> None:
    left, middle, right = drawing.subplots(1, 3)
    order = _order(maps["correlation"])
    size = len(order)
    diagonal = torch.eye(size, dtype=torch.bool)
    correlation = maps["correlation"][order][:, order].masked_fill(diagonal, torch.nan)
    image = left.imshow(correlation, cmap="viridis", vmin=0)
    left.set_title("likeness of two channels' activity")
    bar = drawing.colorbar(image, ax=left, fraction=0.046)
    bar.outline.set_visible(False)

    connectivity = maps["connectivity"][order][:, order].masked_fill(diagonal, torch.nan)
    limit = connectivity[~diagonal].abs().quantile(0.98).item()
    image = middle.imshow(connectivity, cmap="PuOr_r", vmin=-limit, vmax=limit)
    middle.set_title("what removing a channel costs")
    bar = drawing.colorbar(image, ax=middle, fraction=0.046)
    bar.outline.set_visible(False)
    for axis in (left, middle):
        axis.set_xticks([])
        axis.set_yticks([])
    left.set_xlabel("channel")
    left.set_ylabel("channel")
    middle.set_xlabel("whose loss increases")
    middle.set_ylabel("removed")
    _brain(right, maps)


def _brain(axis: Axes, maps: dict[str, Tensor]) -> None:
    """The electrodes from above with the strongest links."""
    coords = maps["coords"].float()
    both = (maps["connectivity"] + maps["connectivity"].T) / 2
    row, column = torch.triu_indices(len(coords), len(coords), offset=1)
    strength = both[row, column]
    best = strength.argsort(descending=True)[: 2 * len(coords)]
    top = strength[best[0]].item()
    for pair in best.flip(0).tolist():
        ends = coords[torch.stack([row[pair], column[pair]])]
        share = max(strength[pair].item() / top, 0.0)
        axis.plot(ends[:, 0], ends[:, 1], color="#D55E00", lw=0.4 + 2.6 * share, alpha=0.15 + 0.6 * share, zorder=1)
    size = 20 + 90 * both.clamp_min(0).sum(dim=0) / both.clamp_min(0).sum(dim=0).max()
    dots = axis.scatter(
        coords[:, 0], coords[:, 1], s=size, c=coords[:, 2], cmap="viridis", ec="white", lw=0.7, zorder=2
    )
    axis.set_title("strongest links, from above")
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    bar = axis.figure.colorbar(dots, ax=axis, fraction=0.046)
    bar.set_label("height")
    bar.outline.set_visible(False)


def _runs(axis: Axes, results: dict[str, Any], names: dict[str, tuple[str, str]], metric: str, title: str) -> None:
    """Every seed as a dot, the mean as a line and its 95 % interval as a band."""
    shown = [name for name in names if metric in results["runs"].get(name, {})]
    for row, name in enumerate(shown):
        values = results["runs"][name][metric]["values"]
        mean, low, high = t_interval(values)
        color = names[name][1]
        axis.plot([low, high], [row, row], color=color, lw=5, alpha=0.22, solid_capstyle="round")
        axis.plot(values, [row] * len(values), "o", ms=4.5, color=color, alpha=0.8, mec="white", mew=0.5)
        axis.plot([mean, mean], [row - 0.27, row + 0.27], color=color, lw=2.2)
    axis.axvline(0.5, color="#8A8A8A", lw=0.8, ls=":")
    axis.set_yticks(range(len(shown)), [names[name][0] for name in shown])
    axis.set_ylim(len(shown) - 0.5, -0.5)
    axis.set_xlim(0.4, 1.0)
    axis.set_title(title)
    axis.grid(axis="x")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
