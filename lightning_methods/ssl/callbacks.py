"""How good are the features? Evaluation beside the training of any encoder: online linear probe and nearest
neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from ..core.checks import check_range
from ..core.distributed import gather, rank, sum_over_ranks, world_size
from ..core.hooks import submodule
from ..core.modes import evaluating
from .neighbors import knn_predict

__all__ = ["KNNEvaluation", "OnlineLinearProbe"]


def _images_and_labels(batch: Any) -> tuple[Tensor, Tensor]:
    """What an encoder sees and the labels, by field name where the batch has names."""
    names = (("view1", "label"), ("x", "y"), ("x", "target"))
    for image, label in names:
        if hasattr(batch, image) and hasattr(batch, label):
            return getattr(batch, image), getattr(batch, label)
    return batch[0], batch[1]


class _FeatureCallback(Callback):
    """Keeps the first output of one submodule in every batch: the features of view 1, at no extra cost."""

    def __init__(self, num_classes: int, layer: str) -> None:
        check_range("num_classes", num_classes, 2)
        self.num_classes = num_classes
        self.layer = layer
        self._first: Tensor | None = None
        self._handle: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the hook."""
        self._remove()
        self._handle = submodule(pl_module, self.layer).register_forward_hook(self._keep_first)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the hook."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hook."""
        self._remove()

    def _keep_first(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._first is None and isinstance(output, Tensor):
            self._first = output.detach()

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._first = None

    def _take(self, pl_module: LightningModule, batch: Any) -> tuple[Tensor, Tensor]:
        """Features [n, D] and labels [n] of the labelled samples of the batch that has just been used."""
        images, labels = _images_and_labels(batch)
        features, self._first = self._first, None
        if features is None or len(features) != len(labels):  # the module does not call the layer on view 1 alone
            features = self._embed(pl_module, images)
        known = labels >= 0
        return features.flatten(1)[known].float(), labels[known]

    def _embed(self, pl_module: LightningModule, images: Tensor) -> Tensor:
        """The layer's output for these images; in eval mode, so that a training run does not notice."""
        self._first = None
        with evaluating(pl_module):
            output = pl_module(images)
        features, self._first = self._first, None
        return output if features is None else features

    def _new_metrics(self, device: torch.device) -> dict[str, MulticlassAccuracy]:
        top = {"": 1, "5": 5} if self.num_classes >= 5 else {"": 1}
        return {
            suffix: MulticlassAccuracy(self.num_classes, top_k=k, average="micro").to(device)
            for suffix, k in top.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_first": None}

    # the four hooks of evaluation, named once

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget what was kept."""
        self._first = None

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Forget what was kept."""
        self._first = None

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Forget what was kept."""
        self._first = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._start(trainer, pl_module)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Take the batch's features."""
        self._collect(trainer, pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        """Take the batch's features."""
        self._collect(trainer, pl_module, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the accuracies."""
        self._finish(trainer, pl_module, "test")

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise NotImplementedError

    def _collect(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        raise NotImplementedError

    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        raise NotImplementedError


class OnlineLinearProbe(_FeatureCallback):
    """A linear classifier that learns beside the encoder, on its detached features of view 1.

    It has its own optimiser and sends no gradient into the encoder; its weights start from a generator of their own, so
    that the encoder's run is the same with and without it. Weights and optimiser state travel in the checkpoint. Logs
    ``train/probe_loss``, ``val/probe_acc`` and, with at least 5 classes, ``val/probe_acc5``; the same under ``test/``.

    Args:
        feature_dim: width of the features.
        num_classes: number of classes; samples with a label below 0 are left out.
        lr: learning rate of SGD.
        momentum: its momentum.
        weight_decay: its weight decay.
        layer: name of the submodule whose output are the features.
    """

    def __init__(
        self,
        feature_dim: int,
        num_classes: int,
        lr: float = 0.3,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        layer: str = "backbone",
    ) -> None:
        super().__init__(num_classes, layer)
        check_range("feature_dim", feature_dim, 1)
        self.probe = torch.nn.utils.skip_init(nn.Linear, feature_dim, num_classes)
        nn.init.normal_(self.probe.weight, std=0.01, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(self.probe.bias)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
        self._metrics: dict[str, MulticlassAccuracy] = {}

    def _to(self, device: torch.device) -> None:
        if self.probe.weight.device != device:
            self.probe.to(device)
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts the momentum to the device

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One step of the probe on the batch's features."""
        features, labels = self._take(pl_module, batch)
        self._to(features.device)
        loss = F.cross_entropy(self.probe(features), labels, reduction="sum")
        # Over the global batch: all processes keep the same weights.
        count = sum_over_ranks(torch.tensor(float(len(labels)), device=features.device)).clamp_min(1)
        loss = loss / count
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.probe.parameters():
            parameter.grad = sum_over_ranks(parameter.grad, grad=False)
        self.optimizer.step()
        loss = sum_over_ranks(loss.detach())
        pl_module.log("train/probe_loss", loss, on_step=False, on_epoch=True, batch_size=max(len(labels), 1))

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._to(pl_module.device)
        self._metrics = self._new_metrics(pl_module.device)

    def _collect(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        features, labels = self._take(pl_module, batch)
        with torch.no_grad():
            logits = self.probe(features)
        for metric in self._metrics.values():
            metric.update(logits, labels)

    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for suffix, metric in self._metrics.items():
            pl_module.log(f"{stage}/probe_acc{suffix}", metric.compute(), prog_bar=not suffix)
        self._metrics = {}

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimiser state."""
        return {"probe": self.probe.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Weights and optimiser state."""
        self.probe.load_state_dict(state_dict["probe"])
        self.optimizer.load_state_dict(state_dict["optimizer"])


class KNNEvaluation(_FeatureCallback):
    """Accuracy of the weighted nearest-neighbour vote, with the un-augmented training set as the bank.

    The bank is read from the data module's ``memory_dataloader()`` (or ``train_eval_dataloader()``); the processes
    share the work. Logs ``val/knn_acc`` and, with at least 5 classes, ``val/knn_acc5``; the same under ``test/``.

    Args:
        num_classes: number of classes; samples with a label below 0 are left out.
        k: number of neighbours, cut to the size of the bank.
        temperature: of the vote, positive; see :func:`knn_predict`.
        every_n_epochs: training epochs between evaluations; the last epoch is always evaluated.
        layer: name of the submodule whose output are the features; the module's ``forward`` has to run it.
    """

    def __init__(
        self,
        num_classes: int,
        k: int = 200,
        temperature: float = 1.0,
        every_n_epochs: int = 1,
        layer: str = "backbone",
    ) -> None:
        super().__init__(num_classes, layer)
        check_range("k", k, 1)
        check_range("temperature", temperature, 0, low_open=True)
        check_range("every_n_epochs", every_n_epochs, 1)
        self.k = k
        self.temperature = temperature
        self.every_n_epochs = every_n_epochs
        self._active = False
        self._features: list[Tensor] = []
        self._labels: list[Tensor] = []

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        last = epoch == trainer.max_epochs or trainer.global_step == trainer.max_steps
        due = epoch % self.every_n_epochs == 0 or last
        self._active = not trainer.sanity_checking and (due or trainer.state.fn != "fit")
        self._features, self._labels = [], []

    def _collect(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if self._active:
            features, labels = self._take(pl_module, batch)
            self._features.append(features)
            self._labels.append(labels)

    @torch.no_grad()
    def _finish(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._active or not self._features:
            return
        features, labels = torch.cat(self._features), torch.cat(self._labels)
        self._features, self._labels = [], []
        bank, bank_labels = self._bank(trainer, pl_module, features)
        scores = knn_predict(features, bank, bank_labels, self.num_classes, self.k, self.temperature)[1]
        for suffix, metric in self._new_metrics(pl_module.device).items():
            metric.update(scores, labels)
            pl_module.log(f"{stage}/knn_acc{suffix}", metric.compute(), prog_bar=not suffix)

    def _bank(self, trainer: Trainer, pl_module: LightningModule, like: Tensor) -> tuple[Tensor, Tensor]:
        parts = [(like[:0], torch.zeros(0, dtype=torch.int64, device=like.device))]
        for index, batch in enumerate(self._memory(trainer)):
            if index % world_size() != rank():
                continue
            batch = trainer.precision_plugin.convert_input(batch)
            images, labels = _images_and_labels(trainer.strategy.batch_to_device(batch, pl_module.device))
            with trainer.precision_plugin.forward_context():
                features = self._embed(pl_module, images).flatten(1).float()
            known = labels >= 0
            parts.append((features[known], labels[known]))
        features, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        return gather(features, grad=False), gather(labels, grad=False)

    @staticmethod
    def _memory(trainer: Trainer) -> Iterator[Any]:
        datamodule = trainer.datamodule
        for name in ("memory_dataloader", "train_eval_dataloader"):
            if hasattr(datamodule, name):
                if trainer.state.fn != "fit":
                    datamodule.setup("fit")  # testing alone has not split the training set
                return iter(getattr(datamodule, name)())
        raise ValueError(
            "KNNEvaluation needs a data module with memory_dataloader(): the training set without augmentation, as "
            f"(x, y); got {type(datamodule).__name__}."
        )
