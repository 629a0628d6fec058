"""Parameter groups: no decay for vectors, learning rates by part of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from .checks import nearest

__all__ = ["build_optimizer", "parameter_groups"]


def _longest_prefix(name: str, table: Mapping[str, float]) -> float | None:
    fitting = [prefix for prefix in table if name == prefix or name.startswith(prefix.rstrip(".") + ".")]
    return table[max(fitting, key=len)] if fitting else None


def parameter_groups(
    module: nn.Module,
    *,
    weight_decay: float | None = None,
    no_decay: Literal["1d"] | None = "1d",
    lr_scale: Mapping[str, float] | None = None,
    lr: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a module into optimiser groups.

    Parameters with the same settings share a group, in order of first appearance. The longest fitting prefix counts.

    Args:
        module: its parameters with ``requires_grad`` are taken.
        weight_decay: decay of the parameters that decay; None leaves it to the optimiser.
        no_decay: "1d" sets the decay of parameters with at most one dimension (biases, norms) to 0.
        lr_scale: factor on the optimiser's learning rate by prefix of the parameter's name, e.g. ``{"backbone": 0.1}``;
            applied by :func:`build_optimizer`.
        lr: learning rate by prefix, instead of the optimiser's.

    Returns:
        Groups with ``params`` and, where they differ from the optimiser's own, ``weight_decay``, ``lr``, ``lr_scale``.

    Raises:
        ValueError: a prefix that fits no parameter.

    Example:
        >>> groups = parameter_groups(nn.Linear(3, 2), weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (1, 0.0)]
    """
    lr_scale, lr = dict(lr_scale or {}), dict(lr or {})
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for prefix in (*lr_scale, *lr):
        if not any(_longest_prefix(name, {prefix: 1.0}) for name, _ in named):
            known = [name.rsplit(".", depth)[0] for name, _ in named for depth in range(name.count(".") + 1)]
            raise ValueError(f"no trainable parameter starts with {prefix!r}.{nearest(prefix, known)}")
    groups: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
    for name, parameter in named:
        bare = no_decay == "1d" and parameter.dim() <= 1
        settings = {
            "weight_decay": 0.0 if bare else weight_decay,
            "lr": _longest_prefix(name, lr),
            "lr_scale": _longest_prefix(name, lr_scale),
        }
        key = tuple((option, value) for option, value in settings.items() if value is not None)
        groups.setdefault(key, []).append(parameter)
    return [{"params": parameters, **dict(key)} for key, parameters in groups.items()]


def build_optimizer(factory: Callable[[Any], Optimizer], groups: Iterable[dict[str, Any]]) -> Optimizer:
    """Make an optimiser from groups and apply their ``lr_scale`` to its learning rate.

    Args:
        factory: makes the optimiser from parameters or groups.
        groups: those of :func:`parameter_groups`.
    """
    optimizer = factory([dict(group) for group in groups])
    for group in optimizer.param_groups:
        if "lr_scale" in group:
            group["lr"] *= group["lr_scale"]
    return optimizer
