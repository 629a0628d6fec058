"""The picture of EmbedLLM's claim: the space of models, forecasts, routing, and a benchmark that was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.expressions import t_interval
from ..claims.plots import PALETTE
from ..core.random import make_generator
from .data import synthetic_outcomes
from .functional import fit_benchmark_regression
from .module import EmbedLLM
from .plots import plot_embeddings, project

__all__ = ["figure"]

FORECASTS = {"mf": "EmbedLLM", "knn": "nearest questions", "majority": "majority per model"}
ROUTING = {
    "test/routing_acc": "routed by EmbedLLM",
    "test/best_single_acc": "best single model",
    "test/weighted_random_acc": "same shares, blindly",
}
GREY = "#7F7F7F"


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/embed_llm.json``.
        folder: the folder of the runs; the first seed's checkpoints there give the space and the predictions.

    Returns:
        A figure; without those two panels where the checkpoints are not found.
    """
    seed = results["seeds"][0]
    space = _load(folder / "mf", seed)
    left_out = {i: _load(folder / f"left{i}", seed) for i in range(5)}
    whole = space is not None and all(model is not None for model in left_out.values())
    drawing = Figure(figsize=(11, 6.6 if whole else 3.0))
    rows = drawing.subfigures(2, 1, height_ratios=[1.55, 1]) if whole else [drawing]
    if whole:
        left, right = rows[0].subplots(1, 2)
        _space(left, space)
        _predictions(right, left_out, seed)
    axes = rows[-1].subplots(1, 3)
    _dots(axes[0], {label: _values(results, run, "test/acc") for run, label in FORECASTS.items()})
    axes[0].set_title("forecast of outcomes, accuracy")
    best = sum(_best_possible(s) for s in results["seeds"]) / len(results["seeds"])
    axes[0].axvline(best, color=GREY, ls="--", lw=1)
    axes[0].annotate(
        "best possible", (best, 2.42), xytext=(-3, 0), textcoords="offset points", ha="right", fontsize=7.5
    )
    _dots(axes[1], {label: _values(results, "mf", metric) for metric, label in ROUTING.items()})
    axes[1].set_title("routing, accuracy")
    _dots(
        axes[2],
        {f"benchmark {i + 1}": _values(results, f"left{i}", "test/benchmark_tau") for i in range(5)},
        list(PALETTE),
    )
    axes[2].set_title("left out, Kendall's tau")
    axes[2].axvline(0, color=GREY, lw=0.8)
    return drawing


def _values(results: dict[str, Any], run: str, metric: str) -> list[float]:
    return [value for value in results["runs"][run][metric]["values"] if value is not None]


def _load(folder: Path, seed: int) -> EmbedLLM | None:
    found = sorted(folder.glob(f"seed{seed}/**/*.ckpt"))
    return EmbedLLM.load_from_checkpoint(found[-1], map_location="cpu").eval() if found else None


def _best_possible(seed: int) -> float:
    """Accuracy of whoever knows the probabilities, over all questions."""
    probability = synthetic_outcomes(num_models=40, num_families=5, num_questions=1600, seed=seed).probability
    return float(torch.maximum(probability, 1 - probability).mean())


def _space(axis: Axes, model: EmbedLLM) -> None:
    """The models of a run, by family; families are in the names of the generated models."""
    families = [name.partition("-")[0] for name in model.model_names]
    communities = {
        family.replace("family", "family "): torch.tensor([other == family for other in families])
        for family in sorted(set(families))
    }
    directions = model.network.score_directions().detach()
    plot_embeddings(directions, communities=communities, axis=axis)
    points = project(directions)[0]
    for color, members in zip(PALETTE, communities.values(), strict=False):
        centre = points[members].mean(dim=0)
        for point in points[members]:  # a thread from every model to its family's middle
            axis.plot(*torch.stack([point, centre], dim=1), color=color, lw=0.6, alpha=0.5, zorder=0)
    axis.set_title("models by the questions that they answer rightly")


def _predictions(axis: Axes, models: dict[int, EmbedLLM], seed: int) -> None:
    """Predicted against true accuracy of models that the regression has not seen, every model once."""
    outcomes = synthetic_outcomes(num_models=60, num_families=6, num_questions=1000, num_benchmarks=5, seed=seed)
    order = torch.randperm(60, generator=make_generator(seed, "figure"))
    for number, model in models.items():
        x = model.model_embeddings.double()
        y = outcomes.accuracy((outcomes.benchmark == number).nonzero().flatten())
        predicted = torch.empty_like(y)
        for test in order.chunk(5):
            train = torch.ones(60, dtype=torch.bool)
            train[test] = False
            weight, bias = fit_benchmark_regression(x[train], y[train])
            predicted[test] = x[test] @ weight + bias
        axis.scatter(y, predicted, s=20, color=PALETTE[number], ec="white", lw=0.4, label=f"benchmark {number + 1}")
    axis.axline((0, 0), slope=1, color=GREY, lw=0.9, zorder=0)
    axis.set_xlim(-0.02, 1.02)
    axis.set_ylim(-0.5, 1.5)
    axis.set_xlabel("true accuracy on the benchmark left out")
    axis.set_ylabel("predicted from the embedding")
    axis.set_title("models that the regression has not seen")
    axis.legend(fontsize=7.5, handletextpad=0.2)


def _dots(axis: Axes, runs: dict[str, list[float]], colors: list[str] | None = None) -> None:
    """Every seed as a dot, the mean as a line and its 95 % interval as a band."""
    for row, values in enumerate(runs.values()):
        mean, low, high = t_interval(values)
        color = (colors or [PALETTE[0], PALETTE[1], GREY])[row]
        axis.plot([low, high], [row, row], color=color, lw=5, alpha=0.22, solid_capstyle="round")
        axis.plot(values, [row] * len(values), "o", ms=4.5, color=color, alpha=0.8, mec="white", mew=0.5)
        axis.plot([mean, mean], [row - 0.27, row + 0.27], color=color, lw=2.2)
    axis.set_yticks(range(len(runs)), list(runs))
    axis.set_ylim(len(runs) - 0.5, -0.5)
    axis.grid(axis="x")
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
