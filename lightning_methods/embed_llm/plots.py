"""Pictures of the embedding space and of what benchmarks tell about each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ..core.checks import check_choice, check_range, check_shape

__all__ = ["plot_contributions", "plot_embeddings", "project"]

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")


def project(model_embeddings: Tensor, method: Literal["pca", "tsne"] = "pca", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two coordinates of every model.

    Args:
        model_embeddings: [models, dim].
        method: "pca", or "tsne" (scikit-learn's, for neighbourhoods instead of distances).
        seed: of "tsne".

    Returns:
        ``(coordinates, share)``, float64 [models, 2] and the shares of the variance that they hold, [2] (NaN for
        "tsne").

    Raises:
        ValueError: fewer than three models, or an unknown method.
    """
    check_choice("method", method, ("pca", "tsne"))
    models = check_shape("model_embeddings", model_embeddings, "models dim")["models"]
    check_range("number of models", models, 3)
    x = model_embeddings.detach().cpu().double()
    x = x - x.mean(dim=0)
    if method == "tsne":
        from sklearn.manifold import TSNE

        found = TSNE(perplexity=min(30.0, (models - 1) / 3), init="pca", random_state=seed).fit_transform(x.numpy())
        return torch.from_numpy(found).double(), torch.full((2,), torch.nan)
    U, S, _ = torch.linalg.svd(x, full_matrices=False)
    # the sign of a component is arbitrary: fix it by its largest entry
    U = U * U.gather(0, U.abs().argmax(dim=0, keepdim=True)).sign()
    return torch.nn.functional.pad(U * S, (0, 2))[:, :2], torch.nn.functional.pad(
        S.square() / S.square().sum(), (0, 2)
    )[:2]


def plot_embeddings(
    model_embeddings: Tensor,
    model_names: Sequence[str] | None = None,
    communities: Mapping[str, Tensor | Sequence[str]] | None = None,
    method: Literal["pca", "tsne"] = "pca",
    sizes: Tensor | None = None,
    axis: Axes | None = None,
    seed: int = 0,
) -> Axes:
    """Draw models as points of a plane.

    Args:
        model_embeddings: [models, dim], of one run.
        model_names: written beside the points; None writes nothing.
        communities: members by name, as bool [models] or as names; they get a colour each.
        method: see :func:`project`.
        sizes: a number per model that grows with its point, e.g. its accuracy, [models].
        axis: where to draw; None makes a figure.
        seed: of "tsne".

    Returns:
        The axis; its figure is ``axis.figure``.

    Raises:
        ValueError: shapes do not fit, or communities by name without ``model_names``.
    """
    points, share = project(model_embeddings, method, seed)
    models = len(points)
    if model_names is not None and len(model_names) != models:
        raise ValueError(f"model_names must have {models} names, got {len(model_names)}.")
    area = torch.full((models,), 34.0)
    if sizes is not None:
        check_shape("sizes", sizes, "models", models=models)
        values = sizes.detach().cpu().float()
        area = 14 + 90 * (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)
    if axis is None:
        axis = Figure(figsize=(5.5, 4.5), layout="constrained").subplots()
    rest = torch.ones(models, dtype=torch.bool)
    for number, (community, members) in enumerate((communities or {}).items()):
        mask = _members(members, model_names, models)
        rest &= ~mask
        axis.scatter(
            *points[mask].T, s=area[mask], color=COLORS[number % len(COLORS)], ec="white", lw=0.6, label=community
        )
    if rest.any():
        axis.scatter(*points[rest].T, s=area[rest], color="#B0B0AC" if communities else COLORS[0], ec="white", lw=0.6)
    for (x, y), name in zip(points.tolist(), model_names or (), strict=False):
        axis.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6.5, color="#5A5A5A")
    if method == "pca":
        axis.set_xlabel(f"first component, {100 * share[0]:.0f} % of the variance")
        axis.set_ylabel(f"second component, {100 * share[1]:.0f} %")
        axis.set_aspect("equal", adjustable="datalim")
    if communities:
        axis.legend(fontsize=7.5, handletextpad=0.2, borderaxespad=0)
    return axis


def _members(members: Tensor | Sequence[str], model_names: Sequence[str] | None, models: int) -> Tensor:
    if isinstance(members, Tensor):
        check_shape("communities", members, "models", models=models)
        return members.cpu().bool()
    if model_names is None:
        raise ValueError("communities by name need model_names.")
    return torch.tensor([name in members for name in model_names])


def plot_contributions(contribution: Tensor, names: Sequence[str], axis: Axes | None = None) -> Axes:
    """Draw how much each benchmark helps to predict each other one (see :func:`benchmark_contribution`).

    Args:
        contribution: [n, n]; rows help columns.
        names: the benchmarks.
        axis: where to draw; None makes a figure.

    Returns:
        The axis.

    Raises:
        ValueError: shapes do not fit.
    """
    n = len(names)
    check_shape("contribution", contribution, "n m", n=n, m=n)
    values = contribution.detach().cpu().double()
    if axis is None:
        axis = Figure(figsize=(1.8 + 0.5 * n, 1.2 + 0.45 * n), layout="constrained").subplots()
    limit = float(values.abs().max()) or 1.0
    image: Any = axis.imshow(values, cmap="PuOr", vmin=-limit, vmax=limit)
    axis.set_xticks(range(n), names, rotation=45, ha="right")
    axis.set_yticks(range(n), names)
    axis.set_xlabel("predicted benchmark")
    axis.set_ylabel("benchmark left out of training")
    bar = axis.figure.colorbar(image, ax=axis, fraction=0.046)
    bar.set_label("error that it saves")
    bar.outline.set_visible(False)
    return axis
