"""Forward hooks that live for a phase and are always removed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .checks import nearest

__all__ = ["capture_outputs", "submodule"]


def submodule(module: nn.Module, name: str) -> nn.Module:
    """The submodule called ``name``.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    modules = dict(module.named_modules(remove_duplicate=False))  # a module may go by several names
    if name not in modules:
        known = [key for key in modules if key]
        raise ValueError(
            f"{type(module).__name__} has no submodule {name!r}.{nearest(name, known)} It has: {', '.join(known)}."
        )
    return modules[name]


class capture_outputs:  # noqa: N801 - used like a function: `with capture_outputs(module, names) as captured`
    """Keep the outputs of named submodules while the context is open.

    Args:
        module: any module.
        names: names as in ``module.named_modules()``.

    Attributes:
        outputs: the latest output by name; empty until the submodule ran.

    Raises:
        ValueError: a name that the module does not have.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> with capture_outputs(net, ["0"]) as captured:
        ...     _ = net(torch.zeros(2, 4))
        >>> captured.outputs["0"].shape
        torch.Size([2, 3])
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.outputs: dict[str, Any] = {}
        self._modules = {name: submodule(module, name) for name in names}
        self._handles: list[Any] = []

    def __enter__(self) -> capture_outputs:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._keep(name)))
        return self

    def __exit__(self, *exc: Any) -> None:
        while self._handles:
            self._handles.pop().remove()

    def clear(self) -> None:
        """Forget the outputs kept so far."""
        self.outputs.clear()

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs[name] = output

        return hook

    def __deepcopy__(self, memo: dict) -> None:
        return None  # hooks belong to one module: a copy carries none

    def __reduce__(self) -> Any:
        return (type(None), ())
