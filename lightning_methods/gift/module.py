"""The student that GIFT trains, with its frozen teacher."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from ..core.checks import check_choice, check_labels, check_range, check_shape
from ..core.module import MethodModule
from .functional import LossName, check_refinement, soft_label_loss

__all__ = ["GIFT"]


class GIFT(MethodModule):
    """Student of a distilled data set, trained by the cosine loss against refined soft labels.

    Source: Shang et al., "GIFT: Unlocking Full Potential of Labels in Distilled Dataset at Near-zero Cost", ICLR 2025.

    Every training step augments the batch once, asks the frozen teacher for its logits on the augmented images, and
    fits the student to them by ``loss``. Without a teacher the soft labels come from the batch; without those, the hard
    labels stand in.

    Batches are ``(x, y)``, with y int64 [B] (hard labels) or float [B, C] (stored soft labels, whose largest entry is
    the hard label), or a :class:`~lightning_methods.core.SoftLabelBatch`.

    Logs ``train/loss``, ``train/acc``, ``val/loss`` (cross-entropy), ``val/acc``, ``test/acc``, and with more than five
    classes ``val/acc5`` and ``test/acc5``. The authors report the best of four evaluations, at every quarter of the
    training; a ``ModelCheckpoint`` on ``val/acc`` does the like.

    Args:
        backbone: the student, returns logits [B, num_classes].
        teacher: trained network that returns logits [B, num_classes]; it is frozen, stays in eval mode, and gets no
            optimiser.
        loss: the loss, see :func:`~lightning_methods.gift.soft_label_loss`.
        weight: share of the hard label in the refined label; in [0, 1] for "convex", non-negative for "additive".
        smoothing: of the hard label, in [0, 1).
        mode: "convex" is the paper's mixture, "additive" that of the authors' code.
        temperature: of the loss "kl".
        hard_weight: of cross-entropy in the losses "mse_ce" and "softce_ce".
        augment: augmentation of the training batch on the device, seen by student and teacher alike.
        num_classes: C, at least 2.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        save_teacher: keep the teacher's weights in checkpoints. Without them a reload takes the teacher as it is built.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range.

    Example:
        >>> from lightning_methods.gift import DiffAugment
        >>> from lightning_methods.nn import ConvNet
        >>> model = GIFT(backbone=ConvNet(), teacher=ConvNet(), augment=DiffAugment(), num_classes=10)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    frozen = ("teacher",)

    def __init__(
        self,
        backbone: nn.Module,
        teacher: nn.Module | None = None,
        loss: LossName = "gift",
        weight: float = 0.1,
        smoothing: float = 0.1,
        mode: Literal["convex", "additive"] = "convex",
        temperature: float = 20.0,
        hard_weight: float = 0.1,
        augment: nn.Module | None = None,
        num_classes: int = 10,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        save_teacher: bool = False,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("loss", loss, get_args(LossName))
        check_refinement(weight, smoothing, mode)
        check_range("temperature", temperature, 0, low_open=True)
        check_range("hard_weight", hard_weight, 0)
        check_range("num_classes", num_classes, 2)
        self.backbone = backbone
        self.teacher = teacher
        self.augment = augment
        self.loss = loss
        self.options = {
            "weight": weight,
            "smoothing": smoothing,
            "mode": mode,
            "temperature": temperature,
            "hard_weight": hard_weight,
        }
        self.num_classes = num_classes
        self.checkpoint_excludes = () if save_teacher else ("teacher.",)
        self._looked_at_a_batch = False
        self._warned = False
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        accuracies = {"acc": self.train_acc.clone()}
        if num_classes > 5:
            accuracies["acc5"] = MulticlassAccuracy(num_classes, average="micro", top_k=5)
        # Compute groups would share the counts of both if the first batch happened to give the same.
        self.val_metrics = MetricCollection(accuracies, prefix="val/", compute_groups=False)
        self.test_metrics = self.val_metrics.clone(prefix="test/")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the student, [B, num_classes]."""
        return self.backbone(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Augment once, ask the teacher, fit the student."""
        x, stored, target = self.read_batch(batch)
        with torch.no_grad():
            if self.augment is not None:
                x = self.augment(x)
            soft_labels = self.soft_labels(x, stored, target)
        logits = self(x)
        check_shape("the backbone's output", logits, "batch classes", classes=self.num_classes)
        loss = soft_label_loss(self.loss, logits, soft_labels, target, **self.options)
        self.train_acc(logits, target)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(target), on_step=True, on_epoch=True)
        self.log("train/acc", self.train_acc, batch_size=len(target), on_step=False, on_epoch=True)
        return loss

    def read_batch(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Images, stored soft labels (None without) and hard labels of a batch.

        Raises:
            ValueError: the labels have another shape or dtype, or are out of range.
        """
        if hasattr(batch, "soft_labels"):
            x, stored, target = batch.x, batch.soft_labels, batch.target
        else:
            x, y = batch[0], batch[1]
            stored, target = (y, y.argmax(dim=1)) if y.dim() == 2 and y.is_floating_point() else (None, y)
        if stored is not None:
            check_shape("the batch's soft labels", stored, "batch classes", classes=self.num_classes)
        if not self._looked_at_a_batch:  # later batches on an accelerator are not waited for
            check_labels("the batch's labels", target, self.num_classes, validate=True)
            self._looked_at_a_batch = True
        return x, stored, target

    def soft_labels(self, x: Tensor, stored: Tensor | None, target: Tensor) -> Tensor:
        """What the student is fitted to, [B, num_classes]: the teacher's logits, else the stored labels, else one-hot.

        Args:
            x: the images that the student sees.
            stored: soft labels of the batch.
            target: hard labels, [B].
        """
        if self.teacher is not None and self.loss != "ce":  # "ce" does not look at them: spare the forward
            return self.teacher(x)
        if stored is not None:
            return stored
        if self.loss != "ce":
            self._warn_once()
        return F.one_hot(target.long(), self.num_classes).float()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"GIFT has neither a teacher nor soft labels in the batch: loss={self.loss!r} sees one-hot labels. "
                "Give a teacher, or a data set with soft labels."
            )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log accuracy and cross-entropy of the hard labels."""
        logits, target = self._evaluate(batch, self.val_metrics)
        self.log("val/loss", F.cross_entropy(logits.float(), target), batch_size=len(target), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log accuracy."""
        self._evaluate(batch, self.test_metrics)

    def _evaluate(self, batch: Any, metrics: MetricCollection) -> tuple[Tensor, Tensor]:
        x, _, target = self.read_batch(batch)
        logits = self(x)
        metrics.update(logits, target)
        self.log_dict(metrics, prog_bar=True, batch_size=len(target))
        return logits, target

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities, [B, num_classes]; uncalibrated: the cosine loss leaves the scale of the logits free."""
        x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(x).softmax(dim=-1)
