"""Pretraining and fine-tuning of the Population Transformer as LightningModules."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, MetricCollection, R2Score
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

from ..core.checkpoints import load_submodule
from ..core.checks import check_choice, check_range
from ..core.losses import at_least_float32
from ..core.module import MethodModule
from ..core.optim import build_optimizer, parameter_groups
from .functional import popt_pretraining_loss
from .modules import PopulationTransformer

__all__ = ["DecodingModule", "PopTFinetuning", "PopTPretraining", "load_pretrained"]


def load_pretrained(model: PopulationTransformer, path: str) -> None:
    """Load the weights of a pretraining run, or a file of the authors' weights.

    Args:
        model: gets the weights, in place.
        path: a Lightning checkpoint of :class:`PopTPretraining` or :class:`PopTFinetuning`, or a file with a state dict
            in the authors' names (also under the key ``model``); loaded with ``weights_only=True``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the weights do not fit; the message names them.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}.")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, dict) and ("state_dict" in content or any(key.startswith("model.") for key in content)):
        load_submodule(path, "model", model)
        return
    state = content.get("model", content) if isinstance(content, dict) else {}
    model.load_reference_state_dict({key: value for key, value in state.items() if isinstance(value, Tensor)})


class PopTPretraining(MethodModule):
    """Trains a Population Transformer to see whether two ensembles are consecutive and which channels were replaced.

    Both are binary questions: the first is answered from [CLS], the second from every channel; see
    :func:`popt_pretraining_loss`. Batches are :class:`~lightning_methods.core.PopTBatch` with a ``replace_label``.

    Logs ``train/loss``, ``train/ensemble_loss``, ``train/channel_loss``, the same under ``val/`` and ``test/``, and
    ``ensemble_auroc`` and ``channel_auroc`` under ``val/`` and ``test/``. Prediction returns the [CLS] codes, [B, D].

    Args:
        model: the transformer.
        ensemble_weight: weight of the first question, at least 0.
        channel_weight: weight of the second, at least 0.
        global_token_mean: with several processes average over the samples and channels of all of them.
        optimizer: makes the optimiser from parameters. The paper has LAMB (``timm.optim.Lamb``) with 5e-4.
        lr_scheduler: makes the scheduler from the optimiser, e.g. :class:`RampUp`.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: a negative weight, or both 0.
    """

    def __init__(
        self,
        model: PopulationTransformer,
        ensemble_weight: float = 1.0,
        channel_weight: float = 1.0,
        global_token_mean: bool = True,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("ensemble_weight", ensemble_weight, 0)
        check_range("channel_weight", channel_weight, 0)
        if ensemble_weight == channel_weight == 0:
            raise ValueError("ensemble_weight and channel_weight are both 0: there is nothing to learn.")
        self.model = model
        self.ensemble_weight = ensemble_weight
        self.channel_weight = channel_weight
        self.global_token_mean = global_token_mean
        for stage in ("val", "test"):
            setattr(self, f"{stage}_ensemble_auroc", BinaryAUROC())
            setattr(self, f"{stage}_channel_auroc", BinaryAUROC(ignore_index=-1))

    def forward(self, x: Tensor, coords: Tensor, seq_id: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """[CLS] codes of populations, [B, D]; arguments as in :meth:`PopulationTransformer.forward`."""
        return self.model(x, coords, seq_id, pad_mask).hidden[:, 0]

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        if getattr(batch, "replace_label", None) is None:
            raise ValueError(
                "PopTPretraining needs batches with a replace_label (which channels were replaced); these are decoding "
                "batches. Use the data module in its mode 'pretrain'."
            )
        output = self.model(batch.x, batch.coords, batch.seq_id, batch.pad_mask)
        losses = popt_pretraining_loss(
            output.cls_logit,
            output.token_logit,
            batch.label,
            batch.replace_label,
            self.ensemble_weight,
            self.channel_weight,
            self.global_token_mean and stage == "train",
        )
        options = {"batch_size": len(batch.label), "on_step": False, "on_epoch": True}
        for name, value in zip(("loss", "ensemble_loss", "channel_loss"), losses, strict=True):
            self.log(f"{stage}/{name}", value, prog_bar=name == "loss", **options)
        if stage == "train":
            return losses[0]
        # Sigmoids in double precision: in float32 those of large logits tie at 1.
        ensemble, channel = getattr(self, f"{stage}_ensemble_auroc"), getattr(self, f"{stage}_channel_auroc")
        ensemble.update(output.cls_logit.flatten().double().sigmoid(), batch.label.long())
        target = torch.where(batch.replace_label == 0, -1, (batch.replace_label == 1).long())
        channel.update(output.token_logit.flatten().double().sigmoid(), target.flatten())
        self.log(f"{stage}/ensemble_auroc", ensemble, prog_bar=True, **options)
        self.log(f"{stage}/channel_auroc", channel, prog_bar=True, **options)
        return losses[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Weighted sum of the two losses."""
        return self._evaluate(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log losses and AUROC of both questions."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log losses and AUROC of both questions."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """[CLS] codes, [B, D]."""
        return self(batch.x, batch.coords, batch.seq_id, batch.pad_mask)


class DecodingModule(MethodModule):
    """Base of what decodes a label from a population: loss and metrics. Subclasses implement ``decode``.

    Logs ``train/loss``, ``val/loss``, ``test/loss`` and, under ``val/`` and ``test/``, ``auroc`` and ``f1`` for a
    binary label, ``mse`` and ``r2`` for a number.

    Args:
        task: "binary" (labels 0 and 1; cross-entropy) or "regression" (squared error).
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    def __init__(
        self,
        task: Literal["binary", "regression"],
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("task", task, ("binary", "regression"))
        self.task = task
        for stage in ("val", "test"):
            if task == "binary":
                metrics = {"auroc": BinaryAUROC(), "f1": BinaryF1Score()}
            else:
                metrics = {"mse": MeanSquaredError(), "r2": R2Score()}
            setattr(self, f"{stage}_metrics", MetricCollection(metrics, prefix=f"{stage}/", compute_groups=False))

    @abstractmethod
    def decode(self, batch: Any) -> Tensor:
        """Logits or values of a batch, [B]."""

    def loss(self, output: Tensor, label: Tensor) -> Tensor:
        """Binary cross-entropy of logits, or squared error of values, mean over the batch."""
        output = at_least_float32(output)
        label = label.to(output.dtype)
        if self.task == "binary":
            return F.binary_cross_entropy_with_logits(output, label)
        return F.mse_loss(output, label)

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        output = self.decode(batch)
        loss = self.loss(output, batch.label)
        options = {"batch_size": len(batch.label), "on_step": False, "on_epoch": True}
        self.log(f"{stage}/loss", loss, prog_bar=stage == "train", **options)
        if stage != "train":
            metrics = getattr(self, f"{stage}_metrics")
            if self.task == "binary":
                metrics.update(output.double().sigmoid(), batch.label.long())
            else:
                metrics.update(at_least_float32(output), batch.label.to(at_least_float32(output).dtype))
            self.log_dict(metrics, prog_bar=True, **options)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of the batch."""
        return self._evaluate(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and metrics."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probabilities of label 1, or values, [B]."""
        output = at_least_float32(self.decode(batch))
        return output.sigmoid() if self.task == "binary" else output


class PopTFinetuning(DecodingModule):
    """Decodes a label from the [CLS] code of a (pretrained) Population Transformer by one new linear layer.

    The transformer is trained along with a smaller learning rate, or frozen. Populations of any size may share a batch.
    The two pretraining heads of the transformer take no part and no gradient.

    Args:
        model: the transformer.
        task: "binary" (labels 0 and 1; cross-entropy) or "regression" (squared error).
        upstream_lr_scale: learning rate of the transformer as a share of that of the new layer.
        freeze_upstream: leave the transformer as it is, in eval mode: its code is a frozen feature.
        checkpoint: checkpoint of a pretraining run, or the authors' weights, that the transformer starts from; read
            when a fit begins. None takes the transformer as it is.
        optimizer: makes the optimiser from parameter groups; its learning rate is that of the new layer.
        lr_scheduler: makes the scheduler from the optimiser, e.g. :class:`RampUp`.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range.

    Logs what :class:`DecodingModule` says.
    """

    def __init__(
        self,
        model: PopulationTransformer,
        task: Literal["binary", "regression"] = "binary",
        upstream_lr_scale: float = 0.1,
        freeze_upstream: bool = False,
        checkpoint: str | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(task, optimizer, lr_scheduler, lr_interval)
        check_range("upstream_lr_scale", upstream_lr_scale, 0)
        self.frozen = ("model",) if freeze_upstream else ()
        self.model = model
        self.head = nn.Linear(model.num_features, 1)
        self.upstream_lr_scale = upstream_lr_scale
        self.freeze_upstream = freeze_upstream
        self.checkpoint = checkpoint
        model.cls_head.requires_grad_(False)
        model.token_cls_head.requires_grad_(False)

    def setup(self, stage: str) -> None:
        """Load the pretrained transformer when a fit begins; a resumed one reads its own checkpoint after this."""
        if stage == "fit" and self.checkpoint is not None:
            load_pretrained(self.model, self.checkpoint)

    def configure_optimizers(self) -> Any:
        """One optimiser with two learning rates."""
        scale = {} if self.freeze_upstream else {"model": self.upstream_lr_scale}
        optimizer = build_optimizer(self.optimizer_factory, parameter_groups(self, no_decay=None, lr_scale=scale))
        if self.lr_scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_config(self.lr_scheduler_factory(optimizer))}

    def features(self, x: Tensor, coords: Tensor, seq_id: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """[CLS] codes of populations, [B, D]; without gradient if the transformer is frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_upstream):
            return self.model(x, coords, seq_id, pad_mask).hidden[:, 0]

    def forward(self, x: Tensor, coords: Tensor, seq_id: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """Logits or values, [B]; arguments as in :meth:`PopulationTransformer.forward`."""
        return self.head(self.features(x, coords, seq_id, pad_mask)).squeeze(1)

    def decode(self, batch: Any) -> Tensor:
        """Logits or values of a batch, [B]."""
        return self(batch.x, batch.coords, batch.seq_id, batch.pad_mask)
