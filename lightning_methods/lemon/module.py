"""Training that starts from the function of a smaller network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from ..core.checks import check_choice, check_range
from ..core.distributed import mean_over_ranks
from ..core.losses import at_least_float32
from ..core.module import MethodModule
from .expand import expand_model, max_output_difference, norm_eps, set_norm_eps
from .files import CHECKPOINT_KEY, load_source

__all__ = ["LEMON", "ExpansionModule", "LEMONMaskedLM"]


class ExpansionModule(MethodModule):
    """What trains a target that starts from a source, whatever the task; see :class:`LEMON`.

    Args:
        source: the small network.
        target: the large one.
        optimizer: makes the optimiser from the target's parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        method: how the target starts.
        source_checkpoint: file with the source's weights.
        depth_mode: where new blocks are put.
        new_block: how a new block is the identity.
        free_scale: factor of the target's random weights.
        split: how a column is divided among copies.
        new_block_init: the other layers of a new block.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    expanded: Tensor

    def __init__(
        self,
        source: nn.Module | None,
        target: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        method: Literal["lemon", "fpi", "aki", "stack", "scratch"] = "lemon",
        source_checkpoint: str | None = None,
        depth_mode: Literal["interpolate", "stack"] = "interpolate",
        new_block: Literal["cancel", "zero"] = "cancel",
        free_scale: float = 1.0,
        split: Literal["projection", "complement", "even"] = "projection",
        new_block_init: Literal["copy", "aki"] = "copy",
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_choice("method", method, ("lemon", "fpi", "aki", "stack", "scratch"))
        check_choice("depth_mode", depth_mode, ("interpolate", "stack"))
        check_choice("new_block", new_block, ("cancel", "zero"))
        check_choice("split", split, ("projection", "complement", "even"))
        check_choice("new_block_init", new_block_init, ("copy", "aki"))
        check_range("free_scale", free_scale)
        self.target = target
        self.method = method
        self.source_checkpoint = source_checkpoint
        self.options = {
            "depth_mode": depth_mode,
            "new_block": new_block,
            "free_scale": free_scale,
            "split": split,
            "new_block_init": new_block_init,
        }
        # In a tuple the source is no submodule: it is neither trained nor saved nor moved.
        self._source: tuple[nn.Module, ...] = () if source is None else (source,)
        self.max_abs_diff: float | None = None
        self.register_buffer("expanded", torch.zeros((), dtype=torch.bool))

    @property
    def source(self) -> nn.Module | None:
        """The small network until the training starts, then None."""
        return self._source[0] if self._source else None

    def setup(self, stage: str) -> None:
        """Expand at the start of the first fit, before the optimiser is built and the module is wrapped or sharded.

        A run that resumes cannot be told from a new one here: it expands, and its checkpoint then brings weights, eps
        and the mark that they are expanded.
        """
        if stage != "fit" or bool(self.expanded):
            return
        if self.method == "scratch":
            self.expanded.fill_(True)
        elif self._source:
            if self.source_checkpoint is not None:
                load_source(self._source[0], self.source_checkpoint)
            expand_model(self._source[0], self.target, self.method, **self.options)
            self._source[0].requires_grad_(False).eval()
            self.expanded.fill_(True)

    def on_fit_start(self) -> None:
        """By now a checkpoint is read: without a source the target must have been expanded before.

        Raises:
            ValueError: it has not.
        """
        if not bool(self.expanded):
            raise ValueError(f"method={self.method!r} needs a source; only 'scratch' goes without.")

    def on_train_start(self) -> None:
        """Measure on a validation batch how far the target is from the source, log it, and let the source go."""
        if not self._source:
            return
        (source,), self._source = self._source, ()
        if self.method == "scratch":
            return
        batch = self._a_validation_batch()
        if batch is None:
            return
        batch = self.trainer.strategy.batch_to_device(batch)
        weight = next(self.target.parameters())
        difference = max_output_difference(source.to(weight.device, weight.dtype), self.target, self.inputs(batch))
        source.cpu()
        self.max_abs_diff = difference
        self._log_difference()

    def _log_difference(self) -> None:
        if self.max_abs_diff is not None:
            value = torch.tensor(self.max_abs_diff, device=self.device, dtype=torch.float32)
            self.log("expand/max_abs_diff", value, reduce_fx="max", sync_dist=True, batch_size=1)

    def on_test_epoch_end(self) -> None:
        """Put the difference at the start of the fit beside the test's result."""
        self._log_difference()

    def _a_validation_batch(self) -> Any:
        """The first validation batch; one of the training set where there is no validation; None without data."""
        loaders = self.trainer.val_dataloaders
        if not loaders and self.trainer.datamodule is not None:  # there was no sanity check
            loaders = self.trainer.datamodule.val_dataloader()
        loaders = loaders or self.trainer.train_dataloader
        while isinstance(loaders, (list, tuple)) and loaders:
            loaders = loaders[0]
        return next(iter(loaders), None) if loaders else None

    @abstractmethod
    def inputs(self, batch: Any) -> Any:
        """What of a batch goes into the networks."""

    @abstractmethod
    def network_loss(self, network: nn.Module, batch: Any) -> Tensor:
        """The training loss of a network, target or source."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the ``eps`` that the expansion has changed."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[CHECKPOINT_KEY] = {f"target.{name}": eps for name, eps in norm_eps(self.target).items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Set the ``eps`` of the expanded network; the source has done its work."""
        super().on_load_checkpoint(checkpoint)
        eps = checkpoint.get(CHECKPOINT_KEY, {})
        set_norm_eps(self.target, {name.removeprefix("target."): value for name, value in eps.items()})
        if bool(checkpoint["state_dict"].get("expanded", False)):
            self._source = ()


class LEMON(ExpansionModule):
    """Classifier that starts as the exact function of a smaller one and is then trained on.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024.

    At the start of the fit the source's weights are expanded into the target, once: a resumed run goes on with the
    weights of its checkpoint, a further fit with those that the module has. The source is no part of the module: it is
    not trained, not saved, and released when training starts. Networks are those that
    :func:`~lightning_methods.lemon.expand_model` takes.

    Batches are ``(x, y)``, with y int64 [B] or class probabilities [B, num_classes].

    Logs ``expand/max_abs_diff`` (measured once, on a validation batch: about 1e-6 for "lemon" and "fpi" in float32),
    ``train/loss``, ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc``.

    Args:
        source: the small network, returns logits [B, num_classes]; None for ``method="scratch"``, or to reload a module
            that has been expanded.
        target: the large network, at its random initialisation.
        optimizer: makes the optimiser from the target's parameters.
        lr_scheduler: makes the scheduler from the optimiser, e.g. :class:`~lightning_methods.lemon.expanded_cosine`.
        method: "lemon", or a baseline, see :func:`~lightning_methods.lemon.expand_model`.
        source_checkpoint: file with the source's weights: a Lightning checkpoint of any module that holds the network,
            or a state dict. None takes the source as it is built.
        depth_mode: where new blocks are put, see :func:`~lightning_methods.lemon.depth_map`.
        new_block: how a new block is the identity: "cancel" or "zero". No choice for a ResNet.
        free_scale: factor of the target's random weights in the free part of the expansion.
        label_smoothing: of the training loss, in [0, 1); also applied to class probabilities.
        split: how a column is divided among copies, see :func:`~lightning_methods.lemon.expand_linear`.
        new_block_init: "copy", or "aki" with ``new_block="zero"``.
        augment: transform of a training batch ``(x, y)`` on the device, e.g. torchvision's ``v2.MixUp``.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range; when the fit starts: there is no source, or it does not fit the target.
    """

    def __init__(
        self,
        source: nn.Module | None,
        target: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.05),
        lr_scheduler: LRSchedulerCallable | None = None,
        method: Literal["lemon", "fpi", "aki", "stack", "scratch"] = "lemon",
        source_checkpoint: str | None = None,
        depth_mode: Literal["interpolate", "stack"] = "interpolate",
        new_block: Literal["cancel", "zero"] = "cancel",
        free_scale: float = 1.0,
        label_smoothing: float = 0.0,
        split: Literal["projection", "complement", "even"] = "projection",
        new_block_init: Literal["copy", "aki"] = "copy",
        augment: nn.Module | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(
            source, target, optimizer, lr_scheduler, method, source_checkpoint, depth_mode, new_block, free_scale,
            split, new_block_init, lr_interval,
        )  # fmt: skip
        check_range("label_smoothing", label_smoothing, 0, 1, high_open=True)
        self.label_smoothing = label_smoothing
        self.augment = augment
        # Shares of right answers need no number of classes.
        self.val_acc, self.test_acc = (MulticlassAccuracy(num_classes=None, average="micro") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the target, [B, num_classes]."""
        return self.target(x)

    def inputs(self, batch: Any) -> Any:
        """The images."""
        return batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of the batch, augmented."""
        loss = self.network_loss(self.target, batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch[0]), on_step=True, on_epoch=True)
        return loss

    def network_loss(self, network: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of a network on an augmented batch."""
        x, y = self._read(batch)
        if self.augment is not None:
            with torch.no_grad():
                x, y = self.augment(x, y)
        return F.cross_entropy(at_least_float32(network(x)), y, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "val", self.val_acc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "test", self.test_acc)

    @staticmethod
    def _read(batch: Any) -> tuple[Tensor, Tensor]:
        return (batch.x, batch.y) if hasattr(batch, "y") else (batch[0], batch[1])

    def _evaluate(self, batch: Any, stage: str, accuracy: MulticlassAccuracy) -> None:
        x, y = self._read(batch)
        logits = at_least_float32(self(x))
        labels = y.argmax(dim=1) if y.dim() == 2 else y
        accuracy(logits.argmax(dim=1), labels)
        self.log(f"{stage}/loss", F.cross_entropy(logits, y), batch_size=len(x))
        self.log(f"{stage}/acc", accuracy, prog_bar=True, batch_size=len(x))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities, [B, num_classes]."""
        return self(self.inputs(batch)).softmax(dim=-1)


class LEMONMaskedLM(ExpansionModule):
    """Masked language model that starts as the exact function of a smaller one and is then trained on.

    The sibling of :class:`LEMON` for BERT: batches are what a tokenizer gives, with ``labels`` that are -100 where
    nothing is to be predicted. The loss is the mean over the predicted tokens of all ranks.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024. The authors divide with ``split="complement"``,
    ``free_scale=0.1`` and take the rows of new blocks from the next source block (``new_block_init="aki"``).

    Logs ``expand/max_abs_diff``, ``train/loss``, ``val/loss``, ``val/perplexity``, ``test/loss``, ``test/perplexity``.

    Args:
        source: the small model; None for ``method="scratch"``, or to reload a module that has been expanded.
        target: the large one: :class:`~lightning_methods.lemon.PreLNBertForMaskedLM`, or ``BertForMaskedLM`` of
            transformers.
        optimizer: makes the optimiser from the target's parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        method: "lemon", or a baseline.
        source_checkpoint: file with the source's weights; None takes the source as it is built.
        depth_mode: where new blocks are put.
        new_block: how a new block is the identity: "zero" or "cancel".
        free_scale: factor of the target's random weights.
        split: how a column is divided among copies.
        new_block_init: "copy", or "aki" with ``new_block="zero"``.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an option is out of range; when the fit starts: there is no source, or it does not fit the target.
    """

    def __init__(
        self,
        source: nn.Module | None,
        target: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01),
        lr_scheduler: LRSchedulerCallable | None = None,
        method: Literal["lemon", "fpi", "aki", "stack", "scratch"] = "lemon",
        source_checkpoint: str | None = None,
        depth_mode: Literal["interpolate", "stack"] = "interpolate",
        new_block: Literal["cancel", "zero"] = "zero",
        free_scale: float = 1.0,
        split: Literal["projection", "complement", "even"] = "projection",
        new_block_init: Literal["copy", "aki"] = "copy",
        lr_interval: Literal["epoch", "step"] = "step",
    ) -> None:
        super().__init__(
            source, target, optimizer, lr_scheduler, method, source_checkpoint, depth_mode, new_block, free_scale,
            split, new_block_init, lr_interval,
        )  # fmt: skip
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()

    def forward(self, **batch: Tensor) -> Tensor:
        """Logits of every token, [B, T, V]."""
        return self.target(**batch).logits

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tokenizer's fields without the labels."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def _sums(self, network: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses of the predicted tokens, and their number."""
        logits, labels = network(**self.inputs(batch)).logits, batch["labels"]
        keep = labels.flatten() != -100
        # Only the predicted tokens, some 15 %, are worth a softmax over the vocabulary.
        total = F.cross_entropy(at_least_float32(logits.flatten(0, 1)[keep]), labels.flatten()[keep], reduction="sum")
        return total, keep.sum()

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Mean loss of the predicted tokens of all ranks."""
        loss = self.network_loss(self.target, batch)
        size = len(batch["input_ids"])
        self.log("train/loss", loss, prog_bar=True, batch_size=size, on_step=True, on_epoch=True)
        return loss

    def network_loss(self, network: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss of a network on the predicted tokens of all ranks."""
        return mean_over_ranks(*self._sums(network, batch))

    def _update(self, batch: Mapping[str, Tensor], metric: MeanMetric) -> None:
        total, count = self._sums(self.target, batch)
        metric.update(total / count.clamp_min(1), weight=count)

    def _log_epoch(self, stage: str, metric: MeanMetric) -> None:
        loss = metric.compute()
        metric.reset()
        self.log(f"{stage}/loss", loss, prog_bar=True)
        self.log(f"{stage}/perplexity", loss.exp())

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Collect the loss."""
        self._update(batch, self.val_loss)

    def on_validation_epoch_end(self) -> None:
        """Log loss and perplexity of all predicted tokens."""
        self._log_epoch("val", self.val_loss)

    def test_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Collect the loss."""
        self._update(batch, self.test_loss)

    def on_test_epoch_end(self) -> None:
        """Log loss and perplexity of all predicted tokens."""
        self._log_epoch("test", self.test_loss)
        super().on_test_epoch_end()

    def predict_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The most probable token at every position, [B, T]."""
        return self(**self.inputs(batch)).argmax(dim=-1)
