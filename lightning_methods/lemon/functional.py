"""Growing single layers without changing what they compute: the tensor operations of Lossless Model Expansion.

A layer of the small network has D inputs or outputs, the same layer of the large one N >= D. Every expansion is
``N // D`` verbatim copies and then ``N % D`` further entries, the residue, by one of three patterns: "circular"
(the first entries once more), "average" (their mean) and "zero".
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ..core.checks import check_choice, check_floating, check_range, check_shape
from ..core.losses import at_least_float32

__all__ = [
    "DepthMode",
    "ExpandMode",
    "Split",
    "depth_map",
    "expand_batch_norm",
    "expand_conv",
    "expand_layer_norm",
    "expand_linear",
    "expand_rms_norm",
    "expand_vector",
]

ExpandMode = Literal["circular", "average", "zero"]
Split = Literal["projection", "complement", "even"]
DepthMode = Literal["interpolate", "stack"]


def _check_size(name: str, size: int, least: int) -> None:
    if size < least:
        raise ValueError(
            f"{name} must be at least {least}, the size of the source: an expansion never shrinks; {size}."
        )


def expand_vector(
    x: Float[Tensor, "..."], size: int, mode: ExpandMode = "circular", dim: int = -1
) -> Float[Tensor, "..."]:
    """Expand one dimension: verbatim copies, then the residue.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4 (vector average, zero and circular
    expansion).

    Args:
        x: any shape; dimension ``dim`` has D entries.
        size: N >= D.
        mode: the residue: "circular" repeats the first entries, "average" repeats the mean over the D entries, "zero".
        dim: the dimension to expand.

    Returns:
        ``x`` with N entries in that dimension, same dtype.

    Raises:
        ValueError: N < D, an unknown mode, an integer dtype, or no such dimension.

    Example:
        >>> expand_vector(torch.tensor([1.0, 3.0]), 5, "average")
        tensor([1., 3., 1., 3., 2.])
    """
    check_choice("mode", mode, get_args(ExpandMode))
    check_floating("x", x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of x, got {dim}.")
    old = x.shape[dim]
    check_range("the size of x in dim", old, 1)
    _check_size("size", size, old)
    copies, residue = divmod(size, old)
    parts = [x] * copies
    if residue and mode == "circular":
        parts.append(x.narrow(dim, 0, residue))
    elif residue:
        shape = list(x.shape)
        shape[dim] = residue
        value = at_least_float32(x).mean(dim=dim, keepdim=True).to(x.dtype) if mode == "average" else x.new_zeros(())
        parts.append(value.expand(shape))
    return torch.cat(parts, dim=dim)


def expand_linear(
    weight: Float[Tensor, "out_old in_old"],
    bias: Float[Tensor, " out_old"] | None,
    free: Float[Tensor, "out_new in_new"],
    *,
    out_mode: ExpandMode = "circular",
    in_mode: ExpandMode = "circular",
    split: Split = "projection",
    free_scale: float = 1.0,
) -> tuple[Float[Tensor, "out_new in_new"], Float[Tensor, " out_new"] | None]:
    """Expand a linear layer whose input is expanded by ``in_mode``, so that its output is expanded by ``out_mode``.

    The rows are expanded as vectors. The column of an old input is divided among the copies of that input; any division
    whose sum is the old column computes the same, and the free matrix (usually the random weight of the new layer) says
    which one. Unequal parts let the copies receive unequal gradients.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4 (matrix expansions).

    Args:
        weight: [o, i].
        bias: [o], or None.
        free: F, [O, I] with O >= o and I >= i; taken in the dtype of ``weight``.
        out_mode: pattern of the rows.
        in_mode: pattern of the layer's input. The residue columns of an average-expanded input are those of F minus
            their row mean (they sum to zero), of a zero-expanded input those of F.
        split: "projection" is the division nearest to F; "complement" gives the last copy of an input its column of
            ``free_scale * F`` and projects for the others; "even" gives equal parts, F := 0 (Net2Net, bert2BERT).
        free_scale: factor of F.

    Returns:
        Weight [O, I] and bias [O] (None without one), in the dtype of ``weight``.

    Raises:
        ValueError: a target size is smaller than the source's, or shapes, dtypes or options do not fit.

    Example:
        >>> weight, _ = expand_linear(torch.ones(1, 2), None, torch.tensor([[1.0, 2.0, 3.0]]))
        >>> weight  # the first input has two copies, whose columns 0 + (1 - 1), 1 + (3 - 2) sum to 1
        tensor([[-0.5000,  1.0000,  1.5000]])
    """
    check_shape("weight", weight, "o i")
    check_shape("free", free, "O I")
    return _expand(weight, bias, free, out_mode, in_mode, split, free_scale)


def expand_conv(
    weight: Float[Tensor, "out_old in_old *kernel"],
    bias: Float[Tensor, " out_old"] | None,
    free: Float[Tensor, "out_new in_new *kernel"],
    *,
    out_mode: ExpandMode = "circular",
    in_mode: ExpandMode = "circular",
    split: Split = "projection",
    free_scale: float = 1.0,
) -> tuple[Float[Tensor, "out_new in_new *kernel"], Float[Tensor, " out_new"] | None]:
    """Expand a convolution (without groups): :func:`expand_linear` on its channels, at every kernel position.

    Args:
        weight: [o, i, *kernel].
        bias: [o], or None.
        free: [O, I, *kernel], the same kernel.
        out_mode: pattern of the output channels.
        in_mode: pattern of the input channels.
        split: division of a channel among its copies.
        free_scale: factor of ``free``.

    Returns:
        Weight [O, I, *kernel] and bias [O], in the dtype of ``weight``.

    Raises:
        ValueError: as :func:`expand_linear`, or the kernels differ.
    """
    check_shape("weight", weight, "o i ...")
    check_shape("free", free, "O I ...")
    if weight.dim() < 3 or weight.shape[2:] != free.shape[2:]:
        raise ValueError(
            f"weight and free must be [out, in, *kernel] with the same kernel, got {list(weight.shape)} and "
            f"{list(free.shape)}."
        )
    return _expand(weight, bias, free, out_mode, in_mode, split, free_scale)


def _expand(
    weight: Tensor, bias: Tensor | None, free: Tensor, out_mode: str, in_mode: str, split: str, free_scale: float
) -> tuple[Tensor, Tensor | None]:
    """Rows as vectors, then the columns; any trailing dimensions."""
    check_choice("in_mode", in_mode, get_args(ExpandMode))
    check_choice("split", split, get_args(Split))
    check_range("free_scale", free_scale)
    check_floating("weight", weight)
    check_floating("free", free)
    rows = free.shape[0]
    _check_size("the number of rows of free", rows, weight.shape[0])
    _check_size("the number of columns of free", free.shape[1], weight.shape[1])
    if bias is not None:
        check_shape("bias", bias, "o", o=weight.shape[0])
        bias = expand_vector(bias, rows, out_mode)
    wide = at_least_float32(expand_vector(weight, rows, out_mode, dim=0))
    return _divide(wide, free.to(wide), in_mode, split, free_scale).to(weight.dtype), bias


def _divide(weight: Tensor, free: Tensor, in_mode: str, split: str, scale: float) -> Tensor:
    """Columns [O, I, ...] from those of the old inputs [O, i, ...]."""
    old, new = weight.shape[1], free.shape[1]
    copies = -(-new // old) if in_mode == "circular" else new // old
    used = min(copies * old, new)  # columns that belong to a copy of an input
    # Copy j of input k is column j * old + k; of the last round some may be missing.
    blocks = F.pad(free[:, :used].movedim(1, -1), (0, copies * old - used)).unflatten(-1, (copies, old))
    blocks = blocks.movedim((-2, -1), (1, 2))  # [O, copies, i, ...]
    shape = (1, copies, old, *(1,) * (weight.dim() - 2))
    present = (torch.arange(copies * old, device=free.device) < used).view(shape)
    count = present.sum(dim=1, keepdim=True)
    last = torch.arange(copies, device=free.device).view(1, -1, *(1,) * (weight.dim() - 1)) == count - 1
    fixed = last & (count > 1) if split == "complement" else torch.zeros_like(present)
    moving = present & ~fixed
    if split == "even":
        blocks = torch.zeros_like(blocks)
    kept = scale * blocks * fixed
    if split == "projection":
        blocks = scale * blocks
    number = moving.sum(dim=1, keepdim=True)
    mean = (blocks * moving).sum(dim=1, keepdim=True) / number
    share = (weight.unsqueeze(1) - kept.sum(dim=1, keepdim=True)) / number
    divided = torch.where(fixed, kept, share + (blocks - mean)).flatten(1, 2)[:, :used]
    if used == new:
        return divided
    residue = free[:, used:] * (0.0 if split == "even" else scale)
    if in_mode == "average":
        residue = residue - residue.mean(dim=1, keepdim=True)
    return torch.cat([divided, residue], dim=1)


def _residue_weights(
    weight: Tensor, size: int, free: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, float]:
    """Weights of a normalisation layer and the share s of copies among its inputs."""
    check_shape("weight", weight, "features")
    check_floating("weight", weight)
    old = weight.shape[0]
    check_range("the size of weight", old, 1)
    _check_size("size", size, old)
    copies, residue = divmod(size, old)
    share = copies * old / size
    if free is not None:
        check_shape("free", free, "size", size=size)
        rest = free[size - residue :].to(weight)
    else:
        device = weight.device if generator is None else generator.device
        rest = 2 * torch.rand(residue, generator=generator, device=device, dtype=torch.float32) - 1
    wide = at_least_float32(weight)
    return (math.sqrt(share) * torch.cat([wide.repeat(copies), rest.to(wide)])).to(weight.dtype), share


def expand_layer_norm(
    weight: Float[Tensor, " features"],
    bias: Float[Tensor, " features"] | None,
    eps: float,
    size: int,
    free: Float[Tensor, " size"] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, " size"], Float[Tensor, " size"] | None, float]:
    """Expand a LayerNorm whose input is average-expanded, so that its output is zero-expanded.

    The mean of an average-expanded vector is that of the old one, its variance s = m D / N of the old one's, because
    the residue adds nothing. With eps* = s eps and weights of sqrt(s) times the old ones the copies are the old output;
    the residue is the mean, which centring makes zero, whatever its weight.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4 (LayerNorm).

    Args:
        weight: [D].
        bias: [D], or None.
        eps: of the old layer.
        size: N >= D.
        free: the residue weights are sqrt(s) times its last entries, [N]; None draws them from U(-1, 1).
        generator: source of the random numbers.

    Returns:
        Weight [N], bias [N] and eps of the new layer. The eps is no parameter: it has to be set on the module.

    Raises:
        ValueError: N < D, or shapes or dtypes do not fit.

    Example:
        >>> weight, bias, eps = expand_layer_norm(torch.ones(2), torch.ones(2), 1e-5, 4)
        >>> weight, bias, eps
        (tensor([1., 1., 1., 1.]), tensor([1., 1., 1., 1.]), 1e-05)
    """
    check_range("eps", eps, 0)
    new, share = _residue_weights(weight, size, free, generator)
    if bias is not None:
        check_shape("bias", bias, "features", features=weight.shape[0])
        bias = expand_vector(bias, size, "zero")
    return new, bias, share * eps


def expand_rms_norm(
    weight: Float[Tensor, " features"],
    eps: float,
    size: int,
    free: Float[Tensor, " size"] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, " size"], float]:
    """Expand an RMSNorm whose input is zero-expanded, so that its output is zero-expanded.

    The mean square of a zero-expanded vector is s = m D / N of the old one's: the rule of :func:`expand_layer_norm`
    without a centre.

    Args:
        weight: [D].
        eps: of the old layer.
        size: N >= D.
        free: the residue weights are sqrt(s) times its last entries, [N]; None draws them from U(-1, 1).
        generator: source of the random numbers.

    Returns:
        Weight [N] and eps of the new layer.

    Raises:
        ValueError: N < D, or shapes or dtypes do not fit.
    """
    check_range("eps", eps, 0)
    new, share = _residue_weights(weight, size, free, generator)
    return new, share * eps


def expand_batch_norm(
    weight: Float[Tensor, " channels"],
    bias: Float[Tensor, " channels"],
    running_mean: Float[Tensor, " channels"],
    running_var: Float[Tensor, " channels"],
    size: int,
) -> tuple[Float[Tensor, " size"], Float[Tensor, " size"], Float[Tensor, " size"], Float[Tensor, " size"]]:
    """Expand a BatchNorm whose input is circularly expanded: every copy has the statistics of its channel.

    Args:
        weight: [D].
        bias: [D].
        running_mean: [D].
        running_var: [D].
        size: N >= D.

    Returns:
        The four in the same order, [N] each.

    Raises:
        ValueError: N < D, or shapes or dtypes do not fit.
    """
    channels = check_shape("weight", weight, "channels")["channels"]
    for name, value in (("bias", bias), ("running_mean", running_mean), ("running_var", running_var)):
        check_shape(name, value, "channels", channels=channels)
    grown = [expand_vector(value, size) for value in (weight, bias, running_mean, running_var)]
    return grown[0], grown[1], grown[2], grown[3]


def depth_map(source_depth: int, target_depth: int, mode: DepthMode = "interpolate") -> list[tuple[int, bool]]:
    """Which source block every block of the target comes from, and whether it is new (the identity at the start).

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4 (depth).

    Args:
        source_depth: blocks of the source, l_s.
        target_depth: blocks of the target, l_t >= l_s.
        mode: "interpolate" puts the new blocks behind the block they copy: every source block has ``l_t // l_s``
            copies and the last ``l_t % l_s`` source blocks one more, the first of them is not new; "stack" puts the
            whole source first and then copies of it in order.

    Returns:
        ``(source index, is new)`` for every block of the target.

    Raises:
        ValueError: the target is shallower, a depth is below 1, or the mode is unknown.

    Example:
        >>> depth_map(2, 3)
        [(0, False), (1, False), (1, True)]
        >>> depth_map(2, 3, "stack")
        [(0, False), (1, False), (0, True)]
    """
    check_choice("mode", mode, get_args(DepthMode))
    check_range("source_depth", source_depth, 1)
    if target_depth < source_depth:
        raise ValueError(f"target_depth must be at least source_depth={source_depth}, got {target_depth}.")
    if mode == "stack":
        return [(j % source_depth, j >= source_depth) for j in range(target_depth)]
    copies, rest = divmod(target_depth, source_depth)
    runs = [copies + (k >= source_depth - rest) for k in range(source_depth)]
    return [(k, copy > 0) for k, run in enumerate(runs) for copy in range(run)]
