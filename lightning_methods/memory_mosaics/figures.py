"""The picture of the claim: when moons become predictable, which head follows which, and learning in context."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..claims.plots import PALETTE
from .module import ThreeMoons

__all__ = ["figure"]

HEADS = {"heads_3": ("three heads", PALETTE[0]), "heads_1": ("one head", PALETTE[1])}
MODELS = {"mosaic": ("Memory Mosaic", PALETTE[0]), "gpt": ("GPT", PALETTE[1])}
PERIODS = (1.0, 2.0, 3.0)
COMMON = 6.0
QUIET = "#5A5A5A"


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/memory_mosaics.json``.
        folder: the folder of the runs: checkpoints of the moons, ``position_loss.csv`` of the language models.

    Returns:
        A figure of four panels.
    """
    drawing = Figure(figsize=(11, 3.5))
    axes = drawing.subplots(1, 4, width_ratios=[1.5, 0.9, 1.4, 0.8])
    _moons(axes[0], folder)
    _blocks(axes[1], folder)
    _context(axes[2], folder)
    _accuracy(axes[3], results)
    return drawing


def _checkpoints(folder: Path, run: str) -> list[Path]:
    """The last weights of every seed."""
    return sorted((folder / run).glob("seed*/**/last.ckpt"))


def _held_out(block_size: int = 160, windows: int = 64) -> tuple[Tensor, Tensor, float]:
    """Windows of the moons with the held-out periods, and the samples in a unit of time, as in the runs."""
    rate = block_size / COMMON / 3
    start = torch.linspace(0, 500, windows, dtype=torch.float64)[:, None]
    time = start + torch.arange(block_size + 1) / rate
    angle = 2 * torch.pi * time[:, :, None] / torch.tensor(PERIODS).double() + 0.3
    position = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(2).float()
    return position[:, :-1], position[:, 1:], rate


@torch.no_grad()
def _moons(axis: Axes, folder: Path) -> None:
    """Error of the next position along the sequence, every seed and their mean."""
    x, y, rate = _held_out()
    for run, (name, color) in HEADS.items():
        curves = []
        for path in _checkpoints(folder, run):
            model = ThreeMoons.load_from_checkpoint(path, map_location="cpu").eval()
            curves.append((model(x) - y).abs().mean(dim=(0, 2)))
        if not curves:
            continue
        time = torch.arange(x.shape[1]) / rate
        for curve in curves:
            axis.plot(time, curve, color=color, lw=0.7, alpha=0.35)
        mean = torch.stack(curves).mean(dim=0)
        axis.plot(time, mean, color=color)
        place = int(4.5 * rate)
        axis.annotate(
            name, (4.5, float(mean[place])), xytext=(0, 6), textcoords="offset points", color=color, ha="center"
        )
    for period in (*PERIODS, COMMON):
        axis.axvline(period, color="#8A8A8A", lw=0.8, ls=(0, (4, 3)) if period < COMMON else "-")
    axis.set_xlim(0, 10)
    axis.set_ylim(0)
    axis.set_xlabel("time; dashed: periods 1, 2, 3; line: all return at 6")
    axis.set_ylabel("error of the next position")
    axis.set_title("Three moons")


def _blocks(axis: Axes, folder: Path) -> None:
    """Which moon each head reads: size of every complex number of its value matrix."""
    found = _checkpoints(folder, "heads_3")
    if not found:
        axis.set_axis_off()
        return
    network = ThreeMoons.load_from_checkpoint(found[0], map_location="cpu").model
    weight = network.effective_weight(network.value_proj).detach()
    size = weight.view(3, 2, 3, 2)[:, 0].norm(dim=2)
    image = axis.imshow(size, cmap="Blues", vmin=0)
    axis.set_xticks(range(3), [f"{period:g}" for period in PERIODS])
    axis.set_yticks(range(3), ["1", "2", "3"])
    axis.set_xlabel("moon in column")
    axis.set_ylabel("head")
    axis.set_xticks(range(3), ["1", "2", "3"])
    axis.set_title("Values |W|")
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.figure.colorbar(image, ax=axis, fraction=0.046, pad=0.04).outline.set_visible(False)


def _context(axis: Axes, folder: Path) -> None:
    """Loss at each position of the test sequences, smoothed over 5 positions."""
    for run, (name, color) in MODELS.items():
        curves = []
        for path in sorted((folder / run).glob("seed*/**/position_loss.csv")):
            with path.open(newline="") as file:
                curves.append([float(row["loss"]) for row in csv.DictReader(file)][:-1])
        if not curves:
            continue
        smooth = torch.tensor(curves).unfold(1, 5, 1).mean(dim=2)
        position = torch.arange(smooth.shape[1]) + 2
        for curve in smooth:
            axis.plot(position, curve, color=color, lw=0.7, alpha=0.35)
        axis.plot(position, smooth.mean(dim=0), color=color)
        end = float(smooth.mean(dim=0)[-1])
        above = run == "gpt"
        place = {"xytext": (0, 18 if above else -18), "textcoords": "offset points"}
        axis.annotate(name, (90, end), **place, color=color, ha="right", va="bottom" if above else "top")
    axis.set_ylim(1.2, 2.5)
    axis.set_xlabel("position in the sequence")
    axis.set_ylabel("cross-entropy")
    axis.set_title("Loss on unseen automata")


def _accuracy(axis: Axes, results: dict[str, Any]) -> None:
    """Share of legal next symbols in the second half, every seed."""
    for row, (run, (_, color)) in enumerate(MODELS.items()):
        values = results["runs"].get(run, {}).get("test/accuracy", {}).get("values", [])
        axis.plot([row] * len(values), values, "o", color=color, ms=5, mec="white")
        if values:
            axis.plot([row - 0.2, row + 0.2], [sum(values) / len(values)] * 2, color=color, lw=2)
    axis.set_xticks(range(len(MODELS)), [name.replace(" ", "\n") for name, _ in MODELS.values()])
    axis.set_xlim(-0.6, len(MODELS) - 0.4)
    axis.set_ylim(0.4, 1)
    axis.grid(axis="y")
    axis.set_title("Legal symbols")
