"""Logit adjustment for any classifier, and all adjustments of one model side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ..core.checks import check_range
from ..core.distributed import sum_over_ranks
from ..core.hooks import capture_outputs
from ..core.losses import class_log_prior
from ..core.module import Classifier
from ..metrics.group import ShotAccuracy
from .functional import adjust, check_adjustment
from .module import MLA

__all__ = ["CompareAdjustments", "LogitAdjustment"]


class LogitAdjustment(Callback):
    """Adjust what any module's ``forward`` returns, during validation, test and prediction only.

    Training is untouched, and so is the module: a forward hook is there for the length of a phase. What the module
    computes from its outputs in these phases, its validation loss too, is of adjusted logits. Steps that go around
    ``forward`` (``self.network(x)`` for ``self(x)``) are not adjusted; there is a warning.

    Source: Hasegawa and Sato (2025) for "multiplicative" and "one_vs_one", Menon et al. (2021) for "additive".

    Args:
        adjustment: "multiplicative", "additive" or "one_vs_one" (without feature norms).
        gamma: strength of "multiplicative" and "one_vs_one".
        tau: strength of "additive".
        class_counts: training samples of each class; None takes ``trainer.datamodule.class_counts``.

    Raises:
        ValueError: an unknown adjustment, a negative strength or a count that is not positive; in use: no class counts,
            another number of classes, a module that adjusts already, or a second callback of this kind. A TypeError
            where ``forward`` does not return one tensor.

    Example:
        >>> callback = LogitAdjustment(class_counts=[100, 10])
        >>> callback.adjusted(torch.tensor([[1.0, 0.9]]))
        tensor([[1.0488, 2.9850]])
    """

    def __init__(
        self,
        adjustment: Literal["multiplicative", "additive", "one_vs_one"] = "multiplicative",
        gamma: float = 0.5,
        tau: float = 1.0,
        class_counts: Sequence[int] | None = None,
    ) -> None:
        check_adjustment(adjustment, tau if adjustment == "additive" else gamma)
        check_range("gamma", gamma, 0)
        check_range("tau", tau, 0)
        if class_counts is not None:
            class_log_prior(class_counts)  # checks
        self.adjustment = adjustment
        self.gamma = gamma
        self.tau = tau
        self.class_counts = class_counts
        self._counts: Tensor | None = None if class_counts is None else torch.as_tensor(class_counts)
        self._handle: Any = None
        self._used = False

    def adjusted(self, logits: Tensor) -> Tensor:
        """Adjusted logits [B, K]."""
        if self._counts is None:
            raise ValueError("LogitAdjustment needs class_counts: give them, or a data module that has them.")
        self._counts = self._counts.to(logits.device)
        strength = self.tau if self.adjustment == "additive" else self.gamma
        return adjust(self.adjustment, logits, self._counts, strength)

    def _hook(self, module: Any, args: Any, output: Any) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 2:
            found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(f"LogitAdjustment needs a forward that returns logits [batch, classes], got {found}.")
        self._used = True
        return self.adjusted(output)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, MLA):
            raise ValueError("MLA adjusts its logits itself: leave LogitAdjustment out, or use a plain Classifier.")
        if sum(isinstance(callback, LogitAdjustment) for callback in trainer.callbacks) > 1:
            raise ValueError("there are several LogitAdjustment callbacks; one after the other they adjust too much.")
        self._end()
        if self.class_counts is None:
            counts = getattr(getattr(trainer, "datamodule", None), "class_counts", None)
            if counts is None:
                raise ValueError("LogitAdjustment needs class_counts: give them, or a data module that has them.")
            class_log_prior(counts)  # checks
            self._counts = torch.as_tensor(counts)
        self._used = False
        self._handle = pl_module.register_forward_hook(self._hook)

    def _finish(self, pl_module: LightningModule) -> None:
        self._end()
        if not self._used:
            rank_zero_warn(
                f"LogitAdjustment did nothing: {type(pl_module).__name__} does not call its forward in this phase."
            )

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the hook."""
        self._begin(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove it."""
        self._finish(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the hook."""
        self._begin(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove it."""
        self._finish(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the hook."""
        self._begin(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove it."""
        self._finish(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove it from a phase that did not end."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove it."""
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        # Without the logging methods that the Trainer attaches: they belong to the module.
        own = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**own, "_handle": None}


class CompareAdjustments(Callback):
    """Test every adjustment of an :class:`MLA` in one pass.

    For each of "none", "multiplicative", "additive" and "one_vs_one" (with feature norms) logs
    ``test/acc_<adjustment>``, the mean of the per-class accuracies, ``test/many_...``, ``medium_...`` and ``few_...``
    where there are such classes, and ``test/agreement_<adjustment>``, the share of test samples on which it predicts
    what the 1-vs-1 adjuster does. Also logs ``test/feature_norm``, the mean norm of the class means over the training
    samples, on which the boundaries of the additive adjustment depend.

    Args:
        gamma: strength of "multiplicative" and "one_vs_one".
        tau: strength of "additive".

    Raises:
        ValueError: a negative strength; in use: the module is no :class:`MLA`, or its training set is not known.
    """

    adjustments = ("none", "multiplicative", "additive", "one_vs_one")

    def __init__(self, gamma: float = 0.5, tau: float = 1.0) -> None:
        check_range("gamma", gamma, 0)
        check_range("tau", tau, 0)
        self.gamma = gamma
        self.tau = tau
        self._captured: capture_outputs | None = None
        self._metrics: dict[str, ShotAccuracy] = {}
        self._agreeing: Tensor | None = None
        self._seen = 0

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the feature norms; watch the classifier's outputs."""
        if not isinstance(pl_module, MLA):
            raise ValueError(f"CompareAdjustments is for MLA, got {type(pl_module).__name__}.")
        if not bool(pl_module.norms_known):
            pl_module.measure_feature_norms()
        if not bool(pl_module.norms_known):
            raise ValueError("CompareAdjustments needs the training set: test with a data module.")
        mine = pl_module.test_acc
        self._metrics = {
            name: ShotAccuracy(pl_module.class_counts, mine.many_threshold, mine.few_threshold).to(pl_module.device)
            for name in self.adjustments
        }
        self._agreeing = torch.zeros(len(self.adjustments), device=pl_module.device)
        self._seen = 0
        self._captured = capture_outputs(pl_module, ["classifier"]).__enter__()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: MLA,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count hits and agreement of this batch."""
        logits = self._captured.outputs["classifier"]
        target = Classifier.inputs_and_target(batch)[1]
        predictions = []
        for name in self.adjustments:
            strength = self.tau if name == "additive" else self.gamma
            scores = adjust(name, logits, pl_module.class_counts, strength, pl_module.feature_norms)
            predictions.append(scores.argmax(dim=1))
            self._metrics[name].update(predictions[-1], target)
        chosen = torch.stack(predictions)
        self._agreeing += (chosen == chosen[-1]).sum(dim=1)
        self._seen += len(target)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: MLA) -> None:
        """Log."""
        self._stop()
        seen = sum_over_ranks(torch.tensor(float(self._seen), device=pl_module.device), grad=False)
        agreement = sum_over_ranks(self._agreeing, grad=False) / seen
        for name, share in zip(self.adjustments, agreement, strict=True):
            result = self._metrics[name].compute()
            pl_module.log(f"test/acc_{name}", result["average"])
            pl_module.log(f"test/agreement_{name}", share)
            for shot in ("many", "medium", "few"):
                if not torch.isnan(result[shot]):
                    pl_module.log(f"test/{shot}_{name}", result[shot])
        counts = pl_module.class_counts.to(pl_module.feature_norms.dtype)
        pl_module.log("test/feature_norm", (counts * pl_module.feature_norms).sum() / counts.sum())

    def _stop(self) -> None:
        if self._captured is not None:
            self._captured.__exit__(None, None, None)
            self._captured = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop watching."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self._stop()
