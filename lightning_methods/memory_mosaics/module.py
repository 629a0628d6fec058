"""Memory Mosaics under Lightning: language models, and the three-moons toy."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ..core.checks import check_range
from ..core.distributed import mean_over_ranks
from ..core.module import MethodModule
from ..core.optim import build_optimizer, parameter_groups
from ..text.likelihood import token_log_probs
from .functional import regular_language_accuracy, total_variation
from .metrics import PositionLoss

__all__ = ["MemoryMosaics", "ThreeMoons"]

IGNORE_INDEX = -100


class _Tokens(NamedTuple):
    """Inputs and the token that each position has to predict (-100: none), [B, T] both."""

    input_ids: Tensor
    targets: Tensor


def _tokens(batch: Any) -> _Tokens:
    """Inputs and shifted targets of a batch in one of the forms that :class:`MemoryMosaics` takes."""
    if not isinstance(batch, Mapping):
        return _Tokens(*batch[:2])
    input_ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch.get("labels")
    labels = input_ids if labels is None else labels
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    nothing = labels.new_full((len(labels), 1), IGNORE_INDEX)
    return _Tokens(input_ids, torch.cat([labels[:, 1:], nothing], dim=1))


class MemoryMosaics(MethodModule):
    """Causal language model: cross-entropy of the next token, for any model with ``forward(input_ids) -> logits``.

    Batches are

    * a mapping with ``input_ids`` [B, T] and, where there are such, ``attention_mask`` (0 is padding) and ``labels``,
      aligned with ``input_ids`` as a Hugging Face collator gives them: they are shifted here, -100 is left out. Without
      ``labels`` the inputs are the labels;
    * a pair ``(x, y)`` whose ``y`` is shifted already.

    Where a mapping has ``legal_mask`` and ``scored_mask`` (a regular language in context), accuracy is logged, with
    ``true_probs`` the total variation distance too.

    Logs ``train/loss``, ``val/loss``, ``val/perplexity``, ``val/accuracy``, ``val/total_variation``; the same under
    ``test/``. With ``curve_length`` the mean loss at each position of the test set is in ``test_curve`` and, if there
    is a logger, in the file ``position_loss.csv`` of the run's folder.

    Source: Zhang et al., "Memory Mosaics", ICLR 2025. The defaults of the optimiser are those of BabiStories; with them
    belong a clipped gradient norm of 1, warm-up and cosine by step.

    Args:
        model: ``MemoryMosaicLM``, ``GPTLM`` or any module with ``forward(input_ids [B, T]) -> logits [B, T, V]``; an
            output with the attribute ``logits`` will do.
        optimizer: makes the optimiser from two parameter groups.
        lr_scheduler: makes the scheduler from the optimiser.
        weight_decay: of parameters with at least two dimensions; numbers per head, norms and biases do not decay.
        skip_tokens: positions at the beginning that do not count in the loss.
        curve_length: positions of the curve of the loss; None measures no curve.
        logit_chunk: positions for which the softmax is computed at a time; None for all at once.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-3, betas=(0.9, 0.95)),
        lr_scheduler: LRSchedulerCallable | None = None,
        weight_decay: float = 0.1,
        skip_tokens: int = 0,
        curve_length: int | None = None,
        logit_chunk: int | None = None,
        lr_interval: Literal["epoch", "step"] = "step",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("weight_decay", weight_decay, 0)
        check_range("skip_tokens", skip_tokens, 0)
        self.model = model
        self.weight_decay = weight_decay
        self.skip_tokens = skip_tokens
        self.logit_chunk = logit_chunk
        self.test_curve = None if curve_length is None else PositionLoss(curve_length)
        for stage in ("val", "test"):
            setattr(self, f"{stage}_loss", MeanMetric())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next token, [B, T] -> [B, T, V]."""
        out = self.model(input_ids)
        return getattr(out, "logits", out)

    def configure_optimizers(self) -> Any:
        """One optimiser with two groups: matrices decay, everything else does not."""
        optimizer = build_optimizer(
            self.optimizer_factory, parameter_groups(self.model, weight_decay=self.weight_decay)
        )
        if self.lr_scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_config(self.lr_scheduler_factory(optimizer))}

    def token_losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every target and whether it counts, [B, T] both."""
        log_prob, valid = token_log_probs(logits, targets, shift=False, chunk_size=self.logit_chunk)
        if self.skip_tokens:
            counted = torch.arange(valid.shape[1], device=valid.device) >= self.skip_tokens
            valid = valid & counted
        return -log_prob.masked_fill(~valid, 0), valid

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean over the tokens that count, on all processes."""
        input_ids, targets = _tokens(batch)
        losses, valid = self.token_losses(self(input_ids), targets)
        loss = mean_over_ranks(losses.sum(), valid.sum())
        self.log("train/loss", loss, prog_bar=True, batch_size=len(input_ids), on_step=False, on_epoch=True)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        input_ids, targets = _tokens(batch)
        logits = self(input_ids)
        losses, valid = self.token_losses(logits, targets)
        getattr(self, f"{stage}_loss").update(losses, weight=valid.to(losses.dtype))
        if stage == "test" and self.test_curve is not None:
            self.test_curve.update(losses, valid)
        if isinstance(batch, Mapping) and "legal_mask" in batch:
            scored = batch["scored_mask"]
            values = {"accuracy": regular_language_accuracy(logits, batch["legal_mask"], scored)}
            if "true_probs" in batch:
                values["total_variation"] = total_variation(logits, batch["true_probs"], scored)
            for name, value in values.items():
                # weighted by the positions that were scored, so that batches of any size give the set's mean
                self.log(f"{stage}/{name}", value, batch_size=int(scored.sum()), on_epoch=True, sync_dist=True)

    def _log_loss(self, stage: str) -> None:
        metric = getattr(self, f"{stage}_loss")
        loss = metric.compute()
        metric.reset()
        self.log(f"{stage}/loss", loss, prog_bar=True)
        self.log(f"{stage}/perplexity", loss.exp())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add the batch's tokens."""
        self._evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        """Log the mean over all tokens."""
        self._log_loss("val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add the batch's tokens."""
        self._evaluate(batch, "test")

    def on_test_epoch_start(self) -> None:
        """Begin a new curve."""
        if self.test_curve is not None:
            self.test_curve.reset()

    def on_test_epoch_end(self) -> None:
        """Log the mean over all tokens, and write the curve."""
        self._log_loss("test")
        if self.test_curve is None:
            return
        curve = self.test_curve.compute().tolist()
        folder = self.trainer.log_dir if self.trainer.logger is not None else None
        if folder is not None and self.trainer.is_global_zero:
            path = Path(folder) / "position_loss.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([("position", "loss"), *enumerate(curve)])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log-probabilities of the next token, [B, T, V]."""
        input_ids = batch if isinstance(batch, Tensor) else _tokens(batch).input_ids
        return self(input_ids).float().log_softmax(dim=-1)


class ThreeMoons(MethodModule):
    """Predict the next positions of moons on circular orbits; the error along the sequence tells what was learnt.

    Batches are ``(x, y)`` with the positions and those one step later, [B, T, 6]. The loss is the mean of the squared
    error, each error clipped at ``clip``: before a period has passed nothing can be predicted, and these errors would
    drown the rest.

    Logs ``train/loss``, ``val/mae`` and, if the data module says by ``before_lcm`` which positions lie between the
    longest period and the time after which the whole configuration returns, ``val/mae_before_lcm``; the same under
    ``test/``.

    Source: Memory Mosaics, section on the three moons (authors' released code).

    Args:
        model: sequences of positions -> predictions, [B, T, 6] -> [B, T, 6].
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        clip: largest error that counts, positive.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: ``clip`` is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
        lr_scheduler: LRSchedulerCallable | None = None,
        clip: float = 0.5,
        lr_interval: Literal["epoch", "step"] = "step",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("clip", clip, 0, low_open=True)
        self.model = model
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """Predictions of the next positions, [B, T, 6]."""
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean of the clipped squared errors."""
        x, y = batch
        loss = (self(x) - y).clamp(-self.clip, self.clip).square().mean()
        self.log("train/loss", loss, prog_bar=True, batch_size=len(x), on_step=False, on_epoch=True)
        return loss

    def _evaluate(self, batch: Any, stage: str) -> None:
        x, y = batch
        error = (self(x) - y).abs().mean(dim=2)
        where = {"batch_size": len(x), "on_epoch": True, "sync_dist": True}
        self.log(f"{stage}/mae", error.mean(), prog_bar=True, **where)
        window = getattr(self.trainer.datamodule, "before_lcm", None)
        if window is not None:
            self.log(f"{stage}/mae_before_lcm", error[:, window[0] : window[1]].mean(), prog_bar=True, **where)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the errors."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the errors."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Predictions of the next positions, [B, T, 6]."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)
