"""Argument checks: every error names the argument, what was given and what was expected.

Shapes and dtypes are always checked. Values are checked on CPU tensors; on an accelerator reading them would wait for
the device, so there they are checked only with ``validate=True``. Under ``torch.compile`` no value is ever looked at.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "check_choice",
    "check_finite",
    "check_floating",
    "check_labels",
    "check_probabilities",
    "check_range",
    "check_same_rows",
    "check_shape",
    "nearest",
    "values_visible",
]


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the choice that looks most like ``word``, or an empty string."""
    match = difflib.get_close_matches(str(word), [str(choice) for choice in choices], n=1)
    return f" Did you mean {match[0]!r}?" if match else ""


def values_visible(x: Tensor, validate: bool = False) -> bool:
    """Whether the values of ``x`` may be read: on the CPU or on request, and never while compiling."""
    return not torch.compiler.is_compiling() and (validate or x.device.type == "cpu")


def check_shape(name: str, x: Tensor, spec: str, **sizes: int) -> dict[str, int]:
    """Check the number of dimensions of a tensor and the sizes that are known.

    Args:
        name: the argument's name, for the message.
        x: the tensor.
        spec: names of the dimensions, e.g. ``"batch classes"``; a leading or trailing ``...`` stands for any number.
        **sizes: the sizes that are known, by dimension name.

    Returns:
        The size of every named dimension.

    Raises:
        TypeError: ``x`` is not a tensor.
        ValueError: the number of dimensions or a size differs.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor of shape [{_expected(spec, sizes)}], got {type(x).__name__}.")
    names = spec.split()
    shape = tuple(x.shape)
    if "..." in names:
        position = names.index("...")
        trailing = len(names) - position - 1
        fits = len(shape) >= len(names) - 1
        dims = dict(zip(names[:position], shape, strict=False))
        if trailing:
            dims.update(zip(names[position + 1 :], shape[len(shape) - trailing :], strict=False))
    else:
        fits = len(shape) == len(names)
        dims = dict(zip(names, shape, strict=False))
    if not fits or any(dims[key] != size for key, size in sizes.items() if key in dims):
        raise ValueError(f"{name} must have shape [{_expected(spec, sizes)}], got {list(shape)}.")
    return dims


def _expected(spec: str, sizes: dict[str, int]) -> str:
    return ", ".join(f"{name}={sizes[name]}" if name in sizes else name for name in spec.split())


def check_same_rows(**tensors: Tensor) -> int:
    """Check that all tensors have the same first dimension and return it.

    Raises:
        ValueError: the numbers of rows differ, or a tensor has no dimension.
    """
    rows = {name: (x.shape[0] if x.dim() else None) for name, x in tensors.items()}
    if len(set(rows.values())) != 1 or None in rows.values():
        shapes = ", ".join(f"{name} {list(tensors[name].shape)}" for name in rows)
        raise ValueError(f"the arguments must have the same number of rows, got {shapes}.")
    return next(iter(rows.values()))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ``ValueError`` that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}; got {value!r}.{nearest(value, choices)}")


def check_range(
    name: str,
    value: float,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise a ``ValueError`` unless ``value`` is a finite number in the interval.

    Args:
        name: the argument's name.
        value: the number.
        low: lower end.
        high: upper end.
        low_open: whether ``low`` itself is excluded.
        high_open: whether ``high`` itself is excluded.
    """
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (math.isfinite(value) and above and below):
        left = "(" if low_open or low == -math.inf else "["
        right = ")" if high_open or high == math.inf else "]"
        raise ValueError(f"{name} must be a finite number in {left}{low}, {high}{right}, got {value}.")


def check_floating(name: str, x: Tensor) -> None:
    """Raise a ``ValueError`` unless ``x`` has a real floating dtype."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating point tensor, got dtype {x.dtype}.")


def check_finite(name: str, x: Tensor, *, validate: bool = False) -> None:
    """Raise a ``ValueError`` if ``x`` has a NaN or an infinite entry (values: see the module's docstring)."""
    if x.is_floating_point() and values_visible(x, validate) and not torch.isfinite(x).all():
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"{name} must be finite, but {bad} of its {x.numel()} entries are NaN or infinite.")


def check_labels(
    name: str,
    y: Tensor,
    num_classes: int,
    *,
    batch: int | None = None,
    ignore: int | None = None,
    validate: bool = False,
) -> None:
    """Check class indices: an integer vector with values in ``0 .. num_classes - 1``.

    Args:
        name: the argument's name.
        y: class indices, shape [batch].
        num_classes: number of classes.
        batch: the expected length, if known.
        ignore: a value that is allowed besides the classes (e.g. -1 for unknown).
        validate: look at the values on an accelerator too.

    Raises:
        ValueError: another shape, dtype or value.
    """
    check_shape(name, y, "batch", **({} if batch is None else {"batch": batch}))
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"{name} must hold class indices of an integer dtype, got dtype {y.dtype}.")
    if not values_visible(y, validate):
        return
    outside = (y < 0) | (y >= num_classes)
    if ignore is not None:
        outside &= y != ignore
    if outside.any():
        raise ValueError(f"{name} must be in 0..{num_classes - 1}, got {int(y[outside][0])}.")


def check_probabilities(name: str, p: Tensor, *, atol: float = 1e-3, validate: bool = False) -> None:
    """Check that the last dimension of ``p`` holds probabilities: non-negative, summing to 1 within ``atol``.

    Raises:
        ValueError: not floating point, a negative or non-finite entry, or a row that sums to something else.
    """
    check_floating(name, p)
    if not values_visible(p, validate):
        return
    check_finite(name, p, validate=validate)
    sums = p.sum(dim=-1)
    if (p < 0).any() or ((sums - 1).abs() > atol).any():
        worst = sums.flatten()[(sums - 1).abs().argmax()].item() if sums.numel() else float("nan")
        raise ValueError(
            f"{name} must hold probabilities (non-negative rows that sum to 1 within {atol}); "
            f"smallest entry {p.min().item():.4g}, worst row sum {worst:.4g}. Apply softmax to logits first."
        )
