"""Two-view self-supervision: the base module and five methods on it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.batches import TwoViewBatch
from ..core.checks import check_range
from ..core.distributed import gather, mean_over_ranks
from ..core.losses import at_least_float32
from ..core.module import MethodModule
from ..core.queue import FeatureQueue
from ..core.teacher import cosine_momentum, frozen_copy, momentum_update
from ..metrics.spectrum import EffectiveRank
from ..wasserstein_uniformity.metrics import PairwiseUniformity, WassersteinUniformity
from .losses import alignment_loss, barlow_twins_loss, byol_loss, info_nce_queue_loss, nt_xent_loss, zero_cl_loss

__all__ = ["BYOL", "BarlowTwins", "MoCoV2", "SimCLR", "TwoViewSSL", "ZeroCL"]


def _images(batch: Any) -> Tensor:
    """What a backbone sees of an evaluation batch: ``view1``, ``x``, the first element, or the batch itself."""
    for name in ("view1", "x"):
        if hasattr(batch, name):
            return getattr(batch, name)
    return batch[0] if isinstance(batch, (tuple, list)) else batch


class TwoViewSSL(MethodModule):
    """Base of methods that learn from two views of each image: ``loss = ssl_loss + weight * regularizer(z1, z2)``.

    Subclasses implement :meth:`ssl_loss`. Training batches have the fields ``view1`` and ``view2``
    (:class:`~lightning_methods.core.TwoViewBatch`); evaluation batches are ``(x, y)``, images alone, or have these
    fields too.

    The weight of epoch e = 1..E is ``weight - (weight - weight_end) * e / E``, constant within an epoch.

    Logs ``train/loss``, ``train/ssl_loss``, ``train/regularizer``; on projector outputs of the evaluation set
    ``val/wasserstein_uniformity``, ``val/uniformity``, ``val/effective_rank`` and, for two-view batches,
    ``val/alignment``; the same under ``test/``.

    Args:
        backbone: images -> features, [B, D] (more dimensions are flattened).
        projector: features -> embeddings, [B, m].
        regularizer: called with the un-normalised embeddings of both views, e.g. ``WassersteinUniformityLoss()``.
        regularizer_weight: its weight at the start of training.
        regularizer_weight_end: its weight in the last epoch; None keeps it constant.
        gather_distributed: take losses over the batches of all processes; False is the per-process form.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        regularizer: nn.Module | None = None,
        regularizer_weight: float = 1.0,
        regularizer_weight_end: float | None = None,
        gather_distributed: bool = True,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("regularizer_weight", regularizer_weight)
        if regularizer_weight_end is not None:
            check_range("regularizer_weight_end", regularizer_weight_end)
        self.backbone = backbone
        self.projector = projector
        self.regularizer = regularizer
        self.regularizer_weight = regularizer_weight
        self.regularizer_weight_end = regularizer_weight_end
        self.gather_distributed = gather_distributed
        for stage in ("val", "test"):
            setattr(self, f"{stage}_wasserstein_uniformity", WassersteinUniformity())
            setattr(self, f"{stage}_uniformity", PairwiseUniformity())
            setattr(self, f"{stage}_effective_rank", EffectiveRank())

    def forward(self, x: Tensor) -> Tensor:
        """Backbone features, flattened to [B, D]."""
        return self.backbone(x).flatten(1)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Backbone features [B, D] and projector outputs [B, m]."""
        h = self(x)
        return h, self.projector(h)

    @abstractmethod
    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The method's loss on one batch.

        Args:
            batch: has ``view1`` and ``view2``, [B, ...].

        Returns:
            The loss (over the global batch, see :meth:`gather` and :meth:`global_mean`), and this process's projector
            outputs of both views with gradient, [B, m] each.
        """

    def gather(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of all processes, with gradient, of tensors of one shape [B, m]."""
        if not self.gather_distributed:
            return tensors
        return tuple(gather(torch.stack(tensors, dim=1)).unbind(dim=1))  # one collective for all

    def global_mean(self, loss: Tensor, rows: int) -> Tensor:
        """The mean over all processes of a loss that is itself a mean over ``rows`` local rows."""
        if not self.gather_distributed:
            return loss
        return mean_over_ranks(loss * rows, torch.tensor(rows, device=loss.device))

    def current_regularizer_weight(self) -> float:
        """The regulariser's weight in the current epoch."""
        if self.regularizer_weight_end is None:
            return self.regularizer_weight
        progress = min((self.current_epoch + 1) / self._num_epochs(), 1.0)
        return self.regularizer_weight - (self.regularizer_weight - self.regularizer_weight_end) * progress

    def _num_epochs(self) -> int:
        if self.trainer.max_epochs not in (None, -1):
            return self.trainer.max_epochs
        epochs = self.trainer.estimated_stepping_batches / max(self.trainer.num_training_batches, 1)
        if math.isinf(epochs):
            raise ValueError(
                "regularizer_weight_end needs a training length: set the Trainer's max_epochs or max_steps."
            )
        return max(math.ceil(epochs * self.trainer.accumulate_grad_batches), 1)

    def training_step(self, batch: TwoViewBatch, batch_idx: int) -> Tensor:
        """The method's loss plus the weighted regulariser."""
        loss, z1, z2 = self.ssl_loss(batch)
        rows = len(batch.view1)
        self.log("train/ssl_loss", loss.detach(), batch_size=rows, on_step=False, on_epoch=True)
        if self.regularizer is not None:
            penalty = self.regularizer(*self.gather(z1, z2))
            self.log("train/regularizer", penalty.detach(), batch_size=rows, on_step=False, on_epoch=True)
            loss = loss + self.current_regularizer_weight() * penalty
        self.log("train/loss", loss, prog_bar=True, batch_size=rows, on_step=False, on_epoch=True)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        if hasattr(batch, "view1"):
            (_, z), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
            alignment = alignment_loss(z, z2)
            self.log(f"{stage}/alignment", alignment, batch_size=len(z), on_epoch=True, sync_dist=True)
        else:
            z = self.embed(_images(batch))[1]
        for name in ("wasserstein_uniformity", "uniformity", "effective_rank"):
            metric = getattr(self, f"{stage}_{name}")
            metric.update(at_least_float32(z))
            self.log(f"{stage}/{name}", metric, batch_size=len(z), on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Uniformity of the embeddings, and alignment where there are two views."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Uniformity of the embeddings, and alignment where there are two views."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Backbone features, [B, D], of ``view1``, ``x`` or the first element."""
        return self(_images(batch))


class SimCLR(TwoViewSSL):
    """SimCLR: each embedding finds its partner among all embeddings of the batch.

    Source: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.

    Args:
        backbone: images -> features, [B, D].
        projector: features -> embeddings, [B, m].
        temperature: of the cosines, positive.
        **kwargs: arguments of :class:`TwoViewSSL`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        temperature: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, projector, **kwargs)
        check_range("temperature", temperature, 0, low_open=True)
        self.temperature = temperature

    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """NT-Xent over the global batch."""
        (_, z1), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
        return nt_xent_loss(*self.gather(z1, z2), self.temperature), z1, z2


class BarlowTwins(TwoViewSSL):
    """Barlow Twins: the cross-correlation of the two views is drawn to the identity.

    Source: Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021.

    Args:
        backbone: images -> features, [B, D].
        projector: features -> embeddings, [B, m].
        lambd: weight of the off-diagonal terms, non-negative.
        **kwargs: arguments of :class:`TwoViewSSL`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        lambd: float = 0.08,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, projector, **kwargs)
        check_range("lambd", lambd, 0)
        self.lambd = lambd

    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Redundancy reduction over the global batch."""
        (_, z1), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
        return barlow_twins_loss(*self.gather(z1, z2), self.lambd), z1, z2


class ZeroCL(TwoViewSSL):
    """Zero-CL: the views agree after whitening over features and over instances; no negatives, no momentum copy.

    Source: Zhang et al., ICLR 2022; reconstructed, see :func:`~lightning_methods.ssl.zero_cl_loss`.

    Args:
        backbone: images -> features, [B, D].
        projector: features -> embeddings, [B, m].
        eps: added to the diagonals of the covariances, positive.
        **kwargs: arguments of :class:`TwoViewSSL`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        eps: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, projector, **kwargs)
        check_range("eps", eps, 0, low_open=True)
        self.eps = eps

    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Alignment of the whitened views over the global batch."""
        (_, z1), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
        return zero_cl_loss(*self.gather(z1, z2), self.eps), z1, z2


class _MomentumSSL(TwoViewSSL):
    """What MoCo and BYOL share: ``target_encoder``, a momentum copy of backbone and projector.

    The copy takes no gradient, runs in train mode with BatchNorm statistics of its own, and follows the online
    parameters after every optimiser step. The momentum goes on a half-cosine from ``momentum`` to ``momentum_end``
    over the run.
    """

    def _add_target(self, momentum: float, momentum_end: float | None) -> None:
        check_range("momentum", momentum, 0, 1)
        if momentum_end is not None:
            check_range("momentum_end", momentum_end, 0, 1)
        self.momentum = momentum
        self.momentum_end = momentum_end
        self.target_encoder = frozen_copy(nn.Sequential(self.backbone, nn.Flatten(), self.projector))
        self._steps_followed = 0

    @torch.no_grad()
    def target_embed(self, x: Tensor) -> Tensor:
        """The momentum copy's projector outputs, [B, m], without gradient."""
        return self.target_encoder(x)

    def current_momentum(self) -> float:
        """The momentum after the optimiser steps so far."""
        if self.momentum_end is None:
            return self.momentum
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total):
            raise ValueError("momentum_end needs a training length: set the Trainer's max_epochs or max_steps.")
        return cosine_momentum(self.global_step, int(total), self.momentum, self.momentum_end)

    def on_train_start(self) -> None:
        """Count optimiser steps from here (a resumed run starts above 0)."""
        self._steps_followed = self.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the copy after an optimiser step; batches that only accumulate gradients leave it."""
        if self.global_step == self._steps_followed:
            return
        self._steps_followed = self.global_step
        online = [*self.backbone.parameters(), *self.projector.parameters()]
        momentum_update(online, self.target_encoder.parameters(), self.current_momentum())


class MoCoV2(_MomentumSSL):
    """MoCo v2, symmetric: queries against the momentum copy's keys and a queue of earlier keys.

    The queue's rows are the negatives as they were before this batch's keys are added; it always holds the keys of all
    processes. The loss is the sum over both directions.

    Source: Chen et al., "Improved Baselines with Momentum Contrastive Learning", 2020.

    Args:
        backbone: images -> features, [B, D].
        projector: features -> embeddings, [B, out_dim].
        queue_size: number of negatives, a multiple of twice the global batch size.
        out_dim: width of the projector's output.
        temperature: of the cosines, positive.
        momentum: of the copy at the start, in [0, 1].
        momentum_end: of the copy at the end of training; None keeps it constant.
        **kwargs: arguments of :class:`TwoViewSSL`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        *,
        queue_size: int = 4096,
        out_dim: int = 256,
        temperature: float = 0.2,
        momentum: float = 0.99,
        momentum_end: float | None = 0.999,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, projector, **kwargs)
        check_range("temperature", temperature, 0, low_open=True)
        self.temperature = temperature
        self.queue = FeatureQueue(queue_size, keys=out_dim)
        self._add_target(momentum, momentum_end)

    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """InfoNCE in both directions; the keys then enter the queue."""
        (_, z1), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
        q1, q2 = (F.normalize(at_least_float32(z), dim=1) for z in (z1, z2))
        k1, k2 = (F.normalize(at_least_float32(self.target_embed(x)), dim=1) for x in (batch.view1, batch.view2))
        negatives = self.queue.snapshot("keys")
        loss = info_nce_queue_loss(q1, k2, negatives, self.temperature) + info_nce_queue_loss(
            q2, k1, negatives, self.temperature
        )
        if self.training:
            pair = gather(torch.stack([k1, k2], dim=1), grad=False)
            self.queue.enqueue(keys=torch.cat(pair.unbind(dim=1)))
        return self.global_mean(loss, len(z1)), z1, z2


class BYOL(_MomentumSSL):
    """BYOL: a predictor on the online branch matches the momentum copy's embedding of the other view.

    A regulariser sees the projector's outputs, before the predictor.

    Source: Grill et al., "Bootstrap your own latent", NeurIPS 2020.

    Args:
        backbone: images -> features, [B, D].
        projector: features -> embeddings, [B, m].
        predictor: embeddings -> predictions, [B, m] -> [B, m].
        momentum: of the copy at the start, in [0, 1].
        momentum_end: of the copy at the end of training; None keeps it constant.
        **kwargs: arguments of :class:`TwoViewSSL`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projector: nn.Module,
        predictor: nn.Module,
        *,
        momentum: float = 0.99,
        momentum_end: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone, projector, **kwargs)
        self.predictor = predictor
        self._add_target(momentum, momentum_end)

    def ssl_loss(self, batch: TwoViewBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Cosine distances between predictions and the copy's embeddings of the other view."""
        (_, z1), (_, z2) = self.embed(batch.view1), self.embed(batch.view2)
        p1, p2 = self.predictor(z1), self.predictor(z2)
        loss = byol_loss(p1, p2, self.target_embed(batch.view1), self.target_embed(batch.view2))
        return self.global_mean(loss, len(z1)), z1, z2
