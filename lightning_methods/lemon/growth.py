"""One layer of a large network from the same layer of a small one, in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..core.checks import check_choice
from .functional import (
    ExpandMode,
    Split,
    expand_batch_norm,
    expand_conv,
    expand_layer_norm,
    expand_linear,
    expand_rms_norm,
    expand_vector,
)

__all__ = ["Growth", "NewBlock", "NewBlockInit", "check_equal", "check_new_block", "check_not_smaller", "norm_kind"]

NewBlock = Literal["cancel", "zero"]
NewBlockInit = Literal["copy", "aki"]


def check_equal(what: str, source: Any, target: Any) -> None:
    """Raise a ``ValueError`` unless both networks have the same of something."""
    if source != target:
        raise ValueError(f"source and target must have the same {what}, got {source!r} and {target!r}.")


def check_not_smaller(what: str, source: int, target: int) -> None:
    """Raise a ``ValueError`` if the target has less of something than the source."""
    if target < source:
        raise ValueError(f"the target's {what} must be at least the source's {source}, got {target}.")


def check_new_block(new_block: NewBlock | None, new_block_init: NewBlockInit) -> None:
    """Raise a ``ValueError`` unless the options of new blocks are known and go together."""
    if new_block is not None:
        check_choice("new_block", new_block, ("cancel", "zero"))
    check_choice("new_block_init", new_block_init, ("copy", "aki"))
    if new_block_init == "aki" and new_block == "cancel":
        raise ValueError("new_block_init='aki' makes copies that differ and do not cancel: it needs new_block='zero'.")


def norm_kind(layer: nn.Module) -> str:
    """ "layer", "rms" or, for everything else, the name of the class."""
    if isinstance(layer, nn.LayerNorm):
        return "layer"
    if isinstance(layer, nn.RMSNorm) or type(layer).__name__ in ("RmsNorm", "RmsNormFp32"):  # timm's
        return "rms"
    return type(layer).__name__


def _wide(value: Tensor, target: Tensor) -> Tensor:
    """A source's tensor on the target's device, in the wider of both dtypes, at least float32; sums are taken there."""
    dtype = torch.promote_types(torch.promote_types(value.dtype, target.dtype), torch.float32)
    return value.detach().to(target.device, dtype)


@dataclass(frozen=True)
class Growth:
    """How the layers of a network grow.

    Attributes:
        stream: pattern of the residual stream.
        normed: pattern of what the normalisation layers give out.
        split: how the columns of an input are divided among its copies.
        free_scale: factor of the free matrices, which are the target's present weights.
        exact_norm: whether the normalisation layers make up for the residue; without it they are repeated circularly.
        generator: source of the residue weights of the normalisation layers.
    """

    stream: ExpandMode = "average"
    normed: ExpandMode = "zero"
    split: Split = "projection"
    free_scale: float = 1.0
    exact_norm: bool = True
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        check_choice("split", self.split, get_args(Split))

    def vector(self, target: Tensor, source: Tensor, mode: ExpandMode, dim: int = -1, factor: float = 1.0) -> None:
        """A parameter that is expanded along one dimension, times a factor."""
        target.copy_(factor * expand_vector(_wide(source, target), target.shape[dim], mode, dim))

    def linear(
        self,
        target: nn.Module,
        source: nn.Module,
        rows: ExpandMode,
        columns: ExpandMode,
        following: nn.Module | None = None,
        silent: NewBlock | None = None,
    ) -> None:
        """A linear layer or a convolution.

        Args:
            target: changed in place; its weight is the free matrix.
            source: the small layer.
            rows: pattern of the output.
            columns: pattern of the input.
            following: its rows continue those of ``source`` (instead of ``rows``).
            silent: the output is made zero: "zero" by zero weights, "cancel" by weights that cancel over the copies.
        """
        bias = self._bias_of(target, source)
        self._matrix(
            (target.weight, target.bias),
            (source.weight, bias),
            rows,
            columns,
            None if following is None else (following.weight, following.bias),
            silent,
        )

    def packed(
        self, target: nn.Linear, source: nn.Linear, parts: int, columns: ExpandMode, following: nn.Linear | None = None
    ) -> None:
        """Several linear layers with circular rows that are stacked in one, e.g. queries, keys and values."""
        bias = self._bias_of(target, source)

        def parts_of(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
            biases = [None] * parts if bias is None else bias.chunk(parts)
            return list(zip(weight.chunk(parts), biases, strict=True))

        more = [None] * parts if following is None else parts_of(following.weight, following.bias)
        here, there = parts_of(target.weight, target.bias), parts_of(source.weight, bias)
        for new, old, extra in zip(here, there, more, strict=True):
            self._matrix(new, old, "circular", columns, extra, None)

    @staticmethod
    def _bias_of(target: nn.Module, source: nn.Module) -> Tensor | None:
        """The source's bias, zeros where only the target has one."""
        if source.bias is not None and target.bias is None:
            raise ValueError(f"the source's {source} has a bias, the target's {target} has none to hold it.")
        if source.bias is None and target.bias is not None:
            return source.weight.new_zeros(source.weight.shape[0])
        return source.bias

    def _matrix(
        self,
        target: tuple[Tensor, Tensor | None],
        source: tuple[Tensor, Tensor | None],
        rows: ExpandMode,
        columns: ExpandMode,
        following: tuple[Tensor, Tensor | None] | None,
        silent: NewBlock | None,
    ) -> None:
        free, free_bias = target
        weight = _wide(source[0], free)
        bias = None if source[1] is None or free_bias is None else _wide(source[1], free_bias)
        if silent == "zero":
            free.zero_()
            if free_bias is not None:
                free_bias.zero_()
            return
        if silent == "cancel":
            weight = torch.zeros_like(weight)
            bias = None if bias is None else torch.zeros_like(bias)
        if following is not None:
            count = free.shape[0] - weight.shape[0]
            index = torch.arange(count, device=free.device) % weight.shape[0]
            weight = torch.cat([weight, _wide(following[0], free)[index]])
            if bias is not None:
                extra = bias.new_zeros(len(bias)) if following[1] is None else _wide(following[1], free_bias)
                bias = torch.cat([bias, extra[index]])
        expand = expand_linear if free.dim() == 2 else expand_conv
        grown, grown_bias = expand(
            weight, bias, free, out_mode=rows, in_mode=columns, split=self.split, free_scale=self.free_scale
        )
        free.copy_(grown)
        if grown_bias is not None:
            free_bias.copy_(grown_bias)

    def scaled(
        self,
        target: tuple[nn.Module, Tensor | None],
        source: tuple[nn.Module, Tensor | None],
        following: nn.Module | None = None,
        silent: NewBlock | None = None,
    ) -> None:
        """A linear layer into the residual stream with a factor for each output, as LayerScale has.

        Args:
            target: layer and factors [N] (None without).
            source: layer and factors [D] (None without).
            following: its rows continue those of ``source``.
            silent: see :meth:`linear`.
        """
        (layer, gamma), (small, old) = target, source
        if gamma is None and old is None:
            self.linear(layer, small, self.stream, "circular", following, silent)
            return
        bias = self._bias_of(layer, small)
        weight = _wide(small.weight, layer.weight)
        bias = None if bias is None else _wide(bias, layer.weight)
        factor = weight.new_ones(weight.shape[0]) if old is None else _wide(old, layer.weight)
        scaled = (weight * factor[:, None], None if bias is None else bias * factor)
        here = (layer.weight, layer.bias)
        if gamma is None:
            self._matrix(here, scaled, self.stream, "circular", None, silent)
            return
        more = None if following is None else (following.weight, following.bias)
        if self.stream == "circular":
            self._matrix(here, (weight, bias), "circular", "circular", more, silent)
            self.vector(gamma, factor, "circular")
            return
        # Copies keep rows and factors; the residue takes the pattern's value of the scaled rows, at factor 1.
        size, (copies, residue) = len(gamma), divmod(len(gamma), len(factor))

        def grow(plain: Tensor, product: Tensor) -> Tensor:
            rest = expand_vector(product, size, self.stream, 0)[size - residue :]
            return torch.cat([*[plain] * copies, rest])

        rows = (grow(weight, scaled[0]), None if bias is None else grow(bias, scaled[1]))
        self._matrix(here, rows, "circular", "circular", None, silent)
        gamma.copy_(torch.cat([*[factor] * copies, factor.new_ones(residue)]))

    def norm(self, target: nn.Module, source: nn.Module, factor: float = 1.0) -> None:
        """A LayerNorm or RMSNorm on the residual stream; what is no normalisation (Identity) has to be so in both.

        Args:
            target: changed in place, its ``eps`` too.
            source: the small layer.
            factor: of weight and bias.

        Raises:
            ValueError: the kinds differ, or the layer cannot be expanded without loss.
        """
        kind = norm_kind(source)
        check_equal("kind of normalisation layer", kind, norm_kind(target))
        if isinstance(source, nn.Identity):
            return
        if kind not in ("layer", "rms"):
            raise ValueError(f"a LayerNorm or an RMSNorm can be expanded, got {kind}.")
        old, new = source.normalized_shape[0], target.normalized_shape[0]
        check_not_smaller("width of a normalisation layer", old, new)
        needed = "average" if kind == "layer" else "zero"
        if self.exact_norm and new % old and self.stream != needed:
            raise ValueError(f"a {kind} norm from {old} to {new} needs a stream that is {needed}-expanded.")
        check_equal("parameters of normalisation layers", source.weight is None, target.weight is None)
        if source.weight is None:
            if new % old and self.exact_norm:
                raise ValueError(f"a normalisation layer without weights grows to multiples of {old} only, got {new}.")
            target.eps = source.eps
            return
        weight = _wide(source.weight, target.weight)
        bias = getattr(source, "bias", None)
        bias = None if bias is None else _wide(bias, target.weight)
        # nn.RMSNorm's None is the machine precision of the input.
        eps = torch.finfo(target.weight.dtype).eps if source.eps is None else source.eps
        if not self.exact_norm:
            weight = expand_vector(weight, new)
            bias = None if bias is None else expand_vector(bias, new)
        elif kind == "layer":
            weight, bias, eps = expand_layer_norm(weight, bias, eps, new, generator=self.generator)
        else:
            weight, eps = expand_rms_norm(weight, eps, new, generator=self.generator)
        target.weight.copy_(factor * weight)
        if getattr(target, "bias", None) is not None:
            target.bias.copy_(factor * bias if bias is not None else torch.zeros_like(weight))
        elif bias is not None:
            raise ValueError("the source's normalisation layer has a bias, the target's has none to hold it.")
        target.eps = eps

    def batch_norm(self, target: nn.Module, source: nn.Module, silent: bool = False) -> None:
        """A BatchNorm with circular channels; ``silent`` makes its output zero."""
        if not (isinstance(source, nn.BatchNorm2d) and isinstance(target, nn.BatchNorm2d)):
            raise ValueError(f"BatchNorm2d can be expanded, got {type(source).__name__} and {type(target).__name__}.")
        names = ("weight", "bias", "running_mean", "running_var")
        own, old = ([getattr(layer, name) for name in names] for layer in (target, source))
        if any(value is None for value in (*own, *old)):
            raise ValueError("a BatchNorm needs weight, bias and running statistics to be expanded.")
        wide = [_wide(value, mine) for value, mine in zip(old, own, strict=True)]
        for mine, value in zip(own, expand_batch_norm(*wide, own[0].shape[0]), strict=True):
            mine.copy_(value)
        target.num_batches_tracked.copy_(source.num_batches_tracked)
        target.eps = source.eps
        if silent:
            target.weight.zero_()
            target.bias.zero_()
