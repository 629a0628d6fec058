"""LARS: a trust ratio for every weight matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.checks import check_range

__all__ = ["LARS"]


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling with momentum.

    For a parameter p with gradient g, both of non-zero norm: ``g <- (g + wd p) * eta ||p|| / ||g + wd p||``; then
    ``v <- momentum v + g`` and ``p <- p - lr v``. The norms never leave the device.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017, in the variant of Barlow Twins' code.

    Args:
        params: parameters, named parameters, or groups of either.
        lr: learning rate.
        momentum: in [0, 1).
        weight_decay: added to the gradient of the parameters that decay.
        eta: trust coefficient.
        exclude_1d: no weight decay and no adaptation for parameters with at most one dimension (biases, norms).
        lr_1d: learning rate of these parameters; None for the same. They get a group of their own.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = LARS([weight], lr=1.0, weight_decay=0.0, eta=0.1)
        >>> weight.grad = torch.tensor([[0.0, 10.0]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[3.0000, 3.5000]])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        eta: float = 0.02,
        exclude_1d: bool = True,
        lr_1d: float | None = None,
    ) -> None:
        check_range("lr", lr, 0)
        check_range("momentum", momentum, 0, 1, high_open=True)
        check_range("weight_decay", weight_decay, 0)
        check_range("eta", eta, 0, low_open=True)
        if lr_1d is not None:
            check_range("lr_1d", lr_1d, 0)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "exclude_1d": exclude_1d,
        }
        super().__init__(_split(params, lr_1d), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update.

        Args:
            closure: evaluates the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            bare = [p for p in used if group["exclude_1d"] and _is_bare(p)]
            adapted = [p for p in used if not (group["exclude_1d"] and _is_bare(p))]
            self._update(bare, [p.grad for p in bare], group)
            self._update(adapted, _adapted_gradients(adapted, group["weight_decay"], group["eta"]), group)
        return loss

    def _update(self, params: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        if not params:
            return
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        velocities = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, gradients)
        torch._foreach_add_(params, velocities, alpha=-group["lr"])


def _adapted_gradients(params: list[Tensor], weight_decay: float, eta: float) -> list[Tensor]:
    if not params:
        return []
    gradients = [p.grad for p in params]
    decayed = torch._foreach_add(gradients, params, alpha=weight_decay)
    weight_norms, gradient_norms, norms = map(torch._foreach_norm, (params, gradients, decayed))
    result = []
    for g, d, weight, gradient, norm in zip(gradients, decayed, weight_norms, gradient_norms, norms, strict=True):
        # A zero weight or gradient gets neither decay nor adaptation.
        adapts = (weight > 0) & (gradient > 0)
        ratio = eta * weight / torch.where(norm > 0, norm, 1)  # the decay may cancel the gradient
        result.append(torch.where(adapts, d * ratio, g))
    return result


def _is_bare(member: Tensor | tuple[str, Tensor]) -> bool:
    """Whether a parameter, or a named one, is a bias, a norm or a scalar."""
    return (member[1] if isinstance(member, tuple) else member).dim() <= 1


def _split(params: Iterable[Any], lr_1d: float | None) -> list[Any]:
    params = list(params)
    if lr_1d is None:
        return params
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    split = []
    for group in groups:
        members = list(group["params"])
        split.append({**group, "params": [p for p in members if not _is_bare(p)]})
        split.append({**group, "params": [p for p in members if _is_bare(p)], "lr": lr_1d})
    return [group for group in split if group["params"]]
