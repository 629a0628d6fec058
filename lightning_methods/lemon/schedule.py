"""The learning rate of an expanded network."""

from __future__ import annotations

from torch.optim import Optimizer

from ..core.schedules import warmup_cosine

__all__ = ["expanded_cosine"]


class expanded_cosine(warmup_cosine):  # noqa: N801 - called like a function; a class, so that YAML can give it arguments
    """Linear warm-up to the full rate of training from scratch, then half a cosine over fewer steps.

    An expanded network keeps the maximum learning rate of the large one (with a smaller one it ends worse) and comes
    down earlier: ViTs after 130 instead of 300 epochs, BERT after 132 000 instead of 220 000 steps.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 5 (learning rate scheduler).

    Args:
        optimizer: the optimiser.
        warmup_steps: calls of warm-up if at least 1, a share of the run if below 1.
        total_steps: calls until the minimum; None is filled in from the trainer.
        min_ratio: factor of the rate at the end.
        start_factor: factor of the rate of the very first call.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = expanded_cosine(optimizer, warmup_steps=1, total_steps=3, min_ratio=0.1)
        >>> [round(schedule.factor(step), 2) for step in range(4)]
        [0.0, 1.0, 0.55, 0.1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: float = 0,
        total_steps: int | None = None,
        min_ratio: float = 0.0,
        start_factor: float = 0.0,
    ) -> None:
        super().__init__(optimizer, warmup_steps, total_steps, min_ratio, start_factor)
