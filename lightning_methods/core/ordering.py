"""Ranks and top-k with rules for ties that do not depend on the device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .checks import check_choice, check_range

__all__ = ["ranks", "stable_topk"]


# dtypes whose values leave room for a position in 64 bits
_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32)


def _ascending_order(x: Tensor) -> Tensor:
    """``x`` with NaN as the largest value, in a dtype that can be compared."""
    x = x.detach()
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    return torch.where(torch.isnan(x), torch.inf, x) if x.is_floating_point() else x


def stable_topk(x: Tensor, k: int, dim: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The ``k`` largest (or smallest) entries along a dimension, in order; of equal entries those with the lower index.

    ``torch.topk`` promises nothing about ties, so its choice differs between devices and versions. NaN counts as
    infinite.

    Args:
        x: values, any shape.
        k: how many, between 0 and the size of the dimension.
        dim: the dimension.
        largest: largest or smallest entries.

    Returns:
        ``(values, indices)``, shaped as ``x`` with size ``k`` along ``dim``; the values carry gradient.

    Raises:
        ValueError: ``k`` is out of range.

    Example:
        >>> stable_topk(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 2)[1]
        tensor([1, 2])
    """
    size = x.shape[dim]
    check_range("k", k, 0, size)
    order = _ascending_order(x).movedim(dim, -1)
    if order.dtype in _NARROW and size < 2**31:
        indices = _topk_of_keys(order, k, largest)
    elif k == 0 or 4 * k >= size:  # selection saves nothing over sorting
        indices = torch.sort(order, dim=-1, descending=largest, stable=True).indices[..., :k]
    else:
        indices = _topk_in_two_steps(order, k, largest)
    indices = indices.movedim(-1, dim)
    return x.gather(dim, indices), indices


def _topk_of_keys(order: Tensor, k: int, largest: bool) -> Tensor:
    """Indices by one selection among integers that hold the value above and the position below: no two are equal."""
    if order.is_floating_point():
        bits = (order.float() + 0.0).contiguous().view(torch.int32)  # + 0.0: the two zeros are one value
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats grow the other way round
    size = order.shape[-1]
    position = torch.arange(size, device=order.device)
    keys = (order.long() << 32) | (size - 1 - position if largest else position)
    return torch.topk(keys, k, dim=-1, largest=largest, sorted=True).indices


def _topk_in_two_steps(order: Tensor, k: int, largest: bool) -> Tensor:
    """Indices for wide dtypes: the k-th value first, then the first of the entries equal to it fill what is left."""
    size = order.shape[-1]
    kth = torch.topk(order, k, dim=-1, largest=largest).values[..., -1:]
    beyond = order > kth if largest else order < kth
    tied = order == kth
    needed = k - beyond.sum(dim=-1, keepdim=True)
    chosen = beyond | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= needed))
    position = torch.where(chosen, torch.arange(size, device=order.device, dtype=torch.int32), size)
    indices = torch.topk(position, k, dim=-1, largest=False).values.sort(dim=-1).values.long()
    best_first = torch.sort(order.gather(-1, indices), dim=-1, descending=largest, stable=True).indices
    return indices.gather(-1, best_first)


def ranks(x: Tensor, method: Literal["average", "max", "min", "ordinal"] = "average", dim: int = 0) -> Tensor:
    """Ranks 1..n along a dimension, without gradient, in O(n log n).

    Args:
        x: values, any real dtype, at least one dimension.
        method: what equal values get: "average", "max" (``#{j: x_j <= x_i}``) or "min" of their ranks, or "ordinal",
            their order of appearance.
        dim: the dimension that is ranked.

    Returns:
        Ranks, shaped as ``x``; float64 for float64 input, else float32 (exact up to n = 2^23).

    Raises:
        ValueError: unknown method.

    Example:
        >>> ranks(torch.tensor([0.3, 0.1, 0.3]))
        tensor([2.5000, 1.0000, 2.5000])
    """
    check_choice("method", method, ("average", "max", "min", "ordinal"))
    values = _ascending_order(x).movedim(dim, -1).contiguous()
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    ordered, order = torch.sort(values, dim=-1, stable=True)
    if method == "ordinal":
        positions = torch.arange(1, values.shape[-1] + 1, device=x.device).expand_as(order)
        result = torch.empty_like(order).scatter_(-1, order, positions)
    elif method == "max":
        result = torch.searchsorted(ordered, values, right=True)
    else:
        result = torch.searchsorted(ordered, values, right=False) + 1
        if method == "average":
            result = (result + torch.searchsorted(ordered, values, right=True)).to(dtype) / 2
    return result.to(dtype).movedim(-1, dim)
