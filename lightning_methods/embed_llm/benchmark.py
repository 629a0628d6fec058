"""What model embeddings know about benchmarks that they were not trained on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TypedDict

import torch
from torch import Tensor
from torchmetrics.functional import kendall_rank_corrcoef

from ..core.checks import check_range, check_shape
from ..core.random import make_generator
from .functional import fit_benchmark_regression

__all__ = ["BenchmarkPrediction", "benchmark_contribution", "predict_benchmark_accuracy"]


class BenchmarkPrediction(TypedDict):
    """One entry per random split of the models.

    Attributes:
        mse: mean squared error on the models held out, [splits].
        mse_of_mean: that of predicting the mean of the training models, [splits].
        kendall_tau: rank correlation of predicted and true accuracy (tau-b), NaN where either is constant, [splits].
        p_value: of the correlation being 0, two-sided, [splits]; a benchmark counts as predictable by the number of
            splits with p < 0.05.
    """

    mse: Tensor
    mse_of_mean: Tensor
    kendall_tau: Tensor
    p_value: Tensor


def _rank_correlation(predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Kendall's tau-b with its p-value; NaN where there is nothing to rank."""
    if len(predicted) < 2 or (predicted == predicted[0]).all() or (true == true[0]).all():
        return predicted.new_tensor(torch.nan), predicted.new_tensor(torch.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a variant that is not asked for
        tau, p_value = kendall_rank_corrcoef(predicted, true, variant="b", t_test=True, alternative="two-sided")
    return tau.to(predicted), p_value.to(predicted)


def predict_benchmark_accuracy(
    model_embeddings: Tensor,
    accuracy: Tensor,
    num_splits: int = 100,
    train_fraction: float = 0.8,
    seed: int = 0,
) -> BenchmarkPrediction:
    """Predict models' accuracies on a benchmark that their embeddings were not trained on, by a linear regression.

    In every split a random part of the models gives the regression (:func:`fit_benchmark_regression`), the others test
    it. The paper names neither the share nor the intercept: 80 % and with intercept are our choice.

    Args:
        model_embeddings: [models, dim].
        accuracy: mean accuracy of every model on the benchmark, [models].
        num_splits: number of random splits.
        train_fraction: share of the models that the regression sees, in (0, 1).
        seed: of the splits.

    Returns:
        :class:`BenchmarkPrediction`, float64 tensors on the CPU.

    Raises:
        ValueError: shapes do not fit, or a split would leave no model on one side.

    Example:
        >>> embeddings = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        >>> result = predict_benchmark_accuracy(embeddings, 0.5 + 0.1 * embeddings[:, 0], num_splits=5)
        >>> result["kendall_tau"].round(decimals=3), bool((result["p_value"] < 0.05).all())
        (tensor([1., 1., 1., 1., 1.], dtype=torch.float64), True)
    """
    models = check_shape("model_embeddings", model_embeddings, "models dim")["models"]
    check_shape("accuracy", accuracy, "models", models=models)
    check_range("num_splits", num_splits, 1)
    check_range("train_fraction", train_fraction, 0, 1, low_open=True, high_open=True)
    count = round(train_fraction * models)
    if not 0 < count < models:
        raise ValueError(f"train_fraction={train_fraction} of {models} models leaves none on one side.")
    x, y = model_embeddings.detach().cpu().double(), accuracy.detach().cpu().double()
    results: dict[str, list[Tensor]] = {"mse": [], "mse_of_mean": [], "kendall_tau": [], "p_value": []}
    for split in range(num_splits):
        order = torch.randperm(models, generator=make_generator(seed, "benchmark", split))
        train, test = order[:count], order[count:]
        weight, bias = fit_benchmark_regression(x[train], y[train])
        predicted = x[test] @ weight + bias
        tau, p_value = _rank_correlation(predicted, y[test])
        results["mse"].append((predicted - y[test]).square().mean())
        results["mse_of_mean"].append((y[train].mean() - y[test]).square().mean())
        results["kendall_tau"].append(tau)
        results["p_value"].append(p_value)
    return BenchmarkPrediction(**{name: torch.stack(values) for name, values in results.items()})


def benchmark_contribution(
    train_embeddings: Callable[[set[str]], Tensor],
    accuracy: Mapping[str, Tensor],
    num_splits: int = 100,
    train_fraction: float = 0.8,
    seed: int = 0,
) -> Tensor:
    """How much each benchmark's questions help to predict accuracies on each other benchmark.

    ``C_ij = MSE_removed - MSE_added``: the total test error over the splits when j is predicted from embeddings trained
    without i and j, minus that from embeddings trained without j alone. The sum of row i is how much benchmark i helps
    the others, that of column j how much the others help j.

    Args:
        train_embeddings: trains on all benchmarks but the given ones and returns the model embeddings [models, dim],
            with the same models in the same order every time; called once for every benchmark and for every pair.
        accuracy: every model's mean accuracy by benchmark, [models] each.
        num_splits: as in :func:`predict_benchmark_accuracy`.
        train_fraction: as there.
        seed: as there; the same splits serve all predictions.

    Returns:
        float64 [n, n] in the order of ``accuracy``; 0 on the diagonal, where nothing is defined.

    Raises:
        ValueError: fewer than three benchmarks (nothing would be left to train on), or shapes that do not fit.
    """
    names = list(accuracy)
    if len(names) < 3:
        raise ValueError(f"accuracy must have at least three benchmarks, got {len(names)}: {', '.join(names)}.")
    without: dict[frozenset[str], Tensor] = {}

    def total_error(excluded: frozenset[str], target: str) -> Tensor:
        if excluded not in without:
            without[excluded] = train_embeddings(set(excluded))
        errors = predict_benchmark_accuracy(without[excluded], accuracy[target], num_splits, train_fraction, seed)
        return errors["mse"].sum()

    contribution = torch.zeros(len(names), len(names), dtype=torch.float64)
    for j, target in enumerate(names):
        added = total_error(frozenset({target}), target)
        for i, source in enumerate(names):
            if i != j:
                contribution[i, j] = total_error(frozenset({source, target}), target) - added
    return contribution
