"""Log-probabilities of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.checks import check_floating, check_labels, check_range, check_shape
from ..core.losses import at_least_float32

__all__ = ["token_log_probs"]


def _log_probs(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    return -F.cross_entropy(at_least_float32(logits), labels, ignore_index=ignore_index, reduction="none")


def token_log_probs(
    logits: Float[Tensor, "batch length vocab"],
    labels: Int[Tensor, "batch length"],
    *,
    shift: bool = True,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "batch scored"], Bool[Tensor, "batch scored"]]:
    """Log-probability of every labelled token: ``log softmax(logits)[label]``.

    Args:
        logits: [batch, length, vocab].
        labels: token ids, [batch, length]; ``ignore_index`` where nothing is scored.
        shift: position t scores the label of position t + 1, as in a causal language model whose labels are its inputs;
            without it position t scores label t.
        ignore_index: the label that is left out.
        chunk_size: positions at a time. The softmax in float32 then exists for one chunk only, in the backward pass
            too, where it is computed again: for large vocabularies.

    Returns:
        ``(log_prob, valid)``, [batch, length - 1] with ``shift`` and [batch, length] without; float32 or wider, 0 where
        ``valid`` is False.

    Raises:
        ValueError: shapes do not fit, the labels are no token ids, or there is nothing to shift.

    Example:
        >>> log_prob, valid = token_log_probs(torch.zeros(1, 3, 4), torch.tensor([[0, 2, -100]]))
        >>> log_prob[valid], valid
        (tensor([-1.3863]), tensor([[ True, False]]))
    """
    sizes = check_shape("logits", logits, "batch length vocab")
    check_floating("logits", logits)
    check_shape("labels", labels, "batch length", batch=sizes["batch"], length=sizes["length"])
    check_labels("labels", labels.flatten(), sizes["vocab"], ignore=ignore_index)
    if chunk_size is not None:
        check_range("chunk_size", chunk_size, 1)
    if shift:
        if sizes["length"] < 2:
            raise ValueError(f"with shift logits need at least 2 positions, got shape {list(logits.shape)}.")
        logits, labels = logits[:, :-1], labels[:, 1:]
    shape = labels.shape
    rows, flat = logits.flatten(0, 1), labels.flatten().long()
    if chunk_size is None or len(flat) <= chunk_size:
        log_prob = _log_probs(rows, flat, ignore_index)
    else:
        parts = [
            checkpoint(_log_probs, r, f, ignore_index, use_reentrant=False)
            for r, f in zip(rows.split(chunk_size), flat.split(chunk_size), strict=True)
        ]
        log_prob = torch.cat(parts)
    return log_prob.view(shape), labels != ignore_index
