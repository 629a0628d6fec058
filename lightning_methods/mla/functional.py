"""Logit adjustment after training, the boundaries that it moves, and the simplex that neural collapse tends to.

Notation of the paper: ``n_k`` training samples of class k of K, ``pi_k = n_k / N`` its prior, ``mu_k`` its mean
feature, ``rho = arccos(-1 / (K - 1))`` the angle between two class directions of the simplex.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_choice, check_floating, check_labels, check_range, check_shape, values_visible
from ..core.losses import at_least_float32, class_log_prior, logit_adjusted_cross_entropy
from ..core.random import haar_orthogonal

__all__ = [
    "additive_boundary_angles",
    "additive_logit_adjustment",
    "adjust",
    "logit_adjusted_cross_entropy",
    "multiplicative_boundary_angles",
    "multiplicative_logit_adjustment",
    "one_vs_one_scores",
    "optimal_boundary_angles",
    "search_strength",
    "simplex_etf",
]

# Class counts are K positive numbers: a list, an array, or a tensor on any device.
ClassCounts = Any
Adjustment = Literal["none", "multiplicative", "additive", "one_vs_one"]
#: Products held at a time by `one_vs_one_scores`: on a processor they are to stay in its cache.
CHUNK_ENTRIES = {"cpu": 2**17}
DEVICE_CHUNK_ENTRIES = 2**25


# adjustments


def multiplicative_logit_adjustment(
    logits: Float[Tensor, "*batch classes"], class_counts: ClassCounts, gamma: float
) -> Float[Tensor, "*batch classes"]:
    """MLA: the logit of class k times ``pi_k^(-gamma)``.

    Source: Hasegawa and Sato, "Multiplicative Logit Adjustment Approximates Neural-Collapse-Aware Decision Boundary
    Adjustment", ICLR 2025. Apply it to the whole logit, bias included. A *negative* logit of a rare class is pushed
    further down, which is harmless where the largest logit is positive; do not give log-probabilities.

    Args:
        logits: [..., classes].
        class_counts: training samples of each class, positive, [classes].
        gamma: strength, non-negative; 0 changes nothing, 1/2 is the paper's theory.

    Returns:
        Adjusted logits in the dtype of ``logits``; half precision is computed in float32.

    Raises:
        ValueError: a count is not positive, their number is not K, or gamma is negative.

    Example:
        >>> multiplicative_logit_adjustment(torch.tensor([1.0, 1.0]), [75, 25], gamma=0.5)
        tensor([1.1547, 2.0000])
    """
    check_range("gamma", gamma, 0)
    x, log_prior = _logits_and_prior(logits, class_counts)
    return (x * (-gamma * log_prior).exp()).to(logits.dtype)


def additive_logit_adjustment(
    logits: Float[Tensor, "*batch classes"], class_counts: ClassCounts, tau: float
) -> Float[Tensor, "*batch classes"]:
    """ALA: the logit of class k minus ``tau * log pi_k``.

    Source: Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, equation (9). It depends on the scale of
    the logits, and so tau on the size of the features. For a model that was trained by
    :func:`logit_adjusted_cross_entropy` the adjustment is done already.

    Args:
        logits: [..., classes].
        class_counts: training samples of each class, positive, [classes].
        tau: strength, non-negative; 0 changes nothing, 1 is Bayes-optimal for calibrated logits.

    Returns:
        Adjusted logits in the dtype of ``logits``; half precision is computed in float32.

    Raises:
        ValueError: a count is not positive, their number is not K, or tau is negative.

    Example:
        >>> additive_logit_adjustment(torch.tensor([1.0, 1.0]), [75, 25], tau=1.0)
        tensor([1.2877, 2.3863])
    """
    check_range("tau", tau, 0)
    x, log_prior = _logits_and_prior(logits, class_counts)
    return (x - tau * log_prior).to(logits.dtype)


def _logits_and_prior(logits: Tensor, class_counts: ClassCounts) -> tuple[Tensor, Tensor]:
    check_floating("logits", logits)
    classes = check_shape("logits", logits, "... classes")["classes"]
    x = at_least_float32(logits)
    return x, class_log_prior(class_counts, classes, x.dtype, x.device)


# boundary angles


def _simplex_angle(num_classes: int) -> float:
    """rho.

    Raises:
        ValueError: fewer than three classes; two directions of the simplex of two are opposite, and there is no plane.
    """
    if num_classes < 3:
        raise ValueError(f"boundary angles need at least 3 classes, got {num_classes}.")
    return math.acos(-1 / (num_classes - 1))


def _check_norms(feature_norms: Tensor, num_classes: int) -> None:
    check_shape("feature_norms", feature_norms, "classes", classes=num_classes)
    if values_visible(feature_norms) and not ((feature_norms > 0) & torch.isfinite(feature_norms)).all():
        raise ValueError("feature_norms must be positive and finite.")


def _counts_and_norms(class_counts: ClassCounts, feature_norms: Tensor | None) -> tuple[Tensor, Tensor | None, float]:
    """Log priors and norms on one device in one dtype, and rho."""
    if feature_norms is None:
        log_prior = class_log_prior(class_counts)
    else:
        check_floating("feature_norms", feature_norms)
        feature_norms = at_least_float32(feature_norms)
        log_prior = class_log_prior(class_counts, None, feature_norms.dtype, feature_norms.device)
        _check_norms(feature_norms, len(log_prior))
    return log_prior, feature_norms, _simplex_angle(len(log_prior))


def optimal_boundary_angles(
    class_counts: ClassCounts, gamma: float = 0.5, feature_norms: Float[Tensor, " classes"] | None = None
) -> Float[Tensor, "classes classes"]:
    """Angles of the 1-vs-1 adjuster: between class i and its boundary against j, ``rho * a_j / (a_i + a_j)``.

    ``a_k = n_k^gamma * |mu_k|`` is the inverse of the angular spread of a class; the rarer class gets the larger angle.
    ``theta[i, j] + theta[j, i] = rho``.

    Source: Hasegawa and Sato (2025), the boundary that follows from Propositions 1 and 2, where gamma is 1/2.

    Args:
        class_counts: training samples of each class, positive, [classes].
        gamma: strength, non-negative; 0 puts every boundary half way.
        feature_norms: ``|mu_k|``, positive, [classes]; None takes all to be equal.

    Returns:
        Radians, [classes, classes]; the diagonal is rho / 2.

    Raises:
        ValueError: fewer than 3 classes, a count or norm that is not positive, or gamma is negative.

    Example:
        >>> optimal_boundary_angles([400, 100, 100]).rad2deg()[0].round()
        tensor([60., 40., 40.])
    """
    check_range("gamma", gamma, 0)
    log_prior, norms, rho = _counts_and_norms(class_counts, feature_norms)
    log_a = gamma * log_prior if norms is None else gamma * log_prior + norms.log()
    return rho * torch.sigmoid(log_a[None, :] - log_a[:, None])


def multiplicative_boundary_angles(class_counts: ClassCounts, gamma: float = 0.5) -> Float[Tensor, "classes classes"]:
    """Angles of MLA: ``arctan(((n_j / n_i)^gamma - cos rho) / sin rho)``.

    Where ``cos(t) n_i^-gamma = cos(rho - t) n_j^-gamma`` for a feature at the angle t from class i in the plane of both
    class directions. They differ from :func:`optimal_boundary_angles` by 4.1 degrees at most for gamma = 1/2 and count
    ratios up to 100.

    Args:
        class_counts: training samples of each class, positive, [classes].
        gamma: strength, non-negative.

    Returns:
        Radians, [classes, classes]; the diagonal is rho / 2.

    Raises:
        ValueError: fewer than 3 classes, a count that is not positive, or gamma is negative.

    Example:
        >>> multiplicative_boundary_angles([900, 100, 100]).rad2deg()[0]
        tensor([60.0000, 43.8979, 43.8979])
    """
    check_range("gamma", gamma, 0)
    log_prior, _, rho = _counts_and_norms(class_counts, None)
    ratio = (gamma * (log_prior[None, :] - log_prior[:, None])).exp()
    return torch.arctan((ratio - math.cos(rho)) / math.sin(rho))


def additive_boundary_angles(
    class_counts: ClassCounts, feature_norms: Float[Tensor, " classes"], tau: float = 1.0
) -> Float[Tensor, "classes classes"]:
    """Angles of ALA: ``rho / 2 - arcsin(tau * log(n_i / n_j) / (2 m sin(rho / 2)))``, for features of length m.

    m is the mean feature norm over the training samples, ``sum_k n_k |mu_k| / N``. Where the adjustment is stronger
    than any feature in the plane there is no boundary and the angle is nan.

    Args:
        class_counts: training samples of each class, positive, [classes].
        feature_norms: ``|mu_k|``, positive, [classes].
        tau: strength, non-negative.

    Returns:
        Radians, [classes, classes]; the diagonal is rho / 2.

    Raises:
        ValueError: fewer than 3 classes, a count or norm that is not positive, or tau is negative.

    Example:
        >>> additive_boundary_angles([900, 100, 100], torch.full((3,), 5.0)).rad2deg()[0]
        tensor([60.0000, 45.3026, 45.3026])
    """
    check_range("tau", tau, 0)
    log_prior, norms, rho = _counts_and_norms(class_counts, feature_norms)
    mean_norm = (log_prior.exp() * norms).sum()
    gap = log_prior[:, None] - log_prior[None, :]
    return rho / 2 - torch.arcsin(tau * gap / (2 * mean_norm * math.sin(rho / 2)))


# the 1-vs-1 adjuster


@torch.no_grad()
def one_vs_one_scores(
    logits: Float[Tensor, "batch classes"],
    angles: Float[Tensor, "classes classes"],
    chunk_size: int | None = None,
) -> Float[Tensor, "batch classes"]:
    """Share of the classes that each class beats: i beats j if ``x_i cos theta[j, i] > x_j cos theta[i, j]``.

    The prediction is the argmax, ties to the lowest index. Both sides are products of *unadjusted* logits with cosines:
    no division, so angles beyond 90 degrees are right too.

    Source: Hasegawa and Sato (2025), the 1-vs-1 adjuster.

    Args:
        logits: unadjusted, [batch, classes].
        angles: ``theta`` in (0, rho), of :func:`optimal_boundary_angles`, [classes, classes].
        chunk_size: classes i at a time; memory is ``2 * batch * chunk_size * classes``. None picks it by the device.

    Returns:
        Scores in {0, 1/K, ..., (K - 1)/K}, [batch, classes], float32 or wider.

    Raises:
        ValueError: fewer than 3 classes, ``angles`` is not [K, K], or ``chunk_size`` is below 1.

    Example:
        >>> angles = optimal_boundary_angles([400, 100, 100])
        >>> one_vs_one_scores(torch.tensor([[2.0, 1.5, 0.0]]), angles)
        tensor([[0.3333, 0.6667, 0.0000]])
    """
    check_floating("logits", logits)
    batch, classes = check_shape("logits", logits, "batch classes").values()
    check_floating("angles", angles)
    check_shape("angles", angles, "classes classes", classes=classes)
    _simplex_angle(classes)
    x = at_least_float32(logits)
    if chunk_size is None:
        chunk_size = max(1, CHUNK_ENTRIES.get(x.device.type, DEVICE_CHUNK_ENTRIES) // max(batch * classes, 1))
    check_range("chunk_size", chunk_size, 1)
    chunk_size = min(chunk_size, classes)
    angles = angles.to(x.device)
    scores = torch.empty_like(x)
    # Written again for every chunk: fresh memory each time would take longer than the products.
    left, right = x.new_empty(2, chunk_size, batch, classes)
    for start in range(0, classes, chunk_size):
        rows = slice(start, min(start + chunk_size, classes))
        # Cosines by chunk too: all of them would be another [K, K].
        mine = angles[:, rows].T.to(x.dtype, memory_format=torch.contiguous_format).cos()  # cos theta[j, i]
        theirs = angles[rows].to(x.dtype).cos()
        ours, others = left[: len(mine)], right[: len(mine)]
        torch.mul(x[:, rows].T[:, :, None], mine[:, None, :], out=ours)
        torch.mul(x, theirs[:, None, :], out=others)
        scores[:, rows] = ours.gt_(others).sum(dim=2).T
    return scores / classes


# everything by name


def check_adjustment(name: str, strength: float) -> None:
    """Raise a ``ValueError`` unless there is an adjustment of this name and it may have this strength."""
    check_choice("adjustment", name, get_args(Adjustment))
    check_range("tau" if name == "additive" else "gamma", strength, 0)


def adjust(
    name: Adjustment,
    logits: Float[Tensor, "batch classes"],
    class_counts: ClassCounts,
    strength: float = 0.5,
    feature_norms: Float[Tensor, " classes"] | None = None,
) -> Float[Tensor, "batch classes"]:
    """Scores whose argmax is the adjusted prediction, by the name of the adjustment.

    Args:
        name: "none", "multiplicative", "additive" or "one_vs_one".
        logits: unadjusted, [batch, classes].
        class_counts: training samples of each class, [classes].
        strength: gamma, or tau of "additive".
        feature_norms: of "one_vs_one", [classes].

    Returns:
        [batch, classes].

    Raises:
        ValueError: an unknown name, or what the adjustment itself refuses.
    """
    check_adjustment(name, strength)
    if name == "none":
        return logits
    if name == "multiplicative":
        return multiplicative_logit_adjustment(logits, class_counts, strength)
    if name == "additive":
        return additive_logit_adjustment(logits, class_counts, strength)
    # One device and one count of classes; the angles' own check would not know that of the logits.
    class_log_prior(class_counts, check_shape("logits", logits, "batch classes")["classes"])
    if feature_norms is not None:
        feature_norms = feature_norms.to(logits.device)
    return one_vs_one_scores(logits, optimal_boundary_angles(class_counts, strength, feature_norms))


@torch.no_grad()
def search_strength(
    logits: Float[Tensor, "n classes"],
    target: Int[Tensor, " n"],
    class_counts: ClassCounts,
    strengths: Sequence[float] | Float[Tensor, " strengths"],
    method: Literal["multiplicative", "additive", "one_vs_one"] = "multiplicative",
    feature_norms: Float[Tensor, " classes"] | None = None,
) -> tuple[float, Float[Tensor, " strengths"]]:
    """The strength with the best mean of the per-class accuracies on held-out samples; never use the test set.

    Args:
        logits: unadjusted logits of a validation set, [n, classes].
        target: its classes, [n].
        class_counts: *training* samples of each class, [classes].
        strengths: gammas (or taus) to try; the paper's grid is 0 to 2.
        method: "multiplicative", "additive" or "one_vs_one".
        feature_norms: of "one_vs_one".

    Returns:
        The best strength (of equals the smallest), and the mean accuracy in [0, 1] for each, float64 on CPU and CUDA.

    Raises:
        ValueError: no sample, no strength, a negative strength, or bad shapes, labels or counts.

    Example:
        >>> logits, target = torch.tensor([[3.0, 1.0], [2.0, 1.5]]), torch.tensor([0, 1])
        >>> search_strength(logits, target, [100, 10], [0.0, 0.25, 2.0])
        (0.25, tensor([0.5000, 1.0000, 0.5000], dtype=torch.float64))
    """
    check_choice("method", method, ("multiplicative", "additive", "one_vs_one"))
    n, classes = check_shape("logits", logits, "n classes").values()
    check_range("the number of samples", n, 1)
    check_labels("target", target, classes, batch=n)
    values = [float(strength) for strength in strengths]
    check_range("the number of strengths", len(values), 1)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    target = target.long()
    total = torch.bincount(target, minlength=classes).to(wide)
    hits = torch.stack(
        [adjust(method, logits, class_counts, value, feature_norms).argmax(dim=1) == target for value in values]
    )
    correct = torch.zeros(len(values), classes, dtype=wide, device=logits.device).index_add(1, target, hits.to(wide))
    accuracy = (correct / total.clamp_min(1)).sum(dim=1) / (total > 0).sum()
    return min(zip((-accuracy).tolist(), values, strict=True))[1], accuracy


# neural collapse


def simplex_etf(
    num_classes: int,
    num_features: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Float[Tensor, "classes features"]:
    """A simplex equiangular tight frame in a random position: unit rows, ``-1 / (K - 1)`` between any two.

    ``sqrt(K / (K - 1)) (I - 11' / K) U'`` with a random U of orthonormal columns.

    Source: Papyan, Han and Donoho, "Prevalence of neural collapse", PNAS 2020.

    Args:
        num_classes: K, at least 2.
        num_features: D, at least K.
        generator: of the position.
        dtype: of the result.
        device: of the result.

    Returns:
        [K, D].

    Raises:
        ValueError: fewer features than classes, or fewer than 2 classes.

    Example:
        >>> w = simplex_etf(3, 8, torch.Generator().manual_seed(0))
        >>> (w @ w.T).mul(100).round() / 100
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])
    """
    check_range("num_classes", num_classes, 2)
    if num_features < num_classes:
        raise ValueError(f"num_features must be at least num_classes={num_classes}, got {num_features}.")
    u = haar_orthogonal(num_features, num_classes, generator, None, device)
    u = u.to(torch.float32 if u.device.type == "mps" else torch.float64)
    centred = (u - u.mean(dim=1, keepdim=True)).T
    return (math.sqrt(num_classes / (num_classes - 1)) * centred).to(dtype or torch.get_default_dtype())
