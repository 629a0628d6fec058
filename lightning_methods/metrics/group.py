"""Accuracy by group: subpopulations, or combinations of class and attribute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric

from ..core.checks import check_range, check_same_rows, check_shape

__all__ = ["GroupAccuracy", "ShotAccuracy", "WorstGroupAccuracy", "group_accuracy", "shot_accuracy"]


def _hard(preds: Tensor) -> Tensor:
    return preds.argmax(dim=1) if preds.dim() == 2 else preds


def _counts(preds: Tensor, target: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Right predictions and samples of every group, float64 [num_groups]; group < 0 is left out."""
    check_range("num_groups", num_groups, 1)
    check_same_rows(preds=preds, target=target, group=group)
    check_shape("group", group, "n")
    if group.device.type == "cpu" and group.numel() and int(group.max()) >= num_groups:
        raise ValueError(f"group must be below num_groups={num_groups}, got {int(group.max())}.")
    known = group >= 0
    index = torch.where(known, group, 0).long()
    hit = (_hard(preds) == target) & known
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=group.device)
    return zeros.index_add(0, index, hit.to(zeros.dtype)), zeros.index_add(0, index, known.to(zeros.dtype))


def _summary(
    correct: Tensor, total: Tensor, group_counts: Tensor | None, many_threshold: int, few_threshold: int
) -> dict[str, Tensor]:
    """Accuracies from the sums; a group without samples is nan and left out of the rest."""
    per_group = torch.where(total > 0, correct / total, torch.nan).float()
    present = total > 0

    def mean(mask: Tensor) -> Tensor:
        mask = mask & present
        return torch.where(mask, per_group, 0).sum() / mask.sum()  # 0 / 0 is nan: nobody there

    worst = torch.where(present, per_group, torch.inf).min()
    result = {
        "per_group": per_group,
        "worst": torch.where(present.any(), worst, torch.nan),
        "average": mean(present),
    }
    if group_counts is not None:
        counts = group_counts.to(total.device)
        result["many"] = mean(counts > many_threshold)
        result["medium"] = mean((counts >= few_threshold) & (counts <= many_threshold))
        result["few"] = mean(counts < few_threshold)
    return result


def group_accuracy(
    preds: Float[Tensor, "n classes"] | Int[Tensor, " n"],
    target: Int[Tensor, " n"],
    group: Int[Tensor, " n"],
    num_groups: int,
    group_counts: Tensor | None = None,
    many_threshold: int = 100,
    few_threshold: int = 20,
) -> dict[str, Tensor]:
    """Accuracy of every group, of the worst group, and their mean.

    Args:
        preds: logits or probabilities [n, classes], or predicted classes [n].
        target: classes, [n].
        group: group index, [n]; negative where unknown (left out).
        num_groups: number of groups G.
        group_counts: training samples of each group, [G]; gives "many", "medium" and "few".
        many_threshold: groups with more samples are "many".
        few_threshold: groups with fewer samples are "few".

    Returns:
        ``per_group`` [G] (nan for absent groups), and the scalars ``worst`` and ``average`` over the groups that are
        present (every group counts once), and with ``group_counts`` the means ``many``, ``medium``, ``few``.

    Raises:
        ValueError: numbers of rows differ or a group is not below ``num_groups``.

    Example:
        >>> preds, target = torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1])
        >>> result = group_accuracy(preds, target, torch.tensor([0, 0, 1, 1]), num_groups=3)
        >>> result["per_group"], result["worst"]
        (tensor([1.0000, 0.5000,    nan]), tensor(0.5000))
    """
    correct, total = _counts(preds, target, group, num_groups)
    return _summary(correct, total, group_counts, many_threshold, few_threshold)


class GroupAccuracy(Metric):
    """Accuracy by group over an epoch; see :func:`group_accuracy`. Two states that are summed over ranks.

    Args:
        num_groups: number of groups G.
        group_counts: training samples of each group, [G]; adds "many", "medium" and "few".
        many_threshold: groups with more training samples are "many".
        few_threshold: groups with fewer are "few".

    Example:
        >>> metric = GroupAccuracy(num_groups=2)
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 1, -1]))
        >>> metric.compute()["worst"]
        tensor(0.)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    correct: Tensor
    total: Tensor

    def __init__(
        self,
        num_groups: int,
        group_counts: Sequence[int] | Tensor | None = None,
        many_threshold: int = 100,
        few_threshold: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("num_groups", num_groups, 1)
        self.num_groups = num_groups
        self.group_counts = None if group_counts is None else torch.as_tensor(group_counts)
        if self.group_counts is not None:
            check_shape("group_counts", self.group_counts, "groups", groups=num_groups)
        self.many_threshold = many_threshold
        self.few_threshold = few_threshold
        self.add_state("correct", torch.zeros(num_groups, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros(num_groups, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor, group: Tensor) -> None:
        """Add a batch: logits [n, classes] or classes [n], targets [n], groups [n]."""
        correct, total = _counts(preds, target, group, self.num_groups)
        self.correct += correct
        self.total += total

    def compute(self) -> dict[str, Tensor]:
        """The dictionary of :func:`group_accuracy`."""
        return _summary(self.correct, self.total, self.group_counts, self.many_threshold, self.few_threshold)


class WorstGroupAccuracy(GroupAccuracy):
    """Lowest accuracy among the groups (class, attribute), numbered ``class * num_groups + attribute``.

    Empty groups are left out. :meth:`per_group` has all of them.

    Args:
        num_classes: number of classes C.
        num_groups: number of values A of the attribute.

    Example:
        >>> metric = WorstGroupAccuracy(num_classes=2, num_groups=2)
        >>> metric.update(torch.tensor([1, 0, 1, 1]), torch.tensor([1, 0, 0, 1]), torch.tensor([0, 0, 0, 1]))
        >>> metric.compute()
        tensor(0.5000)
        >>> metric.per_group()
        tensor([0.5000,    nan, 1.0000, 1.0000])
    """

    def __init__(self, num_classes: int, num_groups: int, **kwargs: Any) -> None:
        check_range("num_classes", num_classes, 1)
        check_range("num_groups", num_groups, 1)
        super().__init__(num_classes * num_groups, **kwargs)
        self.num_classes = num_classes
        self.num_attributes = num_groups

    def update(self, preds: Tensor, target: Tensor, attribute: Tensor) -> None:
        """Add a batch: logits [n, classes] or classes [n], targets [n], attribute values [n] (negative: left out)."""
        group = torch.where(attribute >= 0, target * self.num_attributes + attribute, -1)
        super().update(preds, target, group)

    def compute(self) -> Tensor:
        """Accuracy of the worst group, a scalar."""
        return super().compute()["worst"]

    def per_group(self) -> Tensor:
        """Accuracy of every group so far on this process, [C * A]; nan where empty."""
        return super().compute()["per_group"]


def _shots(summary: dict[str, Tensor]) -> dict[str, Tensor]:
    """The groups are classes."""
    return {name: summary[name] for name in ("many", "medium", "few", "average")} | {"per_class": summary["per_group"]}


def shot_accuracy(
    preds: Float[Tensor, "n classes"] | Int[Tensor, " n"],
    target: Int[Tensor, " n"],
    class_counts: Sequence[int] | Tensor,
    many_threshold: int = 100,
    few_threshold: int = 20,
) -> dict[str, Tensor]:
    """Accuracy of the classes with many, medium and few training samples: means over classes, not over samples.

    Source: Liu et al., "Large-Scale Long-Tailed Recognition in an Open World", CVPR 2019. Both bounds are strict: a
    class with exactly ``many_threshold`` or ``few_threshold`` training samples is "medium".

    Args:
        preds: logits or probabilities [n, classes], or predicted classes [n].
        target: classes, [n]; negative ones are left out.
        class_counts: training samples of each class, [K].
        many_threshold: classes with more training samples are "many"; 100 for CIFAR-100, ImageNet-LT, iNaturalist.
        few_threshold: classes with fewer are "few"; 20 for those sets.

    Returns:
        The means ``many``, ``medium``, ``few`` and ``average`` over the classes that occur in ``target`` (nan where
        there is none), and ``per_class`` [K] (nan for classes that do not occur).

    Raises:
        ValueError: numbers of rows differ or a target is not below K.

    Example:
        >>> result = shot_accuracy(torch.tensor([0, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), [500, 5])
        >>> result["many"], result["few"], result["average"], result["medium"]
        (tensor(1.), tensor(0.5000), tensor(0.7500), tensor(nan))
    """
    counts = torch.as_tensor(class_counts)
    check_shape("class_counts", counts, "classes")
    return _shots(group_accuracy(preds, target, target, len(counts), counts, many_threshold, few_threshold))


class ShotAccuracy(GroupAccuracy):
    """Accuracy of classes with many, medium and few training samples over an epoch; see :func:`shot_accuracy`.

    Args:
        class_counts: training samples of each class, [K].
        many_threshold: classes with more training samples are "many".
        few_threshold: classes with fewer are "few".

    Example:
        >>> metric = ShotAccuracy([500, 5])
        >>> metric.update(torch.tensor([0, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()["average"]
        tensor(0.7500)
    """

    def __init__(
        self,
        class_counts: Sequence[int] | Tensor,
        many_threshold: int = 100,
        few_threshold: int = 20,
        **kwargs: Any,
    ) -> None:
        counts = torch.as_tensor(class_counts)
        check_shape("class_counts", counts, "classes")
        super().__init__(len(counts), counts, many_threshold, few_threshold, **kwargs)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch: logits [n, classes] or classes [n], and targets [n]."""
        super().update(preds, target, target)

    def compute(self) -> dict[str, Tensor]:
        """The dictionary of :func:`shot_accuracy`."""
        return _shots(super().compute())
