"""GIFT's label refinement and loss, and the losses that the paper compares it with.

Notation of the paper: ``o`` student logits, ``t`` soft labels, ``y`` hard labels, ``s`` smoothed hard labels.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_choice, check_floating, check_labels, check_range, check_shape
from ..core.losses import at_least_float32, soft_target_cross_entropy, softmax_kl

__all__ = [
    "cosine_similarity_loss",
    "gift_loss",
    "kl_soft_label_loss",
    "refine_soft_labels",
    "smooth_hard_labels",
    "soft_cross_entropy",
    "soft_label_loss",
]

Mode = Literal["convex", "additive"]
LossName = Literal["ce", "kl", "softce", "mse", "mse_ce", "softce_ce", "cosine", "gift"]


def smooth_hard_labels(
    target: Int[Tensor, " batch"],
    num_classes: int,
    smoothing: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch classes"]:
    """Smoothed one-hot labels ``s``: ``1 - smoothing`` at the label, ``smoothing / (C - 1)`` at every other class.

    Not the label smoothing of ``torch.nn.CrossEntropyLoss``, which spreads its share over all C classes.

    Args:
        target: hard labels, integers in 0..num_classes - 1, [batch].
        num_classes: C, at least 2.
        smoothing: share of the other classes, in [0, 1).
        dtype: floating dtype of the result.

    Returns:
        Rows that sum to 1, [batch, classes].

    Raises:
        ValueError: fewer than two classes, smoothing outside [0, 1), or labels that are not integers in range.

    Example:
        >>> smooth_hard_labels(torch.tensor([0, 2]), num_classes=3)
        tensor([[0.9000, 0.0500, 0.0500],
                [0.0500, 0.0500, 0.9000]])
    """
    check_range("num_classes", num_classes, 2)
    check_range("smoothing", smoothing, 0, 1, high_open=True)
    check_labels("target", target, num_classes)
    others = torch.full(
        (target.shape[0], num_classes), smoothing / (num_classes - 1), dtype=dtype, device=target.device
    )
    return others.scatter(1, target.long().unsqueeze(1), 1 - smoothing)


def check_refinement(weight: float, smoothing: float, mode: str) -> None:
    """Raise a ``ValueError`` unless the options of :func:`refine_soft_labels` are valid."""
    check_choice("mode", mode, get_args(Mode))
    check_range("weight", weight, 0, 1 if mode == "convex" else float("inf"))
    check_range("smoothing", smoothing, 0, 1, high_open=True)


@torch.no_grad()
def refine_soft_labels(
    soft_labels: Float[Tensor, "batch classes"],
    target: Int[Tensor, " batch"],
    weight: float = 0.1,
    smoothing: float = 0.1,
    mode: Mode = "convex",
) -> Float[Tensor, "batch classes"]:
    """Mix a little of the smoothed hard label into the soft label, both at unit length.

    ``(1 - weight) * t / |t| + weight * s / |s|`` for "convex", the paper's form; ``t / |t| + weight * s / |s|`` for
    "additive", which is what the authors' code runs. Up to its length, which the cosine loss does not see, additive
    with weight ``w`` is convex with ``w / (1 + w)``.

    Args:
        soft_labels: teacher outputs t, [batch, classes]; logits or probabilities, taken as they are (no softmax).
        target: hard labels, [batch].
        weight: share of the hard label; in [0, 1] for "convex", non-negative for "additive".
        smoothing: of the hard label, see :func:`smooth_hard_labels`.
        mode: "convex" or "additive".

    Returns:
        Refined labels r, [batch, classes], detached, in the dtype of ``soft_labels``; half precision is computed in
        float32.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.

    Example:
        >>> refine_soft_labels(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), weight=0.5, smoothing=0.0)
        tensor([[0.8000, 0.4000]])
    """
    check_refinement(weight, smoothing, mode)
    batch, classes = check_shape("soft_labels", soft_labels, "batch classes").values()
    check_floating("soft_labels", soft_labels)
    check_labels("target", target, classes, batch=batch)
    t = at_least_float32(soft_labels)
    t_unit = F.normalize(t, dim=1)
    s_unit = F.normalize(smooth_hard_labels(target, classes, smoothing, dtype=t.dtype), dim=1)
    keep = 1 - weight if mode == "convex" else 1.0
    return (keep * t_unit + weight * s_unit).to(soft_labels.dtype)


def _check_pair(logits: Tensor, soft_labels: Tensor) -> None:
    check_floating("logits", logits)
    check_floating("soft_labels", soft_labels)
    check_shape("soft_labels", soft_labels, "batch classes", **check_shape("logits", logits, "batch classes"))


def cosine_similarity_loss(
    logits: Float[Tensor, "batch classes"], soft_labels: Float[Tensor, "batch classes"]
) -> Float[Tensor, ""]:
    """One minus the mean cosine of student logits and labels: ``1 - mean_i cos(o_i, t_i)``, in [0, 2].

    The loss does not depend on the length of either vector, so the scale of the logits is free: their softmax is no
    confidence before it is calibrated.

    Args:
        logits: student outputs o, [batch, classes].
        soft_labels: labels t, [batch, classes]; logits or probabilities.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> cosine_similarity_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.6, 0.8]]))
        tensor(0.4000)
    """
    _check_pair(logits, soft_labels)
    return 1 - F.cosine_similarity(at_least_float32(logits), at_least_float32(soft_labels), dim=1).mean()


def gift_loss(
    logits: Float[Tensor, "batch classes"],
    soft_labels: Float[Tensor, "batch classes"],
    target: Int[Tensor, " batch"],
    weight: float = 0.1,
    smoothing: float = 0.1,
    mode: Mode = "convex",
) -> Float[Tensor, ""]:
    """GIFT: the cosine loss against refined soft labels.

    Source: Shang et al., "GIFT: Unlocking Full Potential of Labels in Distilled Dataset at Near-zero Cost", ICLR 2025.
    Gradient flows to ``logits`` only.

    Args:
        logits: student outputs o, [batch, classes].
        soft_labels: teacher outputs t for the same augmented images, [batch, classes]. The authors use raw logits;
            probabilities are accepted and taken as they are.
        target: hard labels y, [batch].
        weight: share of the hard label, see :func:`refine_soft_labels`.
        smoothing: of the hard label.
        mode: "convex" (the paper) or "additive" (the authors' code).

    Returns:
        A scalar in [0, 2], float32 or wider.

    Raises:
        ValueError: shapes do not fit, a label or an option is out of range.

    Example:
        >>> teacher = torch.tensor([[4.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
        >>> gift_loss(2 * teacher, teacher, torch.tensor([0, 2]))
        tensor(0.0003)
    """
    _check_pair(logits, soft_labels)
    refined = refine_soft_labels(at_least_float32(soft_labels), target, weight, smoothing, mode)
    return cosine_similarity_loss(logits, refined)


def kl_soft_label_loss(
    logits: Float[Tensor, "batch classes"], soft_labels: Float[Tensor, "batch classes"], temperature: float = 20.0
) -> Float[Tensor, ""]:
    """``KL(softmax(t / T) || softmax(o / T))``, mean over the batch: the loss of SRe2L, RDED and CDA.

    Without the factor T^2 of knowledge distillation, as in those methods.

    Args:
        logits: student logits o, [batch, classes].
        soft_labels: teacher logits t, [batch, classes].
        temperature: T > 0.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: the shapes differ, or the temperature is not positive.
    """
    _check_pair(logits, soft_labels)
    return softmax_kl(logits, soft_labels, temperature)


def soft_cross_entropy(
    logits: Float[Tensor, "batch classes"], soft_labels: Float[Tensor, "batch classes"]
) -> Float[Tensor, ""]:
    """Cross-entropy of ``softmax(t)``, mean over the batch: the loss of DATM.

    Args:
        logits: student logits o, [batch, classes].
        soft_labels: teacher logits t, [batch, classes]; the softmax is applied here.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: the shapes differ.
    """
    _check_pair(logits, soft_labels)
    return soft_target_cross_entropy(logits, at_least_float32(soft_labels).softmax(dim=1))


def _mean_squared_error(logits: Tensor, soft_labels: Tensor) -> Tensor:
    _check_pair(logits, soft_labels)
    return F.mse_loss(at_least_float32(logits), at_least_float32(soft_labels))


def soft_label_loss(
    name: LossName,
    logits: Float[Tensor, "batch classes"],
    soft_labels: Float[Tensor, "batch classes"],
    target: Int[Tensor, " batch"],
    *,
    weight: float = 0.1,
    smoothing: float = 0.1,
    mode: Mode = "convex",
    temperature: float = 20.0,
    hard_weight: float = 0.1,
) -> Float[Tensor, ""]:
    """One of the losses of the paper's comparison, by the name that the authors' code gives it.

    =============  ==================================================================
    ``ce``         cross-entropy of the hard label
    ``kl``         :func:`kl_soft_label_loss`
    ``softce``     :func:`soft_cross_entropy`
    ``mse``        mean squared error of the logits
    ``mse_ce``     ``mse + hard_weight * ce``, the loss of G-VBSM
    ``softce_ce``  ``softce + hard_weight * ce``
    ``cosine``     :func:`cosine_similarity_loss`
    ``gift``       :func:`gift_loss`
    =============  ==================================================================

    Args:
        name: the loss.
        logits: student logits o, [batch, classes].
        soft_labels: teacher logits t, [batch, classes].
        target: hard labels y, [batch].
        weight: of ``gift``.
        smoothing: of ``gift``.
        mode: of ``gift``.
        temperature: of ``kl``.
        hard_weight: of ``ce`` in ``mse_ce`` and ``softce_ce``, non-negative.

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: unknown name, shapes that do not fit, a label or an option out of range.
    """
    check_choice("name", name, get_args(LossName))
    check_range("hard_weight", hard_weight, 0)
    _check_pair(logits, soft_labels)
    check_labels("target", target, logits.shape[1], batch=logits.shape[0])
    if name == "gift":
        return gift_loss(logits, soft_labels, target, weight, smoothing, mode)
    if name == "cosine":
        return cosine_similarity_loss(logits, soft_labels)
    if name == "kl":
        return kl_soft_label_loss(logits, soft_labels, temperature)
    if name == "softce":
        return soft_cross_entropy(logits, soft_labels)
    if name == "mse":
        return _mean_squared_error(logits, soft_labels)
    hard = F.cross_entropy(at_least_float32(logits), target.long())
    if name == "ce":
        return hard
    soft = _mean_squared_error if name == "mse_ce" else soft_cross_entropy
    return soft(logits, soft_labels) + hard_weight * hard
