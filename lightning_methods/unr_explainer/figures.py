"""The picture of the claim: three explanations in their surroundings, and validity against size for every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..claims.expressions import t_interval
from ..claims.plots import PALETTE
from ..core.io import read_jsonl
from ..graph.ops import to_undirected
from ..graph.types import Graph
from .drawing import COLORS, draw_explanation
from .explainer import Explanation

__all__ = ["figure"]

NAMES = {
    "unr": "UNR-Explainer",
    "one_hop_3": "1hop-3N",
    "one_hop_2": "1hop-2N",
    "knn": "k-NN subgraph",
    "random_walk": "random walk",
    "random_walk_restart": "walk with restarts",
    "random_edges": "random edges",
}
SHOWN = 3


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/unr_explainer.json``.
        folder: the folder of the runs; the explanations are those of the first seed there.

    Returns:
        A figure; without the explanations where their file is not found.
    """
    rows = _chosen(folder)
    drawing = Figure(figsize=(11, 6.4 if rows else 3))
    parts = drawing.subfigures(2, 1, height_ratios=[1.25, 1]) if rows else [drawing]
    if rows:
        for axis, row in zip(parts[0].subplots(1, len(rows)), rows, strict=True):
            _explanation(axis, row)
        parts[0].legend(handles=_legend(), loc="outside lower center", ncols=5)
    axes = parts[-1].subplots(1, 3)
    for axis, (metric, title) in zip(
        axes,
        {"validity": "share of counterfactuals", "importance": "importance", "size": "edges"}.items(),
        strict=True,
    ):
        _runs(axis, results, f"test/{metric}", title, names=axis is axes[0])
    return drawing


def _chosen(folder: Path) -> list[dict[str, Any]]:
    """Explanations of different sizes, counterfactual where there are such."""
    path = next(iter(sorted((folder / "unr").glob("seed*/**/explanations.jsonl"))), None)
    if path is None:
        return []
    rows = sorted(read_jsonl(path, required=["surroundings"]), key=lambda row: (-row["importance"], len(row["edges"])))
    whole = [row for row in rows if row["importance"] == 1 and len(row["edges"]) >= 2] or rows
    step = max(1, (len(whole) - 1) // (SHOWN - 1))
    return whole[::step][:SHOWN]


def _explanation(axis: Axes, row: dict[str, Any]) -> None:
    edges = torch.tensor(row["surroundings"])
    n = max(int(edges.max()), *row["neighbors"], row["node"]) + 1
    motif = torch.full((n,), -1)
    for node, home in row.get("motif", {}).items():
        motif[int(node)] = home
    graph = Graph(torch.ones(n, 1), to_undirected(edges.T, n), motif=motif)
    found = Explanation(row["node"], torch.tensor(row["edges"]).reshape(-1, 2), row["importance"], 0, 0, [])
    draw_explanation(graph, found, row["neighbors"], axis, max_nodes=26, labels=False)
    if "precision" in row:
        axis.set_title(f"{len(row['edges'])} edges lose all k = {len(row['neighbors'])} neighbours", loc="left")
    if row["importance"] < 1:
        axis.set_title(f"{len(row['edges'])} edges, importance {row['importance']:.1f}", loc="left")


def _legend() -> list[Line2D]:
    dot = {"marker": "o", "ls": "", "ms": 7, "mec": "#5A5A5A", "mew": 0.6}
    return [
        Line2D([], [], **{**dot, "marker": "*", "ms": 13}, color=COLORS["motif"], label="explained node"),
        Line2D([], [], color=COLORS["explanation"], lw=3.2, label="explanation"),
        Line2D([], [], **dot, color=COLORS["motif"], label="its house"),
        Line2D([], [], **dot, color=COLORS["base"], label="other nodes"),
        Line2D([], [], **{**dot, "mec": COLORS["lost"], "mew": 2.2}, color="white", label="nearest in embedding space"),
    ]


def _runs(axis: Axes, results: dict[str, Any], metric: str, title: str, names: bool) -> None:
    """Every seed as a dot, the mean as a line and its 95 % interval as a band."""
    runs = [name for name in NAMES if name in results["runs"]]
    for row, name in enumerate(runs):
        values = results["runs"][name][metric]["values"]
        mean, low, high = t_interval(values)
        color = PALETTE[1] if name == "unr" else PALETTE[0]
        axis.plot([low, high], [row, row], color=color, lw=5, alpha=0.22, solid_capstyle="round")
        axis.plot(values, [row] * len(values), "o", ms=4.5, color=color, alpha=0.8, mec="white", mew=0.5)
        axis.plot([mean, mean], [row - 0.27, row + 0.27], color=color, lw=2.2)
    axis.set_yticks(range(len(runs)), [NAMES[name] for name in runs] if names else [""] * len(runs))
    axis.set_ylim(len(runs) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.set_title(title)
    axis.grid(axis="x")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
