"""What PopT is compared with: decoders on the concatenated embeddings of a fixed set of channels, single channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

from ..core.checks import check_labels, check_range, check_same_rows, check_shape, values_visible
from ..core.ordering import ranks
from .module import DecodingModule

__all__ = ["ConcatenatedDecoder", "ConcatenatedLogistic", "rank_channels"]


def concatenated(batch: Any) -> Tensor:
    """Embeddings of all channels side by side, [B, S * d].

    Raises:
        ValueError: the batch has padding, so its samples have different channels.
    """
    if values_visible(batch.pad_mask) and batch.pad_mask.any():
        raise ValueError(
            "concatenated embeddings need the same channels in every sample; this batch has padding. Train on one "
            "subject, without pad_to_multiple."
        )
    return batch.x.flatten(1)


class ConcatenatedDecoder(DecodingModule):
    """Any network on the concatenated embeddings of a fixed set of channels: a linear layer, a deep network.

    Args:
        network: maps [B, channels * d] to [B, 1], e.g. ``torch.nn.Linear`` or ``MLP``.
        task: "binary" (labels 0 and 1; cross-entropy) or "regression" (squared error).
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Logs what :class:`DecodingModule` says.
    """

    def __init__(
        self,
        network: nn.Module,
        task: Literal["binary", "regression"] = "binary",
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=5e-4),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(task, optimizer, lr_scheduler, lr_interval)
        self.network = network

    def decode(self, batch: Any) -> Tensor:
        """Logits or values of a batch, [B]."""
        return self.network(concatenated(batch)).squeeze(1)


class ConcatenatedLogistic(DecodingModule):
    """scikit-learn's logistic regression on the concatenated embeddings of a fixed set of channels, as a run.

    It is fitted on the whole training set when a fit begins, once per value of ``C``; the coefficients with the best
    AUROC on the validation set are kept and travel in the checkpoint. One epoch suffices. One process only.

    Args:
        num_inputs: channels * d.
        C: inverse regularisation strengths to choose from.

    Raises:
        ValueError: a strength is not positive.
    """

    def __init__(self, num_inputs: int, C: Sequence[float] = (0.001, 0.01, 0.1, 1.0)) -> None:
        super().__init__("binary", lambda params: torch.optim.SGD(params, lr=0.0))
        check_range("num_inputs", num_inputs, 1)
        if not C:
            raise ValueError("C must hold at least one strength.")
        for strength in C:
            check_range("C", strength, 0, low_open=True)
        self.automatic_optimization = False
        self.strengths = tuple(C)
        self.register_buffer("weight", torch.zeros(num_inputs))
        self.register_buffer("bias", torch.zeros(()))

    def decode(self, batch: Any) -> Tensor:
        """Logits of a batch, [B]."""
        return concatenated(batch).to(self.weight.dtype) @ self.weight + self.bias

    def on_train_start(self) -> None:
        """Fit."""
        from sklearn.linear_model import LogisticRegression

        data = self.trainer.datamodule
        parts = [list(data.train_dataloader()), list(data.val_dataloader())]
        (x, y), (val_x, val_y) = (
            (torch.cat([concatenated(batch) for batch in part]), torch.cat([batch.label for batch in part]))
            for part in parts
        )
        best = -1.0
        for strength in self.strengths:
            fitted = LogisticRegression(C=strength, max_iter=1000).fit(x.numpy(), y.long().numpy())
            weight = torch.as_tensor(fitted.coef_[0]).to(self.weight)
            score = float(binary_auroc(val_x.to(weight) @ weight, val_y.to(weight).long()))
            if score > best:
                best = score
                self.weight.copy_(weight)
                self.bias.fill_(float(fitted.intercept_[0]))

    def configure_optimizers(self) -> None:
        """None: nothing is trained by gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of the fitted coefficients."""
        self._evaluate(batch, "train")


@torch.no_grad()
def rank_channels(x: Tensor, y: Tensor, folds: int = 5, ridge: float = 1.0) -> tuple[Tensor, Tensor]:
    """Order channels by how well each alone tells a binary label: cross-validated linear decoding of every channel.

    The order in which the paper adds channels to an ensemble. Every channel is decoded by a ridge regression on the
    label and scored by the area under the ROC curve over the held-out parts, all channels at a time.

    Args:
        x: embeddings, [n, channels, d].
        y: labels 0 and 1, int or float [n].
        folds: contiguous parts in turn held out, at least 2 (contiguous, since windows that overlap would leak).
        ridge: penalty, relative to the mean variance of a channel's features.

    Returns:
        ``(order, score)``: channels from best to worst, int64 [channels], and the score of each channel [channels].

    Raises:
        ValueError: shapes do not fit, one class only, or fewer samples than folds.

    Example:
        >>> y = torch.arange(40) % 2
        >>> x = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(0))
        >>> x[:, 1, 0] += 4 * y
        >>> rank_channels(x, y)[0][0]
        tensor(1)
    """
    n = check_shape("x", x, "samples channels dim")["samples"]
    check_same_rows(x=x, y=y)
    check_labels("y", y.long(), 2)
    check_range("folds", folds, 2, n)
    check_range("ridge", ridge, 0, low_open=True)
    if len(y.unique()) < 2:
        raise ValueError("y must hold both classes.")
    x, y = x.double().transpose(0, 1), y.double()
    fold = torch.arange(n, device=x.device) * folds // n
    output = torch.empty(x.shape[:2], dtype=x.dtype, device=x.device)
    for held_out in range(folds):
        test = fold == held_out
        train = x[:, ~test]
        mean, target = train.mean(dim=1, keepdim=True), y[~test]
        centred = train - mean
        gram = centred.transpose(1, 2) @ centred
        scale = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-12)
        gram = gram + ridge * scale[:, None, None] * torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
        weight = torch.linalg.solve(gram, centred.transpose(1, 2) @ (target - target.mean())[:, None])
        output[:, test] = ((x[:, test] - mean) @ weight).squeeze(2) + target.mean()
    positive = y == 1
    # Area under the curve: the rank sum of the positives.
    rank_sum = ranks(output, dim=1)[:, positive].sum(dim=1)
    n_positive, n_negative = positive.sum(), (~positive).sum()
    score = (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)
    return score.argsort(descending=True, stable=True), score.float()
