"""Training and eval mode for a phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode and no gradient inside; afterwards every submodule is in the mode that it was in.

    Args:
        module: any module.

    Example:
        >>> net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with evaluating(net):
        ...     net[0].training
        False
        >>> [part.training for part in net]
        [True, False]
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
