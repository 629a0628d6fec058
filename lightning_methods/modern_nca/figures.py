"""The picture of ModernNCA's claim: what each model sees of the checkerboard, and every run's test result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.expressions import t_interval
from ..claims.plots import PALETTE
from .baselines import SklearnBaseline
from .module import ModernNCA

__all__ = ["figure"]

NAMES = {
    "mnca": "ModernNCA",
    "lnca": "L-NCA",
    "knn": "5 nearest neighbours",
    "nca_knn": "classical NCA, 5-NN",
    "mlp": "MLP",
    "boosting": "boosted trees",
}
COLORS = dict(zip(NAMES, ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#CC79A7", "#7F7F7F"), strict=True))
MAPS = {"knn": "5-NN", "mlp": "MLP", "lnca": "L-NCA", "mnca": "ModernNCA"}
GRID = 80


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/modern_nca.json``.
        folder: the folder of the runs; the maps are those of the first seed's models there.

    Returns:
        A figure; without the maps where the checkpoints are not found.
    """
    models = {run: _load(folder / f"board_{run}", run) for run in MAPS}
    maps = all(model is not None for model in models.values())
    drawing = Figure(figsize=(11, 5.2 if maps else 2.8))
    rows = drawing.subfigures(2, 1, height_ratios=[1, 1]) if maps else [drawing]
    if maps:
        _maps(rows[0], models, results)
    axes = rows[-1].subplots(1, 3)
    _runs(axes[0], results, "board", "test/acc", "checkerboard, accuracy")
    _runs(axes[1], results, "friedman", "test/rmse", "Friedman's function, RMSE")
    _runs(axes[2], results, "digits", "test/acc", "digits, accuracy")
    return drawing


def _load(folder: Path, run: str) -> LightningModule | None:
    """The first seed's model: the best checkpoint, or the last where nothing was chosen."""
    found = sorted(folder.glob("seed*/**/*.ckpt"), key=lambda path: (path.parts[:-1], path.stem.startswith("last")))
    kind = ModernNCA if run in ("mnca", "lnca") else SklearnBaseline
    return kind.load_from_checkpoint(found[0], map_location="cpu").eval() if found else None


def _centres() -> torch.Tensor:
    """Centres of the picture's cells over [-2, 2]."""
    return (torch.arange(GRID) + 0.5) * (4 / GRID) - 2


@torch.no_grad()
def _surface(model: LightningModule) -> torch.Tensor:
    """Probability of class 1 over the first two columns, mean over stored rows' values of the others: [GRID, GRID]."""
    # The columns are standardised; that of a uniform number in [-2, 2] is 2 / sqrt(3) wide.
    line = _centres() / (2 / 3**0.5)
    y, x = torch.meshgrid(line, line, indexing="ij")
    cells = torch.stack([x, y], dim=-1).flatten(0, 1)
    total = torch.zeros(len(cells))
    others = model.candidate_x[:16, 2:]
    for row in others:
        table = torch.cat([cells, row.expand(len(cells), -1)], dim=1)
        total += torch.cat([model.predict_step(part, 0)[:, 1] for part in table.split(2048)])
    return (total / len(others)).view(GRID, GRID)


def _maps(drawing: Any, models: dict[str, LightningModule], results: dict[str, Any]) -> None:
    axes = drawing.subplots(1, 1 + len(models))
    line = _centres()
    truth = ((line.floor()[None] + line.floor()[:, None]) % 2).float()
    surfaces = {"the rule": truth}
    for run, model in models.items():
        accuracy = results["runs"][f"board_{run}"]["test/acc"]["mean"]
        surfaces[f"{MAPS[run]}: {100 * accuracy:.0f} %"] = _surface(model)
    for axis, (title, surface) in zip(axes, surfaces.items(), strict=True):
        image = axis.imshow(
            surface, origin="lower", extent=(-2, 2, -2, 2), cmap="PuOr", vmin=0, vmax=1, interpolation="nearest"
        )
        axis.set_title(title)
        axis.set_xticks([-2, 0, 2])
        axis.set_yticks([-2, 0, 2] if axis is axes[0] else [])
        axis.set_xlabel("column 1")
    axes[0].set_ylabel("column 2")
    bar = drawing.colorbar(image, ax=axes[-1], fraction=0.046)
    bar.set_label("probability of class 1")
    bar.outline.set_visible(False)


def _runs(axis: Axes, results: dict[str, Any], problem: str, metric: str, title: str) -> None:
    """Every seed as a dot, the mean as a line and its 95 % interval as a band."""
    runs = [name for name in NAMES if f"{problem}_{name}" in results["runs"]]
    for row, name in enumerate(runs):
        values = results["runs"][f"{problem}_{name}"][metric]["values"]
        mean, low, high = t_interval(values)
        color = COLORS.get(name, PALETTE[0])
        axis.plot([low, high], [row, row], color=color, lw=5, alpha=0.22, solid_capstyle="round")
        axis.plot(values, [row] * len(values), "o", ms=4.5, color=color, alpha=0.8, mec="white", mew=0.5)
        axis.plot([mean, mean], [row - 0.27, row + 0.27], color=color, lw=2.2)
    axis.set_yticks(range(len(runs)), [NAMES[name] for name in runs])
    axis.set_ylim(len(runs) - 0.5, -0.5)
    axis.set_title(title)
    axis.grid(axis="x")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
