"""Second copies of a network: frozen teachers and momentum (EMA) targets."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import nn

from .checks import check_range

__all__ = ["cosine_momentum", "frozen_copy", "momentum_update"]


def frozen_copy(module: nn.Module) -> nn.Module:
    """A deep copy whose parameters take no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def momentum_update(
    online: nn.Module | Iterable[nn.Parameter], target: nn.Module | Iterable[nn.Parameter], momentum: float
) -> None:
    """Move the target's parameters towards the online ones: ``target <- momentum * target + (1 - momentum) * online``.

    Parameters only: buffers (BatchNorm statistics) stay the target's own.

    Args:
        online: the trained network, or its parameters.
        target: the copy, with parameters in the same order.
        momentum: in [0, 1].

    Raises:
        ValueError: momentum outside [0, 1], or the parameters do not correspond.
    """
    check_range("momentum", momentum, 0, 1)
    sources = [p.detach() for p in (online.parameters() if isinstance(online, nn.Module) else online)]
    targets = list(target.parameters() if isinstance(target, nn.Module) else target)
    if [p.shape for p in sources] != [p.shape for p in targets]:
        raise ValueError(f"online and target differ: {len(sources)} and {len(targets)} parameters, or other shapes.")
    if targets:
        torch._foreach_lerp_(targets, sources, 1 - momentum)


def cosine_momentum(step: int, total_steps: int, start: float, end: float) -> float:
    """Momentum at ``step`` of a half-cosine from ``start`` (step 0) to ``end`` (step ``total_steps``)."""
    progress = min(step / max(total_steps, 1), 1.0)
    return end - (end - start) * (math.cos(math.pi * progress) + 1) / 2
