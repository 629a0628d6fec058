"""The picture of CDC's claim: reliability diagrams of the heads that are compared, over all seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ..claims.plots import PALETTE, overview
from ..metrics.calibration import draw_reliability_bins

__all__ = ["figure"]

PANELS = (
    ("cdc", "cal", "CDC, calibration head"),
    ("cdc", "clu", "CDC, clustering head"),
    ("fixed_threshold", "clu", "one head, confidence > 0.95"),
    ("random_start", "cal", "CDC, random start"),
)


def _pooled(folder: Path, run: str, head: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """Number, mean confidence and accuracy by bin over the seeds of a run; None if it has left nothing."""
    saved = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{run}/seed*/reliability.json"))
    ]
    heads = [content[head] for content in saved if head in content]
    if not heads:
        return None
    count = torch.tensor([content["count"] for content in heads], dtype=torch.float64)
    mean = [
        (count * torch.tensor([content[key] for content in heads], dtype=torch.float64)).sum(0) / count.sum(0)
        for key in ("confidence", "accuracy")
    ]
    return count.sum(0), *mean


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the reliability diagrams of the claim's runs, pooled over seeds, with the mean accuracy over seeds.

    Args:
        results: the content of ``docs/claims/cdc.json``.
        folder: the folder of the runs, where ``ReliabilityDiagram`` left its files; without them the general picture.
    """
    panels = [(run, head, title, _pooled(folder, run, head)) for run, head, title in PANELS]
    panels = [panel for panel in panels if panel[3] is not None]
    if not panels:
        return overview(results, folder)
    drawing = Figure(figsize=(3.1 * len(panels), 4.1))
    for axis, color, (run, head, title, bins) in zip(
        drawing.subplots(1, len(panels), squeeze=False)[0], PALETTE, panels, strict=False
    ):
        error = results["runs"][run][f"test/{head}_ece"]["mean"]
        accuracy = results["runs"][run][f"test/{head}_acc"]["mean"]
        draw_reliability_bins(*bins, axis, title=title, color=color, text=f"ACC {accuracy:.3f}\nECE {error:.3f}")
        axis.label_outer()
    axis.legend(loc="lower right", fontsize=8)
    drawing.supxlabel(
        f"bins over {len(results['seeds'])} seeds; ACC and ECE are means over seeds, grey bars the share of samples",
        fontsize=8.5,
        color="#5A5A5A",
    )
    return drawing
