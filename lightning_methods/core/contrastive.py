"""The core of contrastive losses: log-probabilities over candidates and the mean over weighted positives."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import check_range, check_shape
from .losses import at_least_float32

__all__ = ["contrastive_log_probs", "masked_contrastive_loss"]


def contrastive_log_probs(
    logits: Float[Tensor, "anchors candidates"],
    exclude: Bool[Tensor, "anchors candidates"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "anchors candidates"]:
    """Log-probability of every candidate: ``l_ij - log(sum_{j' not excluded} exp(l_ij') + eps)``.

    Args:
        logits: similarities over temperature, [anchors, candidates].
        exclude: True where a candidate is left out of the sum (an anchor itself, usually).
        eps: added to the sum after the row's maximum (over all columns) was subtracted, as some published losses do;
            0 is the log-softmax over the candidates that are left.

    Returns:
        [anchors, candidates]; float32 or wider. The entries of excluded candidates are meaningless but finite.

    Raises:
        ValueError: shapes differ or ``eps`` is negative.

    Example:
        >>> contrastive_log_probs(torch.zeros(1, 3), torch.tensor([[True, False, False]]))[0, 1:].exp()
        tensor([0.5000, 0.5000])
    """
    sizes = check_shape("logits", logits, "anchors candidates")
    check_range("eps", eps, 0)
    logits = at_least_float32(logits)
    kept = logits
    if exclude is not None:
        check_shape("exclude", exclude, "anchors candidates", **sizes)
        # Not -inf: a row without candidates stays finite, and so do its gradients.
        kept = logits.masked_fill(exclude, torch.finfo(logits.dtype).min)
    if eps == 0:
        return logits - kept.logsumexp(dim=1, keepdim=True)
    shift = logits.detach().amax(dim=1, keepdim=True)
    return logits - shift - ((kept - shift).exp().sum(dim=1, keepdim=True) + eps).log()


def masked_contrastive_loss(
    anchors: Float[Tensor, "anchors width"],
    candidates: Float[Tensor, "candidates width"],
    positives: Tensor,
    *,
    temperature: float | Tensor,
    exclude: Bool[Tensor, "anchors candidates"] | None = None,
    eps: float = 0.0,
    chunk_size: int | None = None,
) -> Float[Tensor, ""]:
    """Supervised contrastive loss with weighted positives, averaged over the anchors that have a positive.

    For anchor i with weights w_i: ``-sum_j w_ij log p_ij / sum_j w_ij``, where log p is
    :func:`contrastive_log_probs` of the inner products over the temperature. Weights of excluded candidates count as 0.

    Source: Khosla et al., "Supervised Contrastive Learning", NeurIPS 2020, equation (2), with real weights.

    Args:
        anchors: usually of unit norm, [anchors, width].
        candidates: [candidates, width].
        positives: non-negative weights or a boolean mask, [anchors, candidates].
        temperature: a positive number, or one for each anchor, [anchors].
        exclude: True where a candidate is not one for this anchor, [anchors, candidates].
        eps: see :func:`contrastive_log_probs`.
        chunk_size: anchors at a time; the chunks are recomputed in the backward pass, so that the memory for
            similarities is ``chunk_size * candidates``.

    Returns:
        A scalar; 0 (with gradient 0) when no anchor has a positive.

    Raises:
        ValueError: shapes differ, or the temperature is a number that is not positive.
    """
    rows = check_shape("anchors", anchors, "anchors width")
    columns = check_shape("candidates", candidates, "candidates width", width=rows["width"])["candidates"]
    sizes = {"anchors": rows["anchors"], "candidates": columns}
    check_shape("positives", positives, "anchors candidates", **sizes)
    anchors, candidates = at_least_float32(anchors), at_least_float32(candidates)
    if isinstance(temperature, Tensor):
        check_shape("temperature", temperature, "anchors", anchors=rows["anchors"])
        scale = temperature.to(anchors.dtype)[:, None]
    else:
        check_range("temperature", temperature, 0, low_open=True)
        scale = anchors.new_full((1, 1), temperature).expand(rows["anchors"], 1)
    if exclude is not None:
        check_shape("exclude", exclude, "anchors candidates", **sizes)

    def rows_loss(a: Tensor, weights: Tensor, t: Tensor, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch.autocast(a.device.type, enabled=False):
            log_probs = contrastive_log_probs(a @ candidates.T / t, left_out, eps)
        weights = weights.to(log_probs.dtype)
        if left_out is not None:
            weights = weights.masked_fill(left_out, 0)
        total = weights.sum(dim=1)
        has_positive = total > 0
        loss = -(weights * log_probs).sum(dim=1) / torch.where(has_positive, total, 1)
        return torch.where(has_positive, loss, 0).sum(), has_positive.sum()

    step = chunk_size or max(rows["anchors"], 1)
    parts = []
    for start in range(0, rows["anchors"], step):
        cut = slice(start, start + step)
        arguments = (anchors[cut], positives[cut], scale[cut], None if exclude is None else exclude[cut])
        recompute = chunk_size is not None and torch.is_grad_enabled()
        parts.append(checkpoint(rows_loss, *arguments, use_reentrant=False) if recompute else rows_loss(*arguments))
    if not parts:
        return (anchors.sum() + candidates.sum()) * 0
    total = torch.stack([part[0] for part in parts]).sum()
    return total / torch.stack([part[1] for part in parts]).sum().clamp_min(1)
