"""ModernNCA as a LightningModule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn

from ..core.checks import check_choice, check_range, check_same_rows, check_shape, values_visible
from ..core.distributed import rank
from ..core.modes import evaluating
from .functional import (
    neighbor_weights,
    rows_outside,
    sample_candidates,
    soft_nearest_neighbor_log_probs,
    soft_nearest_neighbor_regression,
)
from .store import CandidateModule

__all__ = ["ModernNCA"]


class ModernNCA(CandidateModule):
    """Predicts a row of a table from training rows near to it in a learned embedding (ModernNCA; with a linear encoder
    and ``sample_rate=1.0`` it is L-NCA).

    A training batch needs the fields ``x``, ``y`` and ``index`` (:class:`~lightning_methods.core.IndexedBatch`): the
    rows of the batch are each other's candidates, never their own, and are kept out of the rows that are sampled from
    the store besides (stochastic neighbourhood sampling, anew at every step). Validation, test and prediction use all
    stored rows; their embeddings are computed once per epoch. See :class:`CandidateModule` for the store, the
    checkpoint and what is logged; training logs ``train/loss``.

    With several processes each holds the whole store and samples its own candidates; the rows of a batch are candidates
    for those of the same process only, the rows in the other processes' batches are part of the pool.

    Args:
        encoder: embeds rows, [B, columns] -> [B, dim], e.g. :class:`TabularEncoder`.
        num_classes: number of classes; None for regression.
        temperature: divides the distances, > 0.
        sample_rate: share of the remaining training rows that a step samples, in (0, 1]. On large tables 0.01 to 0.1
            loses little.
        distance: "euclidean", or "cosine" (needs a temperature in 1e-5 .. 1).
        joint_forward: send batch and sampled rows through the encoder together. By default, as in the authors' code,
            they go separately, and BatchNorm normalises each with its own statistics.
        inference_chunk_size: stored rows at a time in evaluation; None takes all at once. The result is the same.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from lightning_methods.modern_nca import ModernNCA, TabularEncoder
        >>> model = ModernNCA(TabularEncoder(d_num=2, dim=8), num_classes=2).eval()
        >>> model.set_candidates(torch.randn(50, 2), torch.arange(50) % 2)
        >>> model(torch.randn(3, 2)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int | None = None,
        temperature: float = 1.0,
        sample_rate: float = 0.5,
        distance: Literal["euclidean", "cosine"] = "euclidean",
        joint_forward: bool = False,
        inference_chunk_size: int | None = 65536,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=2e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(num_classes, optimizer, lr_scheduler, lr_interval)
        check_range("temperature", temperature, 0, low_open=True)
        check_range("sample_rate", sample_rate, 0, 1, low_open=True)
        check_choice("distance", distance, ("euclidean", "cosine"))
        if inference_chunk_size is not None:
            check_range("inference_chunk_size", inference_chunk_size, 1)
        self.encoder = encoder
        self.temperature = temperature
        self.sample_rate = sample_rate
        self.distance = distance
        self.joint_forward = joint_forward
        self.inference_chunk_size = inference_chunk_size
        self._cached: Tensor | None = None

    # prediction

    def _predict(self, query: Tensor, keys: Tensor, y: Tensor, **options: Any) -> Tensor:
        options = {"temperature": self.temperature, "distance": self.distance, **options}
        if self.num_classes is None:
            return soft_nearest_neighbor_regression(query, keys, y, **options)
        return soft_nearest_neighbor_log_probs(query, keys, y, self.num_classes, **options)

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings of rows, ``inference_chunk_size`` at a time, [N, columns] -> [N, dim]."""
        x = x.to(self.candidate_x.dtype)
        if self.inference_chunk_size is None or len(x) <= self.inference_chunk_size:
            return self.encoder(x)
        return torch.cat([self.encoder(rows) for rows in x.split(self.inference_chunk_size)])

    def _candidate_embeddings(self) -> Tensor:
        return self.embed(self.candidate_x) if self._cached is None else self._cached

    def predict_from(self, x: Tensor, candidate_x: Tensor, candidate_y: Tensor) -> Tensor:
        """Predict rows from given candidates, none of them excluded. The module should be in eval mode.

        Args:
            x: rows, [B, columns].
            candidate_x: candidates, [N, columns].
            candidate_y: their classes int64 [N], or standardised targets float [N].

        Returns:
            Log-probabilities [B, K], or standardised targets [B].

        Raises:
            ValueError: shapes do not fit or there is no candidate.
        """
        check_same_rows(candidate_x=candidate_x, candidate_y=candidate_y)
        keys = self.embed(candidate_x)
        return self._predict(self.embed(x), keys, candidate_y, chunk_size=self.inference_chunk_size)

    def forward(self, x: Tensor) -> Tensor:
        """Predict rows from the stored candidates, see :meth:`predict_from`.

        The module should be in eval mode; a trainer leaves it in train mode after a fit.

        Raises:
            RuntimeError: nothing is stored.
        """
        self.require_candidates()
        keys = self._candidate_embeddings()
        return self._predict(self.embed(x), keys, self.candidate_y, chunk_size=self.inference_chunk_size)

    def explain(self, x: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """The stored rows on which a prediction rests, in eval mode whatever the module's mode is.

        Args:
            x: rows, [B, columns].
            k: how many of them.

        Returns:
            ``(weights, indices)``: the k largest weights and the rows of the store that have them, [B, k] each.

        Raises:
            RuntimeError: nothing is stored.
        """
        self.require_candidates()
        options = {"temperature": self.temperature, "distance": self.distance, "chunk_size": self.inference_chunk_size}
        with evaluating(self):
            return neighbor_weights(self.embed(x), self._candidate_embeddings(), k, **options)

    # training

    def training_prediction(
        self,
        x: Tensor,
        y: Tensor,
        candidate_x: Tensor,
        candidate_y: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Predict the rows of a batch from each other and from a random share of the candidates.

        Args:
            x: the batch, [B, columns].
            y: its classes int64 [B], or standardised targets float [B].
            candidate_x: training rows *without* the batch, [N, columns].
            candidate_y: their labels, [N].
            generator: for the sampling, on the device of ``candidate_x``; None is the global one.

        Returns:
            Log-probabilities [B, K], or standardised targets [B].

        Raises:
            ValueError: shapes do not fit, or a single row has nothing to be predicted from.
        """
        n = check_same_rows(candidate_x=candidate_x, candidate_y=candidate_y)
        chosen = sample_candidates(n, self.sample_rate, generator, candidate_x.device)
        return self._predict_batch(x, y, candidate_x[chosen], candidate_y[chosen])

    def _predict_batch(self, x: Tensor, y: Tensor, sampled_x: Tensor, sampled_y: Tensor) -> Tensor:
        batch, sampled = check_same_rows(x=x, y=y), len(sampled_x)
        if batch == 1 and sampled == 0:
            raise ValueError(
                f"a batch of one row with no sampled row leaves no candidate: sample_rate={self.sample_rate} of the "
                "other training rows is less than one. Raise it, or use drop_last."
            )
        if sampled == 0:
            query = keys = self.encoder(x)
        elif self.joint_forward or batch == 1 or sampled == 1:  # BatchNorm has no statistics of one row
            keys = self.encoder(torch.cat([x, sampled_x]))
            query = keys[:batch]
        else:
            query = self.encoder(x)
            keys = torch.cat([query, self.encoder(sampled_x)])
        labels = torch.cat([y, sampled_y]).to(self.candidate_y.dtype)
        return self._predict(query, keys, labels, exclude_self=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of the batch, predicted from itself and a fresh sample of the other training rows."""
        index = getattr(batch, "index", None)
        if not isinstance(index, Tensor):  # a plain tuple has a method of this name
            raise ValueError(
                "ModernNCA trains on batches with the fields x, y and index (IndexedBatch): without the index a row "
                "could not be kept out of its own candidates. Add the modifier WithIndex() to the data module."
            )
        x, y = batch.x, batch.y
        self._check_index(index, len(x))
        seed = hash((torch.initial_seed(), self.current_epoch, batch_idx, rank())) & 0x7FFF_FFFF_FFFF_FFFF
        generator = torch.Generator(index.device).manual_seed(seed)
        pool = len(self.candidate_x) - len(x)
        chosen = rows_outside(sample_candidates(pool, self.sample_rate, generator, index.device), index)
        prediction = self._predict_batch(x, y, self.candidate_x[chosen], self.candidate_y[chosen])
        loss = self.loss(prediction, y)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(x), on_step=False, on_epoch=True)
        return loss

    def _check_index(self, index: Tensor, batch: int) -> None:
        check_shape("index", index, "batch", batch=batch)
        if not values_visible(index):
            return
        rows = len(self.candidate_x)
        if (index < 0).any() or (index >= rows).any():
            raise ValueError(f"index must be in 0..{rows - 1}, the rows of the candidate store, got {index.tolist()}.")
        if len(index.unique()) < batch:
            raise ValueError(
                "a training batch holds a row twice, which would be predicted from its own copy: use a sampler without "
                "replacement (sampler='instance')."
            )

    # the embeddings of the store are computed once per evaluation

    @contextmanager
    def cached_candidates(self) -> Iterator[None]:
        """Inside the block the stored rows are embedded once and not for every call; the weights must not change there.

        Raises:
            RuntimeError: nothing is stored.
        """
        self._cache()
        try:
            yield
        finally:
            self._cached = None

    def _cache(self) -> None:
        self.require_candidates()
        with nullcontext() if self._trainer is None else self.trainer.precision_plugin.forward_context():
            self._cached = self.embed(self.candidate_x)

    def set_candidates(self, x: Tensor, y: Tensor, target_mean: float = 0.0, target_std: float = 1.0) -> None:
        """Store the training rows, see :meth:`CandidateModule.set_candidates`."""
        super().set_candidates(x, y, target_mean, target_std)
        self._cached = None

    def train(self, mode: bool = True) -> ModernNCA:
        """Set the mode. Embeddings that an interrupted evaluation has left are out of date after training."""
        if mode:
            self._cached = None
        return super().train(mode)

    def on_validation_epoch_start(self) -> None:
        """Embed the stored rows."""
        self._cache()

    def on_validation_epoch_end(self) -> None:
        """Drop the embeddings: training goes on."""
        self._cached = None

    def on_test_epoch_start(self) -> None:
        """Embed the stored rows."""
        self._cache()

    def on_test_epoch_end(self) -> None:
        """Drop the embeddings."""
        self._cached = None

    def on_predict_epoch_start(self) -> None:
        """Embed the stored rows."""
        self._cache()

    def on_predict_epoch_end(self) -> None:
        """Drop the embeddings."""
        self._cached = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cached embeddings out of pickles and copies."""
        return {**super().__getstate__(), "_cached": None}
