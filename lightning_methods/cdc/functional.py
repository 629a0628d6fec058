"""CDC's mathematics: confident selection, region targets, calibration loss, prototype initialisation of the heads.

Source: "Towards Calibrated Deep Clustering Network", ICLR 2025.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..core.checks import (
    check_finite,
    check_floating,
    check_labels,
    check_probabilities,
    check_range,
    check_shape,
)
from ..core.clustering import kmeans
from ..core.losses import at_least_float32, soft_target_cross_entropy
from ..core.ordering import stable_topk

__all__ = [
    "calibration_loss",
    "negative_entropy",
    "prototype_initialization",
    "region_targets",
    "select_confident_samples",
    "separate_prototypes",
]


def select_confident_samples(
    cal_probs: Float[Tensor, "batch classes"], num_per_class: int
) -> tuple[Bool[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Choose the samples that are safe to train on, as many per class as the calibrated confidence says are right.

    For every class the ``num_per_class`` rows with the largest probability of it are candidates (ties: the lower row).
    If their mean confidence is q, about ``num_per_class * q`` of them are right, so the first
    floor(num_per_class * q) are selected. Each selected row keeps its own most probable class as its label, which may
    differ from the class that it was found under, as in the authors' code.

    Source: equation (4).

    Args:
        cal_probs: probabilities of the calibration head, [batch, classes].
        num_per_class: candidates per class M, at least 1; more than there are rows counts as all rows.

    Returns:
        ``(mask, labels)``: which rows are selected, bool [batch], and every row's most probable class, int64 [batch].

    Raises:
        ValueError: rows are not probabilities, or num_per_class is below 1.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.4, 0.6]])
        >>> mask, labels = select_confident_samples(probs, num_per_class=2)
        >>> mask.tolist(), labels.tolist()  # mean confidence 0.8 and 0.7: one of two in both classes
        ([True, False, True, False], [0, 0, 1, 1])
    """
    rows = check_shape("cal_probs", cal_probs, "batch classes")["batch"]
    check_probabilities("cal_probs", cal_probs)
    check_range("num_per_class", num_per_class, 1)
    m = min(num_per_class, rows)
    probs = at_least_float32(cal_probs.detach())
    confidence, labels = probs.max(dim=1)
    candidates = stable_topk(probs, m, dim=0)[1]
    quota = torch.floor(m * confidence[candidates].mean(dim=0))
    chosen = torch.arange(m, device=probs.device)[:, None] < quota
    hits = torch.zeros(rows, dtype=torch.int64, device=probs.device)
    hits.scatter_add_(0, candidates.flatten(), chosen.flatten().long())
    return hits > 0, labels


def region_targets(
    probs: Float[Tensor, "batch classes"], region_ids: Int[Tensor, " batch"], num_regions: int
) -> Float[Tensor, "batch classes"]:
    """Replace every prediction by the mean prediction of its region, which is less confident where the region is mixed.

    Args:
        probs: probabilities of the clustering head, [batch, classes].
        region_ids: region of every row, [batch], in 0 .. num_regions - 1; regions may be empty.
        num_regions: number of regions K.

    Returns:
        Targets, [batch, classes], float32 or wider, without gradient.

    Raises:
        ValueError: rows are not probabilities, a region is out of range, or numbers of rows differ.

    Example:
        >>> probs = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
        >>> region_targets(probs, torch.tensor([0, 0, 1]), num_regions=2)
        tensor([[0.7500, 0.2500],
                [0.7500, 0.2500],
                [0.0000, 1.0000]])
    """
    rows = check_shape("probs", probs, "batch classes")["batch"]
    check_probabilities("probs", probs)
    check_range("num_regions", num_regions, 1)
    check_labels("region_ids", region_ids, num_regions, batch=rows)
    probs = at_least_float32(probs.detach())
    # A product with the membership matrix: the same sum every time, which atomic additions on a GPU do not promise.
    members = (torch.arange(num_regions, device=probs.device)[:, None] == region_ids).to(probs.dtype)
    with torch.autocast(probs.device.type, enabled=False):
        means = members @ probs / members.sum(dim=1, keepdim=True).clamp_min(1)
    return means[region_ids]


def negative_entropy(mean_probs: Float[Tensor, " classes"]) -> Float[Tensor, ""]:
    """``sum_c p_c log p_c`` with 0 log 0 = 0, in the value and in the gradient; lowest for the uniform distribution.

    Args:
        mean_probs: a distribution, [classes].
    """
    present = mean_probs > 0
    return (mean_probs * torch.where(present, mean_probs, 1).log()).sum()


def calibration_loss(
    logits: Float[Tensor, "batch classes"], targets: Float[Tensor, "batch classes"], entropy_weight: float = 1.0
) -> Float[Tensor, ""]:
    """Cross-entropy to the region targets plus the negative entropy of the mean prediction.

    The second term keeps all clusters in use. A class that no row predicts (its mean probability underflows) adds
    nothing to it; the authors' released code gives NaN there.

    Args:
        logits: logits of the calibration head, [batch, classes].
        targets: region targets, [batch, classes]; constants.
        entropy_weight: weight of the entropy term, w >= 0.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: shapes differ, the targets are not probabilities, or the weight is negative.

    Example:
        >>> calibration_loss(torch.zeros(4, 2), torch.full((4, 2), 0.5))  # log 2 - log 2
        tensor(0.)
    """
    check_shape("targets", targets, "batch classes", **check_shape("logits", logits, "batch classes"))
    check_probabilities("targets", targets)
    check_range("entropy_weight", entropy_weight, 0)
    logits = at_least_float32(logits)
    loss = soft_target_cross_entropy(logits, targets.detach().to(logits.dtype))
    if entropy_weight == 0:
        return loss
    return loss + entropy_weight * negative_entropy(logits.softmax(dim=1).mean(dim=0))


def separate_prototypes(
    prototypes: Float[Tensor, "prototypes features"],
    *,
    steps: int = 2000,
    scale: float = 5.0,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> Float[Tensor, "prototypes features"]:
    """Push prototypes apart, so that a layer with them as weights keeps the nearest-prototype decisions.

    Two copies Z and V of the prototypes are trained by SGD with a cosine schedule so that every relu(z_i) finds its own
    v_i: cross-entropy of ``scale * cos(relu(z_i), v_j)`` against the identity.

    Source: proposition 1 (such weights preserve nearest-prototype assignments); the procedure is the authors' code's.

    Args:
        prototypes: cluster centres, [prototypes, features].
        steps: number of gradient steps; 0 returns the prototypes as they are.
        scale: factor of the cosines.
        lr: learning rate at the start; ends at 0.
        momentum: of SGD.
        weight_decay: of SGD.

    Returns:
        V, [prototypes, features], in the dtype of the input.

    Raises:
        ValueError: not a finite matrix, or steps, scale or lr is out of range.
    """
    check_floating("prototypes", prototypes)
    count = check_shape("prototypes", prototypes, "prototypes features")["prototypes"]
    check_finite("prototypes", prototypes)
    check_range("steps", steps, 0)
    check_range("scale", scale, 0, low_open=True)
    check_range("lr", lr, 0)
    start = at_least_float32(prototypes.detach())
    z, v = (start.clone().requires_grad_() for _ in range(2))
    labels = torch.arange(count, device=start.device)
    optimizer = torch.optim.SGD([z, v], lr=lr, momentum=momentum, weight_decay=weight_decay)
    with torch.enable_grad(), torch.autocast(start.device.type, enabled=False):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            cosines = F.normalize(z.relu(), dim=1) @ F.normalize(v, dim=1).t()
            optimizer.zero_grad()
            F.cross_entropy(scale * cosines, labels).backward()
            optimizer.step()
    return v.detach().to(prototypes.dtype)


def _standardized(x: Tensor) -> Tensor:
    """Rows with zero mean and unit variance, then unit length; a constant row becomes zero."""
    std = x.std(dim=1, keepdim=True)
    return F.normalize((x - x.mean(dim=1, keepdim=True)) / (std + 1e-12), dim=1)


@torch.no_grad()
def prototype_initialization(
    features: Float[Tensor, "points features"],
    num_clusters: int,
    hidden_dim: int,
    *,
    n_init: int = 10,
    steps: int = 2000,
    bn_eps: float = 1e-5,
    seed: int = 0,
) -> tuple[Float[Tensor, "hidden features"], Float[Tensor, "clusters hidden"]]:
    """Weights of a two-layer head that start it as a nearest-prototype classifier on the features.

    k-means with ``hidden_dim`` centres gives the first layer, k-means with ``num_clusters`` centres on what that layer
    makes of the features (through a fresh batch norm in evaluation and ReLU) the second. Rows are standardised and
    normalised for k-means; both sets of centres are then separated (:func:`separate_prototypes`).

    Args:
        features: features of the training images, clean view, encoder in eval mode, [points, features].
        num_clusters: number of clusters C, at least 2.
        hidden_dim: width of the hidden layer h, at least 2.
        n_init: restarts of both k-means.
        steps: steps of the separation.
        bn_eps: epsilon of the head's batch norm.
        seed: seed of k-means.

    Returns:
        Weights of the first layer [hidden_dim, features] and of the second [num_clusters, hidden_dim], float32 or
        wider.

    Raises:
        ValueError: ``features`` is not a finite matrix, or there are fewer rows than clusters or hidden units.
    """
    check_floating("features", features)
    sizes = check_shape("features", features, "points features")
    check_finite("features", features)
    check_range("num_clusters", num_clusters, 2)
    check_range("hidden_dim", hidden_dim, 2)
    if sizes["features"] < 2:
        raise ValueError(f"features must have at least two columns, got shape {list(features.shape)}.")
    for name, value in {"num_clusters": num_clusters, "hidden_dim": hidden_dim}.items():
        if value > sizes["points"]:
            raise ValueError(f"{name} must be at most the number of rows of features, got {value} > {sizes['points']}.")
    x = at_least_float32(features.detach())
    generator = torch.Generator(device=x.device).manual_seed(seed)
    with torch.autocast(x.device.type, enabled=False):
        first = kmeans(_standardized(x), hidden_dim, n_init=n_init, generator=generator)[0]
        hidden = F.relu(x @ first.t() / math.sqrt(1 + bn_eps))
        second = kmeans(_standardized(hidden), num_clusters, n_init=n_init, generator=generator)[0]
    return separate_prototypes(first, steps=steps), separate_prototypes(second, steps=steps)
