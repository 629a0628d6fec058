"""How well clusters match classes, how honest their confidence is, and whether it tells right from wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_auroc
from torchmetrics.functional.clustering import adjusted_rand_score, normalized_mutual_info_score
from torchmetrics.utilities.data import dim_zero_cat

from ..core.checks import (
    check_floating,
    check_labels,
    check_probabilities,
    check_range,
    check_same_rows,
    check_shape,
    values_visible,
)
from ..core.losses import at_least_float32
from .calibration import confidence_bins, expected_calibration_error

__all__ = [
    "AURC",
    "ClusterAccuracy",
    "ClusterCalibrationError",
    "ClusterRejection",
    "aurc",
    "clustering_metrics",
    "fpr_at_recall",
    "match_clusters",
]


def match_clusters(
    preds: Int[Tensor, " n"], targets: Int[Tensor, " n"], num_clusters: int, num_classes: int
) -> Int[Tensor, " clusters"]:
    """The one-to-one map from clusters to classes under which most samples are right (Hungarian algorithm).

    Args:
        preds: cluster of every sample, [n].
        targets: class of every sample, [n].
        num_clusters: number of clusters.
        num_classes: number of classes.

    Returns:
        The class of every cluster, [num_clusters]; -1 for a cluster that is left without a class.

    Raises:
        ValueError: shapes differ, or a cluster or class is out of range.

    Example:
        >>> match_clusters(torch.tensor([2, 2, 0, 1]), torch.tensor([0, 0, 1, 1]), num_clusters=3, num_classes=2)
        tensor([ 1, -1,  0])
    """
    check_labels("preds", preds, num_clusters)
    check_labels("targets", targets, num_classes)
    check_same_rows(preds=preds, targets=targets)
    return _match(_confusion(preds, targets, num_clusters, num_classes))


def _confusion(preds: Tensor, targets: Tensor, num_clusters: int, num_classes: int) -> Tensor:
    """Number of samples by cluster and class, int64 [num_clusters, num_classes]."""
    counts = torch.bincount(num_classes * preds + targets, minlength=num_clusters * num_classes)
    return counts.view(num_clusters, num_classes)


def _match(confusion: Tensor) -> Tensor:
    clusters, classes = linear_sum_assignment(confusion.cpu().numpy(), maximize=True)
    match = torch.full((confusion.shape[0],), -1, dtype=torch.int64)
    match[torch.from_numpy(clusters)] = torch.from_numpy(classes)
    return match.to(confusion.device)


def _known(targets: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The rows whose class is known."""
    known = targets >= 0
    return targets[known], *(x[known] for x in others)


def _confidence(probs: Tensor) -> tuple[Tensor, Tensor]:
    confidence, preds = at_least_float32(probs).max(dim=1)
    return confidence.clamp(max=1), preds  # a softmax may exceed 1 by rounding


def clustering_metrics(
    probs: Float[Tensor, "n clusters"], targets: Int[Tensor, " n"], *, num_bins: int = 15
) -> dict[str, Tensor]:
    """Accuracy, NMI, ARI and expected calibration error of soft cluster assignments.

    Clusters are mapped to classes one-to-one on all samples (Hungarian algorithm); a sample whose cluster got no class
    counts as wrong. NMI (arithmetic mean) and ARI compare the partitions themselves. The calibration error takes the
    largest probability as confidence, in equal-width bins on (0, 1].

    Args:
        probs: probability of every cluster, [n, clusters].
        targets: classes, [n]; rows with a negative class are left out.
        num_bins: bins of the calibration error.

    Returns:
        ``acc``, ``nmi``, ``ari`` and ``ece``, scalars; fractions, not percent.

    Raises:
        ValueError: ``probs`` is not a matrix of probabilities, the shapes do not fit, or no class is known.

    Example:
        >>> probs = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
        >>> metrics = clustering_metrics(probs, torch.tensor([0, 0, 1, 1]))
        >>> metrics["acc"], metrics["ece"]
        (tensor(1.), tensor(0.2500))
    """
    n, clusters = check_shape("probs", probs, "n clusters").values()
    check_probabilities("probs", probs)
    check_shape("targets", targets, "n", n=n)
    targets, probs = _known(targets, probs)
    if targets.numel() == 0:
        raise ValueError("targets must hold at least one known class (not negative).")
    confidence, preds = _confidence(probs)
    classes = int(targets.max()) + 1
    match = _match(_confusion(preds, targets, clusters, classes))
    correct = match[preds] == targets
    dtype = confidence.dtype
    return {
        "acc": correct.to(dtype).mean(),
        "nmi": normalized_mutual_info_score(preds, targets, "arithmetic").to(dtype),
        "ari": adjusted_rand_score(preds, targets).to(dtype),
        "ece": expected_calibration_error(confidence, correct, num_bins),
    }


def _check_ranking(confidence: Tensor, correct: Tensor) -> None:
    check_floating("confidence", confidence)
    check_shape("confidence", confidence, "n")
    check_shape("correct", correct, "n", n=confidence.shape[0])
    if values_visible(confidence) and confidence.isnan().any():
        raise ValueError("confidence must not hold NaN.")


def aurc(
    confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"]
) -> Float[Tensor, ""]:
    """Area under the risk-coverage curve: the mean over k = 1..n of the error rate among the k most confident samples.

    Source: Geifman et al., "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019. Equal
    confidences keep their order.

    Args:
        confidence: any score that ranks, [n].
        correct: whether the prediction was right, [n].

    Returns:
        A scalar in [0, 1], low is good; nan without samples.

    Raises:
        ValueError: shapes differ, or a confidence is NaN.

    Example:
        >>> aurc(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 1, 0]))  # only the last one is wrong: 1/4 / 4
        tensor(0.0625)
    """
    _check_ranking(confidence, correct)
    order = confidence.argsort(descending=True, stable=True)
    wrong = 1 - correct[order].double()
    risk = wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, device=wrong.device)
    return risk.mean().to(at_least_float32(confidence).dtype)


def fpr_at_recall(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"],
    recall: float = 0.95,
) -> Float[Tensor, ""]:
    """Share of the wrong samples that pass the highest threshold which keeps a given share of the right ones (FPR95).

    Args:
        confidence: any score that ranks, [n]; a sample passes at or above the threshold.
        correct: whether the prediction was right, [n].
        recall: share of the right samples to keep, in (0, 1].

    Returns:
        A scalar in [0, 1], low is good; 0 if nothing is wrong, nan if nothing is right.

    Raises:
        ValueError: shapes differ, a confidence is NaN, or recall is out of range.

    Example:
        >>> confidence, correct = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 0, 1, 0])
        >>> fpr_at_recall(confidence, correct)
        tensor(0.5000)
    """
    _check_ranking(confidence, correct)
    check_range("recall", recall, 0, 1, low_open=True)
    confidence, correct = at_least_float32(confidence), correct.bool()
    right, wrong = confidence[correct], confidence[~correct]
    if right.numel() == 0:
        return confidence.new_tensor(torch.nan)
    if wrong.numel() == 0:
        return confidence.new_tensor(0.0)
    keep = math.ceil(recall * right.numel() - 1e-9)  # 0.95 * 20 is 19 right ones, whatever rounding says
    threshold = right.sort(descending=True).values[keep - 1]
    return (wrong >= threshold).to(confidence.dtype).mean()


class ClusterAccuracy(Metric):
    """Clustering accuracy: share of samples that are right under the best one-to-one map from clusters to classes.

    The state is the table of clusters and classes, summed over ranks; the map is found on all of it.

    Args:
        num_clusters: number of clusters, at least 1.
        num_classes: number of classes; as many as clusters if None.

    Example:
        >>> metric = ClusterAccuracy(num_clusters=3)
        >>> metric.update(torch.tensor([2, 2, 0, 1]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    confusion: Tensor

    def __init__(self, num_clusters: int, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("num_clusters", num_clusters, 1)
        self.num_clusters = num_clusters
        self.num_classes = num_clusters if num_classes is None else num_classes
        check_range("num_classes", self.num_classes, 1)
        zeros = torch.zeros(self.num_clusters, self.num_classes, dtype=torch.int64)
        self.add_state("confusion", zeros, dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch.

        Args:
            preds: cluster probabilities or logits [n, num_clusters], or clusters [n].
            target: classes, [n]; negative ones are left out.

        Raises:
            ValueError: shapes differ, or a cluster or class is out of range.
        """
        if preds.dim() == 2:
            check_shape("preds", preds, "n clusters", clusters=self.num_clusters)
            preds = preds.argmax(dim=1)
        check_same_rows(preds=preds, target=target)
        target, preds = _known(target, preds)
        check_labels("preds", preds, self.num_clusters)
        check_labels("target", target, self.num_classes)
        self.confusion += _confusion(preds, target, self.num_clusters, self.num_classes)

    def compute(self) -> Tensor:
        """The accuracy, a scalar; nan without samples."""
        clusters, classes = linear_sum_assignment(self.confusion.cpu().numpy(), maximize=True)
        return self.confusion[clusters, classes].sum().float() / self.confusion.sum()


class ClusterCalibrationError(Metric):
    """Expected calibration error of cluster probabilities under the best one-to-one map from clusters to classes.

    Confidence is the largest probability. Which predictions are right is known only once the map is, so the state
    counts samples by confidence bin, cluster and class; it is summed over ranks.

    Args:
        num_clusters: number of clusters, at least 1.
        num_bins: number of equal-width bins on (0, 1].
        num_classes: number of classes; as many as clusters if None.

    Example:
        >>> metric = ClusterCalibrationError(num_clusters=2)
        >>> metric.update(torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.8, 0.2]]), torch.tensor([0, 0, 1]))
        >>> metric.compute()
        tensor(0.2000)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    counts: Tensor
    confidence: Tensor

    def __init__(self, num_clusters: int, num_bins: int = 15, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("num_clusters", num_clusters, 1)
        check_range("num_bins", num_bins, 1)
        self.num_clusters = num_clusters
        self.num_bins = num_bins
        self.num_classes = num_clusters if num_classes is None else num_classes
        check_range("num_classes", self.num_classes, 1)
        counts = torch.zeros(num_bins, self.num_clusters, self.num_classes, dtype=torch.int64)
        self.add_state("counts", counts, dist_reduce_fx="sum")
        self.add_state("confidence", torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Count a batch.

        Args:
            probs: cluster probabilities, [n, num_clusters].
            target: classes, [n]; negative ones are left out.

        Raises:
            ValueError: shapes differ, rows are not probabilities, or a class is out of range.
        """
        check_shape("probs", probs, "n clusters", clusters=self.num_clusters)
        check_same_rows(probs=probs, target=target)
        check_probabilities("probs", probs)
        target, probs = _known(target, probs)
        check_labels("target", target, self.num_classes)
        confidence, preds = _confidence(probs)
        bins = confidence_bins(confidence, self.num_bins)
        flat = (bins * self.num_clusters + preds) * self.num_classes + target
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)
        # A module in half precision takes the state with it: sum in float64 whatever became of it.
        self.confidence = self.confidence.double().index_add(0, bins, confidence.double())

    def compute(self) -> Tensor:
        """The calibration error, a scalar; nan without samples."""
        match = _match(self.counts.sum(dim=0))
        mapped = self.counts.gather(2, match.clamp_min(0)[None, :, None].expand(self.num_bins, -1, 1)).squeeze(2)
        correct = torch.where(match >= 0, mapped, 0).sum(dim=1)
        return ((correct - self.confidence).abs().sum() / self.counts.sum()).float()


class AURC(Metric):
    """Area under the risk-coverage curve, see :func:`aurc`. Keeps the samples: the curve needs their order.

    Example:
        >>> metric = AURC()
        >>> metric.update(torch.tensor([0.9, 0.8]), torch.tensor([True, True]))
        >>> metric.update(torch.tensor([0.7, 0.6]), torch.tensor([True, False]))
        >>> metric.compute()
        tensor(0.0625)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("confidence", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Keep a batch.

        Args:
            confidence: any score that ranks, [n].
            correct: whether the prediction was right, [n].

        Raises:
            ValueError: shapes differ, or a confidence is NaN.
        """
        _check_ranking(confidence, correct)
        self.confidence.append(confidence.detach())
        self.correct.append(correct.detach())

    def compute(self) -> Tensor:
        """The area, a scalar."""
        return aurc(dim_zero_cat(self.confidence), dim_zero_cat(self.correct))


class ClusterRejection(Metric):
    """Whether the confidence of cluster assignments tells right from wrong ones: AUROC, AURC and FPR95.

    Right and wrong follow from the best one-to-one map from clusters to classes on all samples. Keeps the samples.

    Args:
        num_clusters: number of clusters, at least 1.
        num_classes: number of classes; as many as clusters if None.

    Example:
        >>> metric = ClusterRejection(num_clusters=2)
        >>> probs = torch.tensor([[0.1, 0.9], [0.3, 0.7], [0.8, 0.2], [0.6, 0.4]])
        >>> metric.update(probs, torch.tensor([0, 0, 1, 0]))
        >>> metric.compute()
        {'auroc': tensor(1.), 'aurc': tensor(0.0625), 'fpr95': tensor(0.)}
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, num_clusters: int, num_classes: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("num_clusters", num_clusters, 1)
        self.num_clusters = num_clusters
        self.num_classes = num_clusters if num_classes is None else num_classes
        for name in ("confidence", "preds", "target"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, probs: Tensor, target: Tensor) -> None:
        """Keep a batch.

        Args:
            probs: cluster probabilities, [n, num_clusters].
            target: classes, [n]; negative ones are left out.

        Raises:
            ValueError: shapes differ, rows are not probabilities, or a class is out of range.
        """
        check_shape("probs", probs, "n clusters", clusters=self.num_clusters)
        check_same_rows(probs=probs, target=target)
        check_probabilities("probs", probs)
        target, probs = _known(target, probs)
        check_labels("target", target, self.num_classes)
        confidence, preds = _confidence(probs)
        self.confidence.append(confidence.detach())
        self.preds.append(preds)
        self.target.append(target)

    def assignments(self) -> tuple[Tensor, Tensor]:
        """Confidence [n] and correctness [n] of all samples so far, e.g. for a reliability diagram."""
        confidence, preds, target = map(dim_zero_cat, (self.confidence, self.preds, self.target))
        match = _match(_confusion(preds, target, self.num_clusters, self.num_classes))
        return confidence, match[preds] == target

    def compute(self) -> dict[str, Tensor]:
        """``auroc``, ``aurc`` and ``fpr95``, scalars; the AUROC is nan if all or none are right."""
        confidence, correct = self.assignments()
        both = correct.any() & ~correct.all()
        auroc = binary_auroc(confidence, correct.long()) if both else confidence.new_tensor(torch.nan)
        return {"auroc": auroc, "aurc": aurc(confidence, correct), "fpr95": fpr_at_recall(confidence, correct)}
