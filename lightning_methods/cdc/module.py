"""The LightningModules: CDC, and the fixed-threshold self-training that it is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.clustering import AdjustedRandScore, NormalizedMutualInfoScore

from ..core.batches import MultiViewBatch
from ..core.checkpoints import load_submodule
from ..core.checks import check_choice, check_range
from ..core.clustering import kmeans
from ..core.distributed import broadcast, gather, gather_slice, mean_over_ranks, rank, sum_over_ranks, world_size
from ..core.losses import at_least_float32
from ..core.manual import ManualOptimization
from ..core.modes import evaluating
from ..core.module import MethodModule
from ..core.module import feature_dim as width_of
from ..core.random import make_generator
from ..metrics.clustering import ClusterAccuracy, ClusterCalibrationError, ClusterRejection
from .functional import calibration_loss, prototype_initialization, region_targets, select_confident_samples
from .modules import ClusteringHead

__all__ = ["CDC", "CDCOutput", "FixedThresholdClustering"]


class CDCOutput(NamedTuple):
    """What both heads say.

    Attributes:
        features: of the encoder, [B, D].
        cluster_logits: of the clustering head, [B, C].
        calibrated_logits: of the calibration head, [B, C]; the method's prediction and confidence.
    """

    features: Tensor
    cluster_logits: Tensor
    calibrated_logits: Tensor


class _DeepClustering(ManualOptimization, MethodModule):
    """An encoder with clustering heads: their initialisation, checkpoints, evaluation. Training is the subclass's.

    A subclass names its heads in ``heads``: the prefix under which a head is logged, and its attribute.
    """

    heads: ClassVar[dict[str, str]] = {"clu": "cluster_head"}

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int | None,
        num_clusters: int | None,
        hidden_dim: int,
        *,
        sub_batch_size: int | None,
        head_init: Literal["prototype", "random"],
        separation_steps: int,
        kmeans_n_init: int,
        init_from: str | None,
        optimizer: OptimizerCallable,
        backbone_lr: float,
        lr_scheduler: LRSchedulerCallable | None,
        lr_interval: Literal["epoch", "step"],
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        if num_clusters is None:
            raise ValueError("num_clusters must be given: the number of clusters, at least 2.")
        check_range("num_clusters", num_clusters, 2)
        check_range("hidden_dim", hidden_dim, 2)
        check_choice("head_init", head_init, ("prototype", "random"))
        check_range("separation_steps", separation_steps, 0)
        check_range("kmeans_n_init", kmeans_n_init, 1)
        check_range("backbone_lr", backbone_lr, 0)
        if sub_batch_size is not None:
            check_range("sub_batch_size", sub_batch_size, 2)
        self.backbone = backbone
        self.feature_dim = width_of(backbone, feature_dim)
        self.num_clusters = num_clusters
        self.hidden_dim = hidden_dim
        self.sub_batch_size = sub_batch_size
        self.head_init = head_init
        self.separation_steps = separation_steps
        self.kmeans_n_init = kmeans_n_init
        self.init_from = init_from
        self.backbone_lr = backbone_lr
        for name in self.heads.values():
            setattr(self, name, ClusteringHead(self.feature_dim, num_clusters, hidden_dim))
        self.register_buffer("heads_initialized", torch.tensor(False))
        self._make_metrics(num_clusters)

    # initialisation

    def setup(self, stage: str) -> None:
        """Load the pretrained encoder, and make room for all classes of the data in the metrics.

        A resumed fit reads its own checkpoint after this.
        """
        data = getattr(self.trainer, "datamodule", None)
        classes = getattr(data, "num_classes", None)
        if isinstance(classes, int) and classes > self._num_classes:
            self._make_metrics(classes)
        if stage == "fit" and self.init_from is not None and not self.heads_initialized:
            load_submodule(self.init_from, "backbone", self.backbone)

    def on_train_start(self) -> None:
        """Initialise the heads from the training images, unless a checkpoint brought them or they start at random."""
        if self.heads_initialized:
            return
        if self.head_init == "prototype":
            self.initialize_heads(self._training_features())
        self.heads_initialized.fill_(True)

    def initialize_heads(self, features: Tensor) -> None:
        """Make every head a nearest-prototype classifier; all heads start equal.

        Args:
            features: of the training images (clean view, encoder in eval mode), [n, D]; of all processes.

        Raises:
            ValueError: fewer images than clusters or hidden units, or features that are not finite.
        """
        weights = prototype_initialization(
            features,
            self.num_clusters,
            self.hidden_dim,
            n_init=self.kmeans_n_init,
            steps=self.separation_steps,
            bn_eps=self.cluster_head.bn.eps,
            seed=self._seed(),
        )
        first, second = (broadcast(weight) for weight in weights)  # the same to the last bit on all processes
        for name in self.heads.values():
            getattr(self, name).load_prototypes(first, second)
        self.heads_initialized.fill_(True)

    @torch.no_grad()
    def _training_features(self) -> Tensor:
        """Features of all training images, clean view, encoder in eval mode; the same on every process, [n, D]."""
        data = self.trainer.datamodule
        whole = hasattr(data, "train_eval_dataloader")
        loader = data.train_eval_dataloader() if whole else self.trainer.train_dataloader
        features, rows, start = [], [], 0
        with evaluating(self.backbone), self.trainer.precision_plugin.forward_context():
            for index, batch in enumerate(loader):
                x = _clean_view(batch)
                # The un-augmented loader gives every process everything: take turns. Training loaders are shared out.
                if not whole or index % world_size() == rank():
                    x = self.trainer.precision_plugin.convert_input(x.to(self.device))
                    features.append(at_least_float32(self.backbone(x).flatten(1)))
                    rows.append(torch.arange(start, start + len(x), device=self.device))
                start += len(x)
        if not features:
            features = [torch.empty(0, self.feature_dim, device=self.device)]
            rows = [torch.empty(0, dtype=torch.int64, device=self.device)]
        everything = gather(torch.cat(features), grad=False)
        return everything[gather(torch.cat(rows), grad=False).argsort()] if whole else everything

    @staticmethod
    def _seed() -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0))

    # optimisation

    def configure_optimizers(self) -> Any:
        """The optimiser of encoder (at its own rate) and clustering head; each subclass adds those of other heads."""
        groups = [
            {"params": [p for p in self.backbone.parameters() if p.requires_grad], "lr": self.backbone_lr},
            {"params": list(self.cluster_head.parameters())},
        ]
        return self._with_schedulers([self.optimizer_factory([g for g in groups if g["params"]])])

    def _with_schedulers(self, optimizers: list[Any]) -> list[dict[str, Any]]:
        if self.lr_scheduler_factory is None:
            return [{"optimizer": optimizer} for optimizer in optimizers]
        return [
            {"optimizer": optimizer, "lr_scheduler": self.scheduler_config(self.lr_scheduler_factory(optimizer))}
            for optimizer in optimizers
        ]

    def _sub_batches(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows in order, ``sub_batch_size`` at a time; a last single row, which batch norm refuses, joins the rest."""
        rows = len(tensors[0])
        size = min(self.sub_batch_size or rows, rows)
        sizes = [size] * (rows // size)
        if rest := rows % size:
            sizes = [*sizes, rest] if rest > 1 else [*sizes[:-1], size + 1]
        return zip(*(x.split(sizes) for x in tensors), strict=True)

    def _clustering_loss(self, strong: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Cross-entropy to the pseudo labels, mean over the selected rows of all processes; 0 if there are none."""
        logits = at_least_float32(self.cluster_head(self.features(strong)))
        losses = F.cross_entropy(logits, labels, reduction="none")
        # All rows go through the network, so that its batch statistics are those of the sub-batch.
        return mean_over_ranks(torch.where(mask, losses, 0).sum(), mask.sum())

    def _selected_per_sub_batch(self, mask: Tensor) -> list[int]:
        """How many rows of each sub-batch are selected on all processes: one wait for the device in a step."""
        counts = torch.stack([part.sum() for (part,) in self._sub_batches(mask)])
        return sum_over_ranks(counts, grad=False).tolist()

    # evaluation

    def features(self, x: Tensor) -> Tensor:
        """Features of the encoder, flattened to [B, D]."""
        return self.backbone(x).flatten(1)

    def _make_metrics(self, num_classes: int) -> None:
        self._num_classes = num_classes
        size = {"num_clusters": self.num_clusters, "num_classes": num_classes}
        for stage in ("val", "test"):
            for head in self.heads:
                setattr(self, f"{stage}_{head}_acc", ClusterAccuracy(**size))
                setattr(self, f"{stage}_{head}_ece", ClusterCalibrationError(**size))
                setattr(self, f"{stage}_{head}_nmi", NormalizedMutualInfoScore())
                setattr(self, f"{stage}_{head}_ari", AdjustedRandScore())
        for head in self.heads:
            setattr(self, f"test_{head}_rejection", ClusterRejection(**size))

    def rejection_metrics(self) -> dict[str, ClusterRejection]:
        """By head, the metric that keeps confidence and correctness of the test samples."""
        return {head: getattr(self, f"test_{head}_rejection") for head in self.heads}

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, target = _clean_view(batch), _target(batch)
        features = self.features(x)
        known = target >= 0
        if not known.any():
            return
        for head, attribute in self.heads.items():
            probs = at_least_float32(getattr(self, attribute)(features)).softmax(dim=1)[known]
            clusters = probs.argmax(dim=1)
            for name, value in {"acc": clusters, "ece": probs, "nmi": clusters, "ari": clusters}.items():
                metric = getattr(self, f"{stage}_{head}_{name}")
                metric.update(value, target[known])
                shown = name == "acc" and head == list(self.heads)[-1]
                self.log(
                    f"{stage}/{head}_{name}", metric, prog_bar=shown, on_step=False, on_epoch=True, batch_size=len(x)
                )
            if stage == "test":
                self.rejection_metrics()[head].update(probs, target[known])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy, NMI, ARI and calibration error of the heads."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Accuracy, NMI, ARI, calibration error and rejection scores of the heads."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log how well confidence tells right from wrong."""
        for head, metric in self.rejection_metrics().items():
            if not metric.update_called:  # no labels
                continue
            for name, value in metric.compute().items():
                self.log(f"test/{head}_{name}", value.to(self.device))
            metric.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cluster probabilities of the last head, [B, C]."""
        head = getattr(self, list(self.heads.values())[-1])
        return at_least_float32(head(self.features(_clean_view(batch)))).softmax(dim=1)


def _clean_view(batch: Any) -> Tensor:
    for name in ("clean", "x"):
        if hasattr(batch, name):
            return getattr(batch, name)
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def _target(batch: Any) -> Tensor:
    for name in ("target", "y", "label"):
        if hasattr(batch, name):
            return getattr(batch, name)
    return batch[1]


class CDC(_DeepClustering):
    """Calibrated deep clustering: a clustering head trained on what a calibration head trusts.

    The clustering head and the encoder learn from pseudo labels of strongly augmented images. The calibration head
    learns, on detached features, the mean prediction of small regions of the feature space; its confidence says how
    many samples per cluster are safe to use as pseudo labels, so there is no threshold to tune. Both heads start as the
    same nearest-prototype classifier on the pretrained features.

    Source: "Towards Calibrated Deep Clustering Network", ICLR 2025.

    Training batches have the fields ``clean``, ``weak`` and ``strong``
    (:class:`~lightning_methods.core.MultiViewBatch`), evaluation batches are ``(x, y)``. One large batch gives pseudo
    labels and targets, then both heads take one optimiser step per sub-batch; that of the clustering head is skipped
    where no sample is selected. Optimisation is manual: the Trainer's gradient clipping and accumulation do not apply.
    Under DDP selection and regions are those of the batch of all processes; use ``sync_batchnorm`` for the batch
    statistics. A number of regions between twice the number of clusters and half the batch is a good start.

    Logs ``train/loss_clu``, ``train/loss_cal``, ``train/selected_fraction``; ``clu_`` and ``cal_`` for the two heads:
    ``val/{clu,cal}_{acc,nmi,ari,ece}``, the same under ``test/``, and ``test/{clu,cal}_{auroc,aurc,fpr95}``.

    Args:
        backbone: encoder, images -> features [B, D] (more dimensions are flattened).
        feature_dim: D; may be left out if the encoder has ``num_features``.
        num_clusters: number of clusters C, at least 2; required.
        hidden_dim: width of the hidden layer of both heads.
        num_regions: regions K that a large batch is divided into (over all processes); at most the batch size.
        samples_per_class: candidates per class for the selection, M; None for batch size / C.
        sub_batch_size: rows in an optimiser step (on each process); None for the whole batch.
        entropy_weight: weight of the term that keeps all clusters in use.
        head_init: "prototype", or "random" for PyTorch's own initialisation; both heads start equal either way.
        separation_steps: gradient steps that push the prototypes apart.
        kmeans_n_init: restarts of every k-means.
        init_from: checkpoint of a pretraining run, whose ``backbone.`` weights the encoder starts from; None takes the
            encoder as it is.
        optimizer: makes the optimiser of encoder and clustering head from two parameter groups.
        backbone_lr: learning rate of the encoder in that optimiser.
        calibration_optimizer: makes the optimiser of the calibration head.
        lr_scheduler: makes a scheduler for each of the two optimisers.
        lr_interval: whether the schedulers step every "epoch" or every "step" (large batch).

    Raises:
        ValueError: an argument is out of range, or the width of the features is not known.
    """

    heads: ClassVar[dict[str, str]] = {"clu": "cluster_head", "cal": "calibration_head"}

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int | None = None,
        num_clusters: int | None = None,
        hidden_dim: int = 512,
        *,
        num_regions: int = 500,
        samples_per_class: int | None = None,
        sub_batch_size: int | None = None,
        entropy_weight: float = 1.0,
        head_init: Literal["prototype", "random"] = "prototype",
        separation_steps: int = 2000,
        kmeans_n_init: int = 10,
        init_from: str | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-4),
        backbone_lr: float = 5e-5,
        calibration_optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(
            backbone,
            feature_dim,
            num_clusters,
            hidden_dim,
            sub_batch_size=sub_batch_size,
            head_init=head_init,
            separation_steps=separation_steps,
            kmeans_n_init=kmeans_n_init,
            init_from=init_from,
            optimizer=optimizer,
            backbone_lr=backbone_lr,
            lr_scheduler=lr_scheduler,
            lr_interval=lr_interval,
        )
        check_range("num_regions", num_regions, 1)
        check_range("entropy_weight", entropy_weight, 0)
        if samples_per_class is not None:
            check_range("samples_per_class", samples_per_class, 1)
        self.num_regions = num_regions
        self.samples_per_class = samples_per_class
        self.entropy_weight = entropy_weight
        self.calibration_optimizer_factory = calibration_optimizer
        self.calibration_head.load_state_dict(self.cluster_head.state_dict())

    def forward(self, x: Tensor) -> CDCOutput:
        """Features and the logits of both heads for images [B, ...]."""
        features = self.features(x)
        return CDCOutput(features, self.cluster_head(features), self.calibration_head(features))

    def configure_optimizers(self) -> Any:
        """Two optimisers: encoder with clustering head, and calibration head."""
        first = super().configure_optimizers()
        return first + self._with_schedulers(
            [self.calibration_optimizer_factory(list(self.calibration_head.parameters()))]
        )

    @torch.no_grad()
    def pseudo_targets(
        self, batch: MultiViewBatch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a large batch is trained on: stale in later sub-batches, constants in the losses.

        The networks stay in their mode (batch statistics in training). Under DDP selection and regions are those of the
        batch of all processes.

        Args:
            batch: has ``clean`` and ``weak``, [B, ...].
            generator: source of randomness of k-means, equal on all processes.

        Returns:
            Of this process's rows: features of the clean view [B, D], region targets [B, C], pseudo labels [B] and the
            mask of selected rows [B].

        Raises:
            ValueError: there are more regions than samples.
        """
        features = self.features(batch.clean)
        probs = at_least_float32(self.cluster_head(features)).softmax(dim=1)
        confidence = at_least_float32(self.calibration_head(self.features(batch.weak))).softmax(dim=1)
        rows, classes = probs.shape
        everything = gather(torch.cat([at_least_float32(features), probs, confidence], dim=1), grad=False)
        all_features, all_probs, all_confidence = everything.split([features.shape[1], classes, classes], dim=1)
        total = len(everything)
        if self.num_regions > total:
            raise ValueError(
                f"num_regions must be at most the batch size, got {self.num_regions} regions for a batch of {total}."
            )
        mask, labels = select_confident_samples(
            all_confidence, self.samples_per_class or max(total // self.num_clusters, 1)
        )
        normalized = F.normalize(all_features, p=1, dim=1)
        regions = kmeans(normalized, self.num_regions, n_init=self.kmeans_n_init, generator=generator)[1]
        targets = region_targets(all_probs, regions, self.num_regions)
        return features, *(gather_slice(x, rows) for x in (targets, labels, mask))

    def training_step(self, batch: MultiViewBatch, batch_idx: int) -> None:
        """Pseudo labels and targets of the large batch, then a step of both optimisers per sub-batch."""
        step = self.trainer.fit_loop.total_batch_idx
        generator = make_generator(self._seed(), "regions", step, device=batch.clean.device)
        features, targets, labels, mask = self.pseudo_targets(batch, generator)
        counts = self._selected_per_sub_batch(mask)
        both = self.optimizers()
        losses = []
        for count, (strong, f, t, y, m) in zip(
            counts, self._sub_batches(batch.strong, features, targets, labels, mask), strict=True
        ):
            loss_clu = self._clustering_loss(strong, y, m)
            logits = at_least_float32(self.calibration_head(f))
            loss_cal = calibration_loss(gather(logits), gather(t, grad=False), self.entropy_weight)
            # The losses share no parameter, so one backward serves both optimisers (and reaches everything under DDP).
            self.optimize(loss_clu + loss_cal, *(both if count else both[1:]))
            losses.append(torch.stack([loss_clu.detach() * count, loss_cal.detach()]))
        total = torch.stack(losses).sum(dim=0)
        selected = sum(counts)
        rows = {"batch_size": len(batch.clean), "on_step": False, "on_epoch": True}
        loss_clu, loss_cal = total[0] / max(selected, 1), total[1] / len(losses)
        self.log("train/loss", loss_clu + loss_cal, prog_bar=True, **rows)
        self.log("train/loss_clu", loss_clu, **rows)
        self.log("train/loss_cal", loss_cal, **rows)
        self.log("train/selected_fraction", selected / (len(mask) * world_size()), prog_bar=True, **rows)


class FixedThresholdClustering(_DeepClustering):
    """Self-training with one head and a fixed confidence threshold: the rival in the paper's ablation.

    Everything is as in :class:`CDC`, but the pseudo labels are those predictions on the weakly augmented view whose own
    confidence exceeds the threshold. There is no calibration head.

    Logs ``train/loss``, ``train/selected_fraction``, ``val/clu_{acc,nmi,ari,ece}``, the same under ``test/``, and
    ``test/clu_{auroc,aurc,fpr95}``.

    Args:
        backbone: encoder, images -> features [B, D].
        feature_dim: D; may be left out if the encoder has ``num_features``.
        num_clusters: number of clusters C, at least 2; required.
        hidden_dim: width of the hidden layer of the head.
        threshold: confidence above which a prediction is a pseudo label, in [0, 1].
        sub_batch_size: rows in an optimiser step (on each process); None for the whole batch.
        head_init: "prototype", or "random".
        separation_steps: gradient steps that push the prototypes apart.
        kmeans_n_init: restarts of k-means.
        init_from: checkpoint of a pretraining run for the encoder.
        optimizer: makes the optimiser of encoder and head from two parameter groups.
        backbone_lr: learning rate of the encoder.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range, or the width of the features is not known.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int | None = None,
        num_clusters: int | None = None,
        hidden_dim: int = 512,
        *,
        threshold: float = 0.95,
        sub_batch_size: int | None = None,
        head_init: Literal["prototype", "random"] = "prototype",
        separation_steps: int = 2000,
        kmeans_n_init: int = 10,
        init_from: str | None = None,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-4),
        backbone_lr: float = 5e-5,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(
            backbone,
            feature_dim,
            num_clusters,
            hidden_dim,
            sub_batch_size=sub_batch_size,
            head_init=head_init,
            separation_steps=separation_steps,
            kmeans_n_init=kmeans_n_init,
            init_from=init_from,
            optimizer=optimizer,
            backbone_lr=backbone_lr,
            lr_scheduler=lr_scheduler,
            lr_interval=lr_interval,
        )
        check_range("threshold", threshold, 0, 1)
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [B, C]."""
        return self.cluster_head(self.features(x))

    def training_step(self, batch: MultiViewBatch, batch_idx: int) -> None:
        """Pseudo labels of the large batch, then an optimiser step per sub-batch that has any."""
        with torch.no_grad():
            confidence, labels = at_least_float32(self(batch.weak)).softmax(dim=1).max(dim=1)
            mask = confidence > self.threshold
        counts = self._selected_per_sub_batch(mask)
        optimizer = self.optimizers()
        total = torch.zeros((), device=self.device)
        for count, (strong, y, m) in zip(counts, self._sub_batches(batch.strong, labels, mask), strict=True):
            loss = self._clustering_loss(strong, y, m)
            if count:
                self.optimize(loss, optimizer)
            total = total + loss.detach() * count
        selected = sum(counts)
        rows = {"batch_size": len(batch.weak), "on_step": False, "on_epoch": True}
        self.log("train/loss", total / max(selected, 1), prog_bar=True, **rows)
        self.log("train/selected_fraction", selected / (len(mask) * world_size()), prog_bar=True, **rows)
