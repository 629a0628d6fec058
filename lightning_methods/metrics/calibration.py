"""Whether confidence matches accuracy: expected calibration error and the reliability diagram."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.checks import check_floating, check_range, check_same_rows, check_shape, values_visible
from ..core.losses import at_least_float32

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "confidence_bins",
    "draw_reliability_bins",
    "expected_calibration_error",
    "plot_reliability",
    "reliability_bins",
]


def confidence_bins(confidence: Float[Tensor, " n"], num_bins: int = 15) -> Int[Tensor, " n"]:
    """Index of the equal-width bin (i / num_bins, (i + 1) / num_bins] that a confidence falls into; 0 is in the first.

    Args:
        confidence: in [0, 1], [n].
        num_bins: number of bins.

    Returns:
        Bin indices in 0 .. num_bins - 1, [n].
    """
    check_range("num_bins", num_bins, 1)
    inner = torch.arange(1, num_bins, device=confidence.device, dtype=confidence.dtype) / num_bins
    return torch.bucketize(confidence, inner)


def reliability_bins(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"],
    num_bins: int = 15,
) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Number of samples, mean confidence and accuracy of every confidence bin.

    Args:
        confidence: in [0, 1], [n].
        correct: whether the prediction was right, [n].
        num_bins: number of equal-width bins on (0, 1].

    Returns:
        ``(count, confidence, accuracy)``, each [num_bins]; the last two are nan in an empty bin.

    Raises:
        ValueError: shapes differ, or a confidence is outside [0, 1].
    """
    check_floating("confidence", confidence)
    check_shape("confidence", confidence, "n")
    check_shape("correct", correct, "n")
    check_same_rows(confidence=confidence, correct=correct)
    if values_visible(confidence) and not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("confidence must be in [0, 1]: give probabilities, not logits.")
    confidence = at_least_float32(confidence)
    index = confidence_bins(confidence, num_bins)
    zeros = torch.zeros(num_bins, dtype=torch.float64, device=confidence.device)
    count = zeros.index_add(0, index, torch.ones_like(confidence, dtype=torch.float64))
    total_confidence = zeros.index_add(0, index, confidence.double())
    total_correct = zeros.index_add(0, index, correct.double())
    dtype = confidence.dtype
    return count.to(dtype), (total_confidence / count).to(dtype), (total_correct / count).to(dtype)


def expected_calibration_error(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"],
    num_bins: int = 15,
) -> Float[Tensor, ""]:
    """Expected calibration error: ``sum_b n_b / n |accuracy_b - confidence_b|`` over equal-width bins on (0, 1].

    Source: Guo et al., "On calibration of modern neural networks", ICML 2017, equation (3).

    Args:
        confidence: in [0, 1], [n].
        correct: whether the prediction was right, [n].
        num_bins: number of bins.

    Returns:
        A scalar in [0, 1]; nan without samples.

    Raises:
        ValueError: shapes differ, or a confidence is outside [0, 1].

    Example:
        >>> confidence = torch.tensor([0.9, 0.9, 0.9, 0.9, 0.9])
        >>> expected_calibration_error(confidence, torch.tensor([1, 1, 1, 1, 0]))  # 90 % sure, 80 % right
        tensor(0.1000)
    """
    count, mean_confidence, accuracy = reliability_bins(confidence, correct, num_bins)
    gaps = torch.where(count > 0, (accuracy - mean_confidence).abs(), 0)
    return (gaps * count).sum() / count.sum()


def draw_reliability_bins(
    count: Float[Tensor, " bins"],
    confidence: Float[Tensor, " bins"],
    accuracy: Float[Tensor, " bins"],
    ax: Axes,
    *,
    title: str | None = None,
    color: str = "#0072B2",
    text: str | None = None,
) -> None:
    """Draw bins (:func:`reliability_bins`): accuracy, the gap to the confidence, and above it where the samples lie.

    Args:
        count: number of samples of every bin, [bins].
        confidence: mean confidence, [bins].
        accuracy: share of right predictions, [bins].
        ax: axes to draw on.
        title: title above the diagram.
        color: of the accuracy bars.
        text: what the box says; None for calibration error, accuracy and mean confidence.
    """
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    counts, means, rights = (x.detach().double().cpu() for x in (count, confidence, accuracy))
    shown = (counts > 0).nonzero().flatten()
    left = torch.arange(len(counts), dtype=torch.float64) / len(counts)
    share = counts / counts.sum()
    mean, right, error = (
        (values[shown] * share[shown]).sum().item() for values in (means, rights, (means - rights).abs())
    )
    style: dict[str, Any] = {"width": 1 / len(counts), "align": "edge", "linewidth": 0.6}
    ax.bar(left[shown].numpy(), rights[shown].numpy(), color=color, edgecolor="white", label="accuracy", **style)
    ax.bar(
        left[shown].numpy(),
        (means - rights)[shown].numpy(),
        bottom=rights[shown].numpy(),
        facecolor="none",
        edgecolor="#D55E00",
        hatch="////",
        label="gap to confidence",
        **style,
    )
    ax.plot([0, 1], [0, 1], color="0.3", linestyle="--", linewidth=1)
    ax.text(
        0.04,
        0.96,
        text or f"ECE {error:.3f}\naccuracy {right:.3f}\nmean confidence {mean:.3f}",
        transform=ax.transAxes,
        va="top",
        fontsize=8.5,
        bbox={"facecolor": "white", "edgecolor": "0.85", "alpha": 0.9, "boxstyle": "round"},
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")

    top = make_axes_locatable(ax).append_axes("top", size="18%", pad=0.06)
    top.bar(left.numpy(), share.numpy(), color="0.6", edgecolor="white", **style)
    top.set(xlim=(0, 1), yticks=[])
    top.tick_params(labelbottom=False, length=0)
    top.set_ylabel("share", fontsize=8)
    for side in ("top", "right", "left"):
        top.spines[side].set_visible(False)
    if title:
        top.set_title(title)


def plot_reliability(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"],
    num_bins: int = 15,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    color: str = "#0072B2",
) -> Axes:
    """Reliability diagram: accuracy against confidence by bin, the gap to the diagonal, and where the samples lie.

    Args:
        confidence: in [0, 1], [n].
        correct: whether the prediction was right, [n].
        num_bins: number of equal-width bins.
        ax: axes to draw on; a new figure if None.
        title: title above the diagram.
        color: of the accuracy bars.

    Returns:
        The axes; ``ax.figure.savefig(path)`` saves it.

    Raises:
        ValueError: shapes differ, or a confidence is outside [0, 1].

    Example:
        >>> confidence = torch.linspace(0.3, 1, 200)
        >>> ax = plot_reliability(confidence, torch.rand(200) < confidence, title="calibrated")
        >>> ax.get_xlabel()
        'confidence'
    """
    bins = reliability_bins(confidence.detach(), correct.detach(), num_bins)
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.figure(figsize=(4, 4.6)).add_subplot()
    draw_reliability_bins(*bins, ax, title=title, color=color)
    ax.legend(loc="lower right", fontsize=8, frameon=False)
    return ax
