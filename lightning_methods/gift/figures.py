"""The picture of GIFT's claim: accuracy across optimisers, and what refinement does to one soft label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..claims.expressions import t_interval
from ..claims.plots import PALETTE
from ..core.checkpoints import load_network
from ..nn.convnets import ConvNet
from .functional import refine_soft_labels

__all__ = ["figure"]

OPTIMIZERS = {"adamw": "AdamW 0.001", "adam": "Adam 0.001", "sgd": "SGD 0.01", "fast_sgd": "SGD 0.1"}
LOSSES = {"kl": "KL, T = 20", "ce": "cross-entropy", "softce": "soft cross-entropy", "mse": "squared error"}
LOSSES |= {"cosine": "cosine", "gift": "GIFT"}
COLORS = dict(zip(LOSSES, ("#BDBDB8", "#D9C8A9", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2"), strict=True))


def figure(results: dict[str, Any], folder: Path) -> Figure:
    """Draw the picture.

    Args:
        results: the content of ``docs/claims/gift.json``.
        folder: the folder of the runs; the label on the right is of the first seed's teacher there.

    Returns:
        A figure with one panel, or with two where the teacher's checkpoint is found.
    """
    teachers = sorted((folder / "teacher").glob("seed*/**/last*.ckpt"))
    drawing = Figure(figsize=(10.5, 3.7) if teachers else (7, 3.7))
    axes = drawing.subplots(1, 2 if teachers else 1, squeeze=False, width_ratios=[1.7, 1] if teachers else None)[0]
    _bars(axes[0], results)
    if teachers:
        _refinement(axes[1], teachers[0])
    return drawing


def _bars(axis: Axes, results: dict[str, Any]) -> None:
    """Mean test accuracy with its 95 % interval, by optimiser and loss."""
    position, ticks, named = 0.0, [], set()
    for optimizer in OPTIMIZERS:
        start = position
        for loss in LOSSES:
            run = results["runs"].get(f"{optimizer}_{loss}")
            if run is None:
                continue
            mean, low, high = t_interval(run["test/acc"]["values"])
            label = LOSSES[loss] if loss not in named else None
            named.add(loss)
            axis.bar(position, 100 * mean, width=0.86, color=COLORS[loss], label=label)
            axis.plot([position] * 2, [100 * low, 100 * high], color="#2B2B2B", lw=1.1, solid_capstyle="butt")
            position += 1
        ticks.append((start + position - 1) / 2)
        position += 0.9
    teacher = results["runs"].get("teacher")
    if teacher is not None:
        axis.axhline(100 * teacher["test/acc"]["mean"], color="#7F7F7F", lw=0.9, ls=(0, (4, 3)))
        axis.annotate("teacher", (position - 1, 100 * teacher["test/acc"]["mean"]), xytext=(0, -11),
                      textcoords="offset points", fontsize=8.5, color="#5A5A5A", ha="right")  # fmt: skip
    axis.set_xticks(ticks, list(OPTIMIZERS.values()))
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, 105)
    axis.set_ylabel("test accuracy (%)")
    axis.grid(axis="y")
    axis.set_title("One image per class: what a student learns by which loss and optimiser")
    axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8.5)


def _refinement(axis: Axes, checkpoint: Path) -> None:
    """Soft label and refined label of a digit on which the teacher errs, or which it finds hardest."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16
    target = torch.as_tensor(digits.target)
    teacher = ConvNet(depth=2, width=32, in_channels=1, image_size=8)
    load_network(teacher, str(checkpoint), "network").eval()
    with torch.no_grad():
        logits = teacher(images)
    others = logits.masked_fill(torch.nn.functional.one_hot(target, 10).bool(), -torch.inf).amax(dim=1)
    own = logits.gather(1, target[:, None]).squeeze(1)
    # Among those that it gets wrong, the one that refinement brings closest to a tie with the right class.
    hardest = ((others - own) / logits.norm(dim=1)).sub(0.1).abs().argmin()
    soft = torch.nn.functional.normalize(logits[hardest : hardest + 1], dim=1)
    refined = refine_soft_labels(logits[hardest : hardest + 1], target[hardest : hardest + 1])
    refined = torch.nn.functional.normalize(refined, dim=1)
    position = torch.arange(10)
    axis.axhline(0, color="#8A8A8A", lw=0.8)
    axis.bar(position - 0.21, soft[0], width=0.42, color=PALETTE[5], label="teacher")
    axis.bar(position + 0.21, refined[0], width=0.42, color=PALETTE[0], label="refined")
    axis.set_xticks(position.tolist())
    axis.set_xlabel(f"class; this digit is a {int(target[hardest])}")
    axis.set_ylabel("label at unit length")
    axis.set_title("A soft label before and after")
    axis.set_ylim(1.1 * float(soft.min()), 3.2 * float(refined.max()))  # room for the digit
    axis.legend(loc="upper left", fontsize=8.5)
    inset = axis.inset_axes([0.78, 0.7, 0.22, 0.3])
    inset.imshow(images[hardest, 0], cmap="gray_r")
    inset.set_axis_off()
