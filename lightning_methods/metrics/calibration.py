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

__all__ = ["confidence_bins", "expected_calibration_error", "plot_reliability", "reliability_bins"]


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


def plot_reliability(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Int[Tensor, " n"] | Float[Tensor, " n"],
    num_bins: int = 15,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    color: str = "#2f6f9f",
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
    import matplotlib.pyplot as plt
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    confidence, correct = confidence.detach().cpu(), correct.detach().cpu()
    count, mean_confidence, accuracy = (x.double().numpy() for x in reliability_bins(confidence, correct, num_bins))
    error = expected_calibration_error(confidence, correct, num_bins).item()
    if ax is None:
        ax = plt.figure(figsize=(4, 4.6)).add_subplot()

    width = 1 / num_bins
    left = [i * width for i in range(num_bins)]
    shown = [i for i in range(num_bins) if count[i] > 0]
    style: dict[str, Any] = {"width": width, "align": "edge", "linewidth": 0.6}
    position = [left[i] for i in shown]
    ax.bar(position, accuracy[shown], color=color, edgecolor="white", label="accuracy", **style)
    ax.bar(
        position,
        (mean_confidence - accuracy)[shown],
        bottom=accuracy[shown],
        color="#d1495b",
        edgecolor="#d1495b",
        alpha=0.35,
        hatch="///",
        label="gap to confidence",
        **style,
    )
    ax.plot([0, 1], [0, 1], color="0.25", linestyle="--", linewidth=1)
    mean, right = confidence.double().mean().item(), correct.double().mean().item()
    ax.text(
        0.04,
        0.96,
        f"ECE {error:.3f}\naccuracy {right:.3f}\nmean confidence {mean:.3f}",
        transform=ax.transAxes,
        va="top",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "0.8", "boxstyle": "round"},
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
    ax.legend(loc="lower right", fontsize=8, frameon=False)

    top = make_axes_locatable(ax).append_axes("top", size="18%", pad=0.06)
    top.bar(left, count / max(count.sum(), 1), color="0.6", edgecolor="white", **style)
    top.set(xlim=(0, 1), yticks=[])
    top.tick_params(labelbottom=False)
    top.set_ylabel("share", fontsize=8)
    for side in ("top", "right", "left"):
        top.spines[side].set_visible(False)
    if title:
        top.set_title(title, fontsize=10)
    return ax
