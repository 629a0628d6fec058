"""A LightningModule that predicts from stored training rows: the store, its checkpoint and the metrics of tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric, R2Score
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.utilities import dim_zero_cat

from ..core.checks import check_finite, check_floating, check_labels, check_range, check_same_rows, check_shape
from ..core.module import MethodModule

__all__ = ["CandidateModule"]


class _MacroAUC(MulticlassAUROC):
    """One-versus-rest area under the curve, mean over the classes for which it is defined.

    torchmetrics counts a class that the evaluated rows lack as 0; here it is left out (NaN if there is no other).
    """

    def compute(self) -> Tensor:
        """Mean over the classes that some of the rows have and some have not."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="No (positive|negative) samples")
            areas = super().compute()
        counts = torch.bincount(dim_zero_cat(self.target), minlength=self.num_classes)
        return areas[(counts > 0) & (counts < counts.sum())].mean()


def _metrics(num_classes: int | None, every: bool) -> nn.ModuleDict:
    """The metrics of one evaluation; ``every`` adds what is only of interest in the test."""
    metrics: dict[str, Metric]
    if num_classes is None:
        metrics = {"rmse": MeanSquaredError(squared=False), "mae": MeanAbsoluteError()}
        if every:
            metrics["r2"] = R2Score()
    else:
        metrics = {"acc": MulticlassAccuracy(num_classes, average="micro")}
        if every:
            metrics["balanced_acc"] = MulticlassAccuracy(num_classes, average="macro")
            metrics["macro_precision"] = MulticlassPrecision(num_classes, average="macro")
            metrics["macro_f1"] = MulticlassF1Score(num_classes, average="macro")
            metrics["auc"] = _MacroAUC(num_classes, average="none")
    return nn.ModuleDict(metrics)


class CandidateModule(MethodModule):
    """Base of models whose predictions rest on stored training rows.

    The rows are buffers in the checkpoint, so a checkpoint predicts without the data module. They are taken from
    ``trainer.datamodule.candidates()`` when a fit is set up, if there is such a method, and from
    :meth:`set_candidates`; validation, test and prediction never touch them.

    Subclasses implement ``forward``: log-probabilities [B, K] that may sum to slightly more than 1, or standardised
    targets [B].

    Logs ``val/loss``, ``test/loss``, and for classification ``val/acc``, ``test/acc``, ``test/balanced_acc``,
    ``test/macro_precision``, ``test/macro_f1``, ``test/log_loss`` (of probabilities that sum to 1), ``test/auc``; for
    regression, in the target's own unit, ``val/rmse``, ``val/mae``, ``test/rmse``, ``test/mae``, ``test/r2``.

    Args:
        num_classes: number of classes; None for regression.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    def __init__(
        self,
        num_classes: int | None,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        if num_classes is not None:
            check_range("num_classes", num_classes, 2)
        self.num_classes = num_classes
        dtype = torch.get_default_dtype()
        self.register_buffer("candidate_x", torch.zeros(0, 0, dtype=dtype))
        self.register_buffer("candidate_y", torch.zeros(0, dtype=dtype if num_classes is None else torch.int64))
        self.register_buffer("target_mean", torch.zeros((), dtype=dtype))
        self.register_buffer("target_std", torch.ones((), dtype=dtype))
        # Every process has its own copy of the rows: DDP need not send them around at every step.
        self._ddp_params_and_buffers_to_ignore = ["candidate_x", "candidate_y"]
        self.val_metrics = _metrics(num_classes, every=False)
        self.test_metrics = _metrics(num_classes, every=True)

    # the store

    @property
    def resized_buffers(self) -> Iterable[str]:
        """Buffers whose size a checkpoint decides."""
        return ("candidate_x", "candidate_y")

    def set_candidates(self, x: Tensor, y: Tensor, target_mean: float = 0.0, target_std: float = 1.0) -> None:
        """Store the training rows.

        Args:
            x: prepared rows, [N, columns]; a training batch's ``index`` counts them.
            y: classes int64 [N], or standardised targets float [N].
            target_mean: mean of the targets in their own unit, so that errors are reported in it.
            target_std: standard deviation of the targets in their own unit.

        Raises:
            ValueError: no rows, shapes or dtypes do not fit, values are not finite, or a label is outside 0..K-1.
        """
        check_shape("x", x, "rows columns")
        check_floating("x", x)
        if check_same_rows(x=x, y=y) == 0:
            raise ValueError("the candidate store needs at least one row.")
        check_finite("x", x)
        if self.num_classes is None:
            check_shape("y", y, "rows")
            check_floating("y", y)
            check_finite("y", y)
        else:
            check_labels("y", y, self.num_classes)
        check_range("target_mean", target_mean)
        check_range("target_std", target_std, 0, low_open=True)
        for name, value in {"candidate_x": x, "candidate_y": y}.items():
            old = getattr(self, name)
            setattr(self, name, value.detach().to(old.device, old.dtype).clone())
        self.target_mean.fill_(target_mean)
        self.target_std.fill_(target_std)

    def require_candidates(self) -> None:
        """Raise a ``RuntimeError`` if nothing is stored."""
        if len(self.candidate_x) == 0:
            raise RuntimeError(
                f"{type(self).__name__} has no candidates to predict from: fit it with a data module that has "
                "candidates(), call set_candidates(x, y), or load a checkpoint of a fitted one."
            )

    def setup(self, stage: str) -> None:
        """Take the training rows from the data module when a fit begins."""
        candidates = getattr(getattr(self.trainer, "datamodule", None), "candidates", None)
        if stage == "fit" and candidates is not None:
            self.set_candidates(*candidates())

    def on_fit_start(self) -> None:
        """Training rows must be there by now, from the data module, the user or a checkpoint."""
        self.require_candidates()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.resized_buffers:
            stored = state_dict.get(prefix + name)
            if stored is not None and stored.shape != getattr(self, name).shape:
                setattr(self, name, getattr(self, name).new_empty(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # evaluation

    def loss(self, prediction: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of log-probabilities [B, K], or squared error of standardised targets [B].

        Args:
            prediction: what ``forward`` returns.
            y: classes [B], or standardised targets [B].

        Returns:
            A scalar, the mean over the batch.
        """
        if self.num_classes is None:
            check_shape("y", y, "batch", batch=len(prediction))
            return F.mse_loss(prediction, y.to(prediction.dtype))
        return F.nll_loss(prediction, y)

    def original_units(self, targets: Tensor) -> Tensor:
        """Standardised targets in their own unit."""
        return targets * self.target_std + self.target_mean

    def _evaluate(self, batch: Any, stage: Literal["val", "test"]) -> None:
        x, y = (batch.x, batch.y) if hasattr(batch, "y") else batch
        prediction = self(x)
        options = {"batch_size": len(y), "on_step": False, "on_epoch": True, "sync_dist": True}
        self.log(f"{stage}/loss", self.loss(prediction, y), **options)
        metrics = self.val_metrics if stage == "val" else self.test_metrics
        if self.num_classes is None:
            prediction, y = self.original_units(prediction), self.original_units(y)
        else:
            prediction = prediction.log_softmax(dim=1)  # makes the classes sum to 1
            if stage == "test":
                self.log("test/log_loss", F.nll_loss(prediction, y), **options)
        for name, metric in metrics.items():
            metric.update(prediction.exp() if name == "auc" else prediction, y)
            self.log(f"{stage}/{name}", metric, prog_bar=name in ("acc", "rmse"), **options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and metrics."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities [B, K], or targets in their own unit [B]."""
        x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch
        prediction = self(x)
        return self.original_units(prediction) if self.num_classes is None else prediction.softmax(dim=1)
