"""Offline linear evaluation of a frozen encoder."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from ..core import module as base
from ..core.checkpoints import load_submodule
from ..core.checks import check_range

__all__ = ["LinearProbe"]


class LinearProbe(base.Classifier):
    """Linear classifier on the features of a frozen backbone: the usual offline evaluation of self-supervision.

    The backbone is in eval mode throughout, so that its BatchNorm statistics stay as they are. Logs what
    :class:`~lightning_methods.core.Classifier` logs, and ``val/acc5``, ``test/acc5`` where there are at least 5
    classes. All epochs are logged and the last one counts: picking the best epoch by test accuracy would be
    selection on the test set.

    Args:
        backbone: inputs -> features, [B, feature_dim] (more dimensions are flattened).
        num_classes: number of classes, at least 2.
        feature_dim: width of the features; None reads ``backbone.num_features``.
        optimizer: makes the optimiser from the linear layer's parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        init_from: checkpoint of a pretrained module whose part ``init_part`` is loaded into the backbone when a fit
            starts; None keeps the backbone as given.
        init_part: name of that part.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    frozen = ("backbone",)

    def __init__(
        self,
        backbone: nn.Module,
        num_classes: int,
        feature_dim: int | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=1e-6),
        lr_scheduler: LRSchedulerCallable | None = None,
        init_from: str | None = None,
        init_part: str = "backbone",
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        check_range("num_classes", num_classes, 2)
        linear = nn.Linear(base.feature_dim(backbone, feature_dim), num_classes)
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        super().__init__(linear, num_classes, optimizer, lr_scheduler, lr_interval=lr_interval)
        self.backbone = backbone
        self.init_from = init_from
        self.init_part = init_part
        for stage in ("val", "test"):
            if num_classes >= 5:
                setattr(self, f"{stage}_acc5", MulticlassAccuracy(num_classes, top_k=5, average="micro"))

    def setup(self, stage: str) -> None:
        """Load the pretrained backbone; a resumed or tested checkpoint replaces it afterwards."""
        if stage == "fit" and self.init_from is not None:
            load_submodule(self.init_from, self.init_part, self.backbone)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [B, num_classes]."""
        with torch.no_grad():
            features = self.backbone(x).flatten(1)
        return self.network(features)

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        x, y = self.inputs_and_target(batch)
        logits = self(x)
        loss = self.loss(logits, y)
        self.log(f"{stage}/loss", loss, prog_bar=stage == "train", batch_size=len(y), on_step=False, on_epoch=True)
        for name in ("acc", "acc5"):
            metric = getattr(self, f"{stage}_{name}", None)
            if metric is not None:
                metric(logits, y)
                self.log(f"{stage}/{name}", metric, batch_size=len(y), on_step=False, on_epoch=True)
        return loss
