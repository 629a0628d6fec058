"""Variable selection, representation learning and robust classification with the differentiable coefficient."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from ..core.batches import GroupBatch
from ..core.checks import check_choice, check_range, check_shape
from ..core.distributed import gather
from ..core.module import MethodModule
from ..core.module import feature_dim as width_of
from ..metrics.group import WorstGroupAccuracy
from .functional import group_dro_update
from .metrics import DependenceCoefficient
from .modules import DifFOCIPenalty, ElementwiseScale

__all__ = ["DifFOCIClassifier", "DifFOCIRepresentation", "DifFOCISelector", "GroupBatch"]


def _inputs(batch: Any) -> Tensor:
    """``x`` of a batch of any kind."""
    return batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch


def _target(batch: Any) -> Tensor:
    return batch.y if hasattr(batch, "y") else batch[1]


class _DependenceModule(MethodModule):
    """Maximises T_{n,beta}(y, f(x)), or T_{n,beta}(y, f(x) | group)."""

    def __init__(
        self,
        beta: float,
        mode: Literal["dependence", "conditional"],
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None,
        ties: Literal["max", "ordinal"],
        num_neighbors: int | None,
        distance_scale: Literal["none", "mean"],
        num_classes: int | None,
        gather_distributed: bool,
        lr_interval: Literal["epoch", "step"],
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("mode", mode, ("dependence", "conditional"))
        self.mode = mode
        self.objective = DifFOCIPenalty(
            beta, -1.0, ties, num_neighbors, distance_scale, gather_distributed, num_groups=num_classes
        )
        for stage in ("val", "test"):
            metric = DependenceCoefficient(beta, ties, num_neighbors, distance_scale, num_classes)
            setattr(self, f"{stage}_coefficient", metric)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The features that are compared with the target, [B, d]."""

    def condition(self, batch: Any) -> Tensor | None:
        """The variables that are given: ``group`` of the batch as floats, or None in mode "dependence".

        Raises:
            ValueError: mode "conditional" and a batch without ``group``.
        """
        if self.mode == "dependence":
            return None
        if not hasattr(batch, "group"):
            raise ValueError(
                f"mode='conditional' needs batches with a field `group` (a GroupBatch), got {type(batch).__name__}."
            )
        return batch.group.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """-T of the batch; 0 if it has a single sample."""
        features = self(_inputs(batch))
        loss = self.objective(features, _target(batch), self.condition(batch))
        self.log("train/loss", loss, prog_bar=True, batch_size=len(features), on_step=True, on_epoch=True)
        self.log("train/coefficient", -loss.detach(), batch_size=len(features), on_step=False, on_epoch=True)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        features, metric = self(_inputs(batch)), getattr(self, f"{stage}_coefficient")
        metric.update(features, _target(batch), self.condition(batch))
        self.log(f"{stage}/coefficient", metric, prog_bar=True, batch_size=len(features), on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Collect the features: the coefficient is one of the whole set, not a mean over batches."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Collect the features."""
        self._evaluate(batch, "test")

    @torch.no_grad()
    def transform(self, x: Tensor) -> Tensor:
        """The features that a downstream model gets, [B, k]."""
        return self(x)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """What :meth:`transform` gives, [B, k]."""
        return self.transform(_inputs(batch))


class DifFOCISelector(_DependenceModule):
    """Variable selection: one factor per variable, driven to zero where the variable adds no dependence.

    Minimises ``-T_{n,beta}(y, theta * x)`` with L2 weight decay, which is what takes unused factors to zero; the
    selected variables are those with ``|theta_j| > threshold``. Unlike greedy selection it sees variables that matter
    only together. With ``mode="conditional"`` it minimises ``-T(y, theta * x | group)``: variables that only repeat
    what the sensitive ``group`` says gain nothing and go. Inputs should be standardised.

    Source: Lehman Pavasovic et al. (2025), difFOCI for selection (dF1) and for fairness (dF3).

    Batches are ``(x, y)``, or a :class:`~lightning_methods.core.GroupBatch` in mode "conditional"; x is [B, p], y [B].
    Logs ``train/loss``, ``train/coefficient``, ``train/num_selected``, and over the whole set ``val/coefficient`` and
    ``test/coefficient``, with ``test/num_selected``.

    Args:
        num_features: number of variables p.
        beta: temperature of the neighbours.
        mode: "dependence" of y on x, or "conditional" on ``group``.
        threshold: factors of larger magnitude select their variable.
        init_std: factors start from N(1, init_std^2).
        optimizer: makes the optimiser from parameters; Adam with coupled weight decay is part of the method.
        lr_scheduler: makes the scheduler from the optimiser.
        ties: ranks of equal targets, "max" or "ordinal".
        num_neighbors: softmax over the k nearest only.
        distance_scale: "mean" divides distances by their mean.
        num_classes: for class targets; more than 2 are compared one-hot. None: the target is ordered.
        gather_distributed: take the coefficient over the batch of all ranks.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> selector = DifFOCISelector(num_features=10)
        >>> selector(torch.randn(4, 10)).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        num_features: int,
        beta: float = 0.2,
        mode: Literal["dependence", "conditional"] = "dependence",
        threshold: float = 0.1,
        init_std: float = 0.1,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        num_classes: int | None = None,
        gather_distributed: bool = True,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(
            beta,
            mode,
            optimizer,
            lr_scheduler,
            ties,
            num_neighbors,
            distance_scale,
            num_classes,
            gather_distributed,
            lr_interval,
        )
        check_range("threshold", threshold, 0)
        self.threshold = threshold
        self.scaling = ElementwiseScale(num_features, std=init_std)

    @property
    def scale(self) -> Tensor:
        """theta, [p]."""
        return self.scaling.scale

    def forward(self, x: Tensor) -> Tensor:
        """theta * x, [B, p]."""
        check_shape("x", x, "batch features", features=self.scaling.num_features)
        return self.scaling(x)

    def selected_features(self) -> Tensor:
        """The selected variables in ascending order, int64 [k]."""
        return (self.scale.detach().abs() > self.threshold).nonzero().flatten()

    @torch.no_grad()
    def transform(self, x: Tensor) -> Tensor:
        """The selected columns of theta * x, [B, k]."""
        return self(x)[:, self.selected_features()]

    def _num_selected(self) -> Tensor:
        return (self.scale.detach().abs() > self.threshold).sum().float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """-T of the batch, and how many variables are selected."""
        self.log("train/num_selected", self._num_selected(), batch_size=1, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        """Log how many variables the tested weights select."""
        self.log("test/num_selected", self._num_selected())


class DifFOCIRepresentation(_DependenceModule):
    """Supervised features without an output head: a network that maximises ``T_{n,beta}(y, f(x))``.

    The coefficient of the training batch can be driven to 1 by overfitting: keep the weights with the best
    ``val/coefficient`` (a ``ModelCheckpoint`` that monitors it, mode "max"). Any downstream model is then fitted on
    f(x).

    Source: Lehman Pavasovic et al. (2025), difFOCI with a trainable model (dF1), and for fairness (dF3) with
    ``mode="conditional"``. The authors train with lr 0.1 and weight decay 0.1 on the full batch.

    Batches are ``(x, y)``, or a :class:`~lightning_methods.core.GroupBatch` in mode "conditional". Logs ``train/loss``,
    ``train/coefficient``, and over the whole set ``val/coefficient`` and ``test/coefficient``. ``predict`` gives
    features.

    Args:
        network: maps x to features [B, d] (more dimensions are flattened).
        beta: temperature of the neighbours.
        mode: "dependence" of y on f(x), or "conditional" on ``group``.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        ties: ranks of equal targets, "max" or "ordinal".
        num_neighbors: softmax over the k nearest only.
        distance_scale: "mean" divides distances by their mean.
        num_classes: for class targets; more than 2 are compared one-hot. None: the target is ordered.
        gather_distributed: take the coefficient over the batch of all ranks.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        network: nn.Module,
        beta: float = 0.2,
        mode: Literal["dependence", "conditional"] = "dependence",
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        num_classes: int | None = None,
        gather_distributed: bool = True,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(
            beta,
            mode,
            optimizer,
            lr_scheduler,
            ties,
            num_neighbors,
            distance_scale,
            num_classes,
            gather_distributed,
            lr_interval,
        )
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """f(x), [B, d]."""
        return self.network(x).flatten(1)


class DifFOCIClassifier(MethodModule):
    """Classifier whose features are kept from telling a spurious or sensitive attribute.

    Minimises ``task loss + penalty_weight * T_{n,beta}(group, features)`` on every batch, with the features before the
    linear head. The task loss is the mean cross-entropy ("erm") or that of group DRO over the groups (class,
    attribute), whose weights ``q`` are part of the checkpoint.

    Source: Lehman Pavasovic et al. (2025), difFOCI as a regulariser (dF2); Sagawa et al. (2020) for group DRO.

    Batches are :class:`~lightning_methods.core.GroupBatch`, or any with the fields x, y and group: group int64 [B] in
    0..num_groups-1, or sensitive columns float [B, s] (then there are no group metrics and no group DRO). Without
    penalty and group DRO, ``(x, y)`` will do. Logs ``train/loss``, ``train/task_loss``, ``train/penalty`` (unweighted),
    ``train/acc``, and on validation and test ``acc``, ``worst_group_acc`` and ``group_{k}_acc`` with
    k = num_groups * y + group (groups without samples are left out).

    Args:
        backbone: maps x to features [B, feature_dim] (more dimensions are flattened).
        feature_dim: width of the features; None reads ``backbone.num_features``.
        num_classes: number of classes.
        num_groups: number of values of the attribute; more than 2 are compared one-hot.
        penalty_weight: factor of the penalty; 0 switches it off.
        beta: temperature of the neighbours.
        objective: "erm" or "group_dro".
        group_dro_eta: step size of the group weights.
        ties: ranks of equal attributes, "max" or "ordinal".
        num_neighbors: softmax over the k nearest only.
        distance_scale: "mean" divides distances by their mean; use it with wide features and a beta of about 0.1.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        gather_distributed: take the penalty and the group losses over the batch of all ranks.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Attributes:
        backbone: the feature network.
        head: the linear layer on the features.
        q: weights of the groups, [num_classes * num_groups]; only with "group_dro".

    Raises:
        ValueError: an option is out of range, or the width of the features is not known.

    Example:
        >>> from lightning_methods.nn import MLP
        >>> model = DifFOCIClassifier(MLP(4, [8]), num_classes=2)
        >>> model(torch.zeros(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int | None = None,
        num_classes: int = 2,
        num_groups: int = 2,
        penalty_weight: float = 0.1,
        beta: float = 0.2,
        objective: Literal["erm", "group_dro"] = "erm",
        group_dro_eta: float = 0.1,
        ties: Literal["max", "ordinal"] = "max",
        num_neighbors: int | None = None,
        distance_scale: Literal["none", "mean"] = "none",
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        gather_distributed: bool = True,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("objective", objective, ("erm", "group_dro"))
        check_range("num_classes", num_classes, 2)
        check_range("num_groups", num_groups, 1)
        check_range("penalty_weight", penalty_weight)
        check_range("group_dro_eta", group_dro_eta, 0)
        self.backbone = backbone
        self.head = nn.Linear(width_of(backbone, feature_dim), num_classes)
        self.coefficient = DifFOCIPenalty(
            beta, 1.0, ties, num_neighbors, distance_scale, gather_distributed, num_groups=num_groups
        )
        self.penalty_weight = penalty_weight
        self.objective = objective
        self.group_dro_eta = group_dro_eta
        self.num_classes = num_classes
        self.num_groups = num_groups
        self.gather_distributed = gather_distributed
        if objective == "group_dro":
            self.register_buffer("q", torch.ones(num_classes * num_groups))
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        for stage in ("val", "test"):
            setattr(self, f"{stage}_acc", MulticlassAccuracy(num_classes, average="micro"))
            setattr(self, f"{stage}_worst_group_acc", WorstGroupAccuracy(num_classes, num_groups))

    # the pieces

    def features(self, x: Tensor) -> Tensor:
        """What the head reads and the penalty sees, [B, feature_dim]."""
        return self.backbone(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [B, num_classes]."""
        return self.head(self.features(x))

    def penalty(self, features: Tensor, group: Tensor) -> Tensor:
        """T_{n,beta}(group, features), unweighted; 0 for one sample or one group.

        Args:
            features: [B, feature_dim].
            group: int64 [B], or float [B, s].
        """
        return self.coefficient(features, group)

    def task_loss(self, logits: Tensor, y: Tensor, group: Tensor | None) -> Tensor:
        """Mean cross-entropy, or the loss of group DRO, which moves the group weights.

        Args:
            logits: [B, num_classes].
            y: classes, [B].
            group: attribute, int64 [B].

        Raises:
            ValueError: group DRO without an integer attribute.
        """
        if self.objective == "erm":
            return F.cross_entropy(logits, y)
        if group is None or group.dim() != 1 or group.is_floating_point():
            raise ValueError("objective='group_dro' needs a group index per sample: batches with `group` int64 [B].")
        losses, index = F.cross_entropy(logits, y, reduction="none"), self.num_groups * y + group
        if self.gather_distributed:
            losses, index = gather(losses), gather(index, grad=False)
        loss, q = group_dro_update(self.q, losses, index, self.group_dro_eta)
        self.q.copy_(q)
        return loss

    # training and evaluation

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Task loss and penalty of the batch."""
        x, y, group = _inputs(batch), _target(batch), getattr(batch, "group", None)
        features = self.features(x)
        logits = self.head(features)
        loss = task_loss = self.task_loss(logits, y, group)
        log = {"batch_size": len(y), "on_step": False, "on_epoch": True}
        if self.penalty_weight:
            if group is None:
                raise ValueError(
                    f"the penalty needs batches with a field `group` (a GroupBatch), got {type(batch).__name__}. "
                    "Set penalty_weight=0 to train without it."
                )
            penalty = self.penalty(features, group)
            loss = task_loss + self.penalty_weight * penalty
            self.log("train/penalty", penalty.detach(), **log)
        self.train_acc(logits, y)
        self.log("train/loss", loss, **{**log, "on_step": True, "prog_bar": True})
        self.log("train/task_loss", task_loss.detach(), **log)
        self.log("train/acc", self.train_acc, **log)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        y, group = _target(batch), getattr(batch, "group", None)
        logits = self(_inputs(batch))
        log = {"batch_size": len(y), "on_step": False, "on_epoch": True, "prog_bar": True}
        accuracy = getattr(self, f"{stage}_acc")
        accuracy.update(logits, y)
        self.log(f"{stage}/acc", accuracy, **log)
        if group is not None and group.dim() == 1 and not group.is_floating_point():
            worst = getattr(self, f"{stage}_worst_group_acc")
            worst.update(logits, y, group)
            self.log(f"{stage}/worst_group_acc", worst, **log)

    def _log_groups(self, stage: str) -> None:
        metric = getattr(self, f"{stage}_worst_group_acc")
        if not metric.update_called:
            return
        with metric.sync_context():
            per_group = metric.per_group()
        self.log_dict({f"{stage}/group_{k}_acc": v for k, v in enumerate(per_group) if not v.isnan()})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log accuracy, on all samples and by group."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Log the accuracy of every group."""
        self._log_groups("val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log accuracy, on all samples and by group."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log the accuracy of every group."""
        self._log_groups("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities, [B, num_classes]."""
        return self(_inputs(batch)).softmax(dim=-1)
