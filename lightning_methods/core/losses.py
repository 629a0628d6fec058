"""Losses that several methods share."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_choice, check_range, check_shape, values_visible

__all__ = [
    "at_least_float32",
    "class_log_prior",
    "float64_if_possible",
    "logit_adjusted_cross_entropy",
    "soft_target_cross_entropy",
    "softmax_kl",
]


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def float64_if_possible(x: Tensor) -> Tensor:
    """Double precision, for spectra and inverse roots; float32 on devices that have no float64 (Apple's)."""
    return x.float() if x.device.type == "mps" else x.double()


def _reduce(values: Tensor, reduction: str) -> Tensor:
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    return values if reduction == "none" else getattr(values, reduction)()


def class_log_prior(
    class_counts: Any,
    num_classes: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Float[Tensor, " classes"]:
    """``log(n_k / sum_j n_j)`` of the training samples of each class.

    Args:
        class_counts: n_k, all positive: a list, an array, or a tensor on any device, [classes].
        num_classes: the number there has to be.
        dtype: of the result.
        device: of the result; None for that of the counts.

    Raises:
        ValueError: not a vector of ``num_classes`` entries, or a count is not positive.
    """
    counts = torch.as_tensor(class_counts)
    check_shape("class_counts", counts, "classes", **({} if num_classes is None else {"classes": num_classes}))
    if values_visible(counts) and not (counts > 0).all():
        raise ValueError("class_counts must be positive: every class needs at least one training sample.")
    counts = counts.to(device=device or counts.device, dtype=dtype)
    return (counts / counts.sum()).log()


def logit_adjusted_cross_entropy(
    logits: Float[Tensor, "batch classes"],
    target: Int[Tensor, " batch"],
    class_counts: Any,
    tau: float = 1.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross-entropy of ``logits + tau * log(prior)``: logit adjustment during training.

    Source: Menon et al., "Long-tail learning via logit adjustment", ICLR 2021, equation (10).

    Args:
        logits: [batch, classes].
        target: class indices, [batch].
        class_counts: number of training samples of each class, all positive, [classes].
        tau: strength, non-negative; 0 is plain cross-entropy.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or [batch] without reduction; float32 or wider.

    Raises:
        ValueError: shapes do not fit, a count is not positive, or tau is negative.
    """
    classes = check_shape("logits", logits, "batch classes")["classes"]
    check_range("tau", tau, 0)
    logits = at_least_float32(logits)
    log_prior = class_log_prior(class_counts, classes, logits.dtype, logits.device)
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    return F.cross_entropy(logits + tau * log_prior, target, reduction=reduction)


def soft_target_cross_entropy(
    logits: Float[Tensor, "batch classes"],
    probs: Float[Tensor, "batch classes"],
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross-entropy of a target distribution: ``-sum_c p_c log softmax(logits)_c``, with 0 log 0 = 0.

    Args:
        logits: [batch, classes].
        probs: target probabilities, [batch, classes].
        reduction: over the batch.

    Returns:
        A scalar, or [batch] without reduction; float32 or wider.
    """
    check_shape("probs", probs, "batch classes", **check_shape("logits", logits, "batch classes"))
    log_probs = F.log_softmax(at_least_float32(logits), dim=-1)
    terms = torch.where(probs == 0, 0, probs * log_probs)
    return _reduce(-terms.sum(dim=-1), reduction)


def softmax_kl(
    student: Float[Tensor, "batch classes"],
    teacher: Float[Tensor, "batch classes"],
    temperature: float = 1.0,
    scale: bool = False,
    chunk_size: int | None = None,
) -> Float[Tensor, ""]:
    """Kullback-Leibler divergence ``KL(softmax(teacher / T) || softmax(student / T))``, mean over the rows.

    Args:
        student: logits, [batch, classes].
        teacher: logits, [batch, classes].
        temperature: T > 0.
        scale: multiply by T^2, as Hinton et al. (2015) do to keep the gradient's size.
        chunk_size: rows at a time; the sum does not change, the memory for large vocabularies does.

    Returns:
        A scalar, float32 or wider.
    """
    check_shape("teacher", teacher, "batch classes", **check_shape("student", student, "batch classes"))
    check_range("temperature", temperature, 0, low_open=True)
    rows = student.shape[0]
    total = torch.zeros((), dtype=at_least_float32(student[:0]).dtype, device=student.device)
    for s, t in zip(student.split(chunk_size or max(rows, 1)), teacher.split(chunk_size or max(rows, 1)), strict=True):
        log_p = F.log_softmax(at_least_float32(t) / temperature, dim=-1)
        log_q = F.log_softmax(at_least_float32(s) / temperature, dim=-1)
        total = total + F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    return total / rows * (temperature**2 if scale else 1.0)
