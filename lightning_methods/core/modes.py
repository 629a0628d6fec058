"""Training and eval mode for a phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(*modules: nn.Module, grad: bool = False) -> Iterator[None]:
    """Eval mode and no gradient inside; afterwards every submodule is in the mode that it was in.

    ``module.train(before)`` would not do: it wakes submodules that are frozen in eval mode.

    Args:
        *modules: any modules.
        grad: leave gradients as they are outside.

    Example:
        >>> net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
        >>> with evaluating(net):
        ...     net[0].training
        False
        >>> [part.training for part in net]
        [True, False]
    """
    modes = {part: part.training for module in modules for part in module.modules()}
    for module in modules:
        module.eval()
    try:
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode
