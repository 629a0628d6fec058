"""Pictures of collapse: covariance spectra, and how the two uniformity metrics see dead dimensions."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .functional import covariance_log_spectrum, uniformity_loss, wasserstein_uniformity

__all__ = ["collapsed_sphere", "figure", "plot_collapse", "plot_spectra"]


def collapsed_sphere(samples: int, width: int, fraction: float, generator: torch.Generator | None = None) -> Tensor:
    """Uniform points on a sphere of which a fraction of the coordinates is dead: Gaussian, zeroed, normalised.

    Args:
        samples: number of points.
        width: number of coordinates.
        fraction: share of zeroed coordinates, in [0, 1).
        generator: of the Gaussian numbers.

    Returns:
        Rows of unit norm, float64 [samples, width].
    """
    z = torch.randn(samples, width, dtype=torch.float64, generator=generator)
    z[:, width - round(fraction * width) :] = 0
    return F.normalize(z, dim=1)


def _new_axes(ax: Any) -> Any:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(figsize=(5.0, 3.6)).subplots()


def plot_spectra(spectra: Mapping[str, Tensor | Sequence[Tensor]], ax: Any = None, labels: bool = True) -> Any:
    """Draw covariance spectra of features: a line that falls off early is a cloud with dead dimensions.

    Args:
        spectra: by name: features [n, m], a log-spectrum [m] (:func:`covariance_log_spectrum`), or a list of either,
            e.g. one for each seed (thin lines, their mean thick).
        ax: matplotlib axes; None makes a figure.
        labels: add axis labels and a legend.

    Returns:
        The axes.
    """
    ax = _new_axes(ax)
    for name, given in spectra.items():
        several = [given] if isinstance(given, Tensor) else list(given)
        curves = [(covariance_log_spectrum(z) if z.dim() == 2 else z).detach().cpu().double() for z in several]
        ranks = range(1, len(curves[0]) + 1)
        (line,) = ax.plot(ranks, torch.stack(curves).mean(dim=0), label=name, lw=2.2)
        if len(curves) > 1:
            for curve in curves:
                ax.plot(ranks, curve, color=line.get_color(), lw=0.7, alpha=0.5)
    if labels:
        ax.set_xlabel("rank of the eigenvalue")
        ax.set_ylabel("log eigenvalue")
        ax.grid(axis="y")
        ax.legend()
    return ax


def plot_collapse(ax: Any = None, samples: int = 2000, width: int = 64, seed: int = 0) -> Any:
    """Draw W2 and L_U of a sphere whose coordinates die one after the other.

    Both are drawn on one scale, as the share of the way from their value without collapse (0) to that of full collapse
    (1: all points equal, where W2 is sqrt(2) and L_U is 0): what a metric does not see is flat.

    Args:
        ax: matplotlib axes; None makes a figure.
        samples: points in each cloud.
        width: coordinates.
        seed: of the points.

    Returns:
        The axes.
    """
    ax = _new_axes(ax)
    fractions = [step / 16 for step in range(16)]
    clouds = [collapsed_sphere(samples, width, eta, torch.Generator().manual_seed(seed)) for eta in fractions]
    curves = {
        "$W_2$ (this metric)": [wasserstein_uniformity(z).item() for z in clouds],
        "$L_U$ (pairwise kernel)": [uniformity_loss(z, chunk_size=512).item() for z in clouds],
    }
    for (name, values), worst in zip(curves.items(), (math.sqrt(2), 0.0), strict=True):
        ax.plot(fractions, [(value - values[0]) / (worst - values[0]) for value in values], "o-", ms=4, label=name)
    ax.set_xlabel("share of dead dimensions")
    ax.set_ylabel("share of the way to full collapse")
    ax.grid(axis="y")
    ax.legend()
    return ax


def _written_spectra(folder: Path, run: str) -> list[Tensor]:
    """The spectra that :class:`SpectrumWriter` left for the seeds of a run."""
    spectra = []
    for path in sorted((folder / run).glob("seed*/spectrum.csv")):
        with path.open(encoding="utf-8") as file:
            spectra.append(torch.tensor([float(row["log_eigenvalue"]) for row in csv.DictReader(file)]))
    return spectra


def figure(results: dict[str, Any], folder: Path) -> Any:
    """The claim's picture: spectra with and without W2, the metric under growing collapse, and accuracy over W2.

    Args:
        results: the content of ``docs/claims/wasserstein_uniformity.json``.
        folder: the folder of the runs.

    Returns:
        a matplotlib figure.
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(11.5, 3.7))
    left, middle, right = drawn.subplots(1, 3)
    names = {"byol": "BYOL", "byol_w2": "BYOL + 0.2 $W_2$", "byol_w2_strong": "BYOL + 1.0 $W_2$"}
    spectra = {names.get(run, run): _written_spectra(folder, run) for run in results["runs"]}
    plot_spectra({name: found for name, found in spectra.items() if found}, left)
    left.set_title("Spectrum of the embeddings")
    for run, metrics in results["runs"].items():
        right.plot(
            metrics["test/wasserstein_uniformity"]["values"],
            [100 * value for value in metrics["test/knn_acc"]["values"]],
            "o",
            ms=6,
            label=names.get(run, run),
        )
    right.set_xlabel("$W_2$ on the test set (lower: more uniform)")
    right.set_ylabel("nearest-neighbour accuracy (%)")
    right.set_title("Every seed")
    right.grid()
    right.legend()
    plot_collapse(middle)
    middle.set_title("What the metric sees")
    return drawn
