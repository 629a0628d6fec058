"""One vector per text from a vector per token; right for padding on either side."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_choice, check_shape, values_visible
from ..core.losses import at_least_float32

__all__ = ["POOLINGS", "pool_hidden", "position_ids"]

POOLINGS = ("first", "last", "mean", "source_token")


def position_ids(mask: Tensor) -> Int[Tensor, "batch tokens"]:
    """Positions that count real tokens only, so that padding on the left does not shift a text.

    Args:
        mask: 1 (or True) at real tokens, [batch, tokens].

    Returns:
        int64 [batch, tokens]; padding before a text has position 0, padding after it the last one.

    Raises:
        ValueError: the mask is not a matrix.

    Example:
        >>> position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 2, 2]])
    """
    check_shape("mask", mask, "batch tokens")
    return (mask.long().cumsum(dim=1) - 1).clamp_min(0)


def pool_hidden(
    hidden: Float[Tensor, "batch tokens dim"],
    mask: Tensor,
    mode: Literal["first", "last", "mean", "source_token"] = "mean",
    token_id: int | None = None,
    input_ids: Int[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch dim"]:
    """Pool the hidden states of a text encoder.

    Args:
        hidden: [batch, tokens, dim].
        mask: 1 (or True) at real tokens, [batch, tokens].
        mode: "first" or "last" real token, "mean" over the real tokens, or "source_token": the first occurrence of
            ``token_id``.
        token_id: the token of "source_token".
        input_ids: the tokens, [batch, tokens]; for "source_token".

    Returns:
        [batch, dim]; a mean is in float32 or wider.

    Raises:
        ValueError: shapes do not fit, unknown mode, a text without a real token, "source_token" without its arguments
            or with a text that lacks the token.

    Example:
        >>> hidden = torch.arange(6.0).view(1, 3, 2)
        >>> mask = torch.tensor([[0, 1, 1]])
        >>> pool_hidden(hidden, mask), pool_hidden(hidden, mask, "first")
        (tensor([[3., 4.]]), tensor([[2., 3.]]))
    """
    check_choice("mode", mode, POOLINGS)
    sizes = check_shape("hidden", hidden, "batch tokens dim")
    batch, tokens = sizes["batch"], sizes["tokens"]
    check_shape("mask", mask, "batch tokens", batch=batch, tokens=tokens)
    real = mask != 0
    if values_visible(mask) and not real.any(dim=1).all():
        raise ValueError(f"mask: text {int((~real.any(dim=1)).nonzero()[0])} has no real token.")
    if mode == "mean":
        wide = at_least_float32(hidden)
        weight = real.to(wide.dtype)
        # masked_fill and not a product: what stands at padding may be infinite or NaN
        total = wide.masked_fill(~real[..., None], 0).sum(dim=1)
        return total / weight.sum(dim=1, keepdim=True).clamp_min(1)
    if mode == "source_token":
        if token_id is None or input_ids is None:
            raise ValueError("mode='source_token' needs token_id and input_ids.")
        check_shape("input_ids", input_ids, "batch tokens", batch=batch, tokens=tokens)
        wanted = real & (input_ids == token_id)
        if values_visible(wanted) and not wanted.any(dim=1).all():
            lacking = int((~wanted.any(dim=1)).nonzero()[0])
            raise ValueError(f"input_ids: text {lacking} has no token {token_id}.")
    else:
        wanted = real
    index = torch.arange(tokens, device=hidden.device)
    if mode == "last":
        position = torch.where(wanted, index, 0).amax(dim=1)
    else:
        position = torch.where(wanted, index, tokens - 1).amin(dim=1)
    return hidden.gather(1, position[:, None, None].expand(-1, 1, sizes["dim"])).squeeze(1)
