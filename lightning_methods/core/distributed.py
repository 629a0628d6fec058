"""Statistics over the global batch: collectives with the right gradient, all of them identities on one process.

Under DDP every rank computes the same loss on the gathered batch and DDP *averages* the gradients of the ranks. For
the average to be the gradient that one process with the whole batch would get, the backward of a gather has to *sum*
over the ranks what each of them sends to the local slice: ``1/W * sum_r W * g_r = sum_r g_r``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

__all__ = [
    "any_over_ranks",
    "broadcast",
    "gather",
    "gather_slice",
    "mean_over_ranks",
    "rank",
    "sum_over_ranks",
    "world_size",
]


def world_size() -> int:
    """Number of processes, 1 without ``torch.distributed``."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Index of this process, 0 without ``torch.distributed``."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Gather(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        parts = [torch.empty_like(x) for _ in range(world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.narrow(0, rank() * ctx.rows, ctx.rows)


class _Sum(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def _row_counts(rows: int, device: torch.device) -> list[int]:
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([rows], dtype=torch.int64, device=device))
    return torch.cat(counts).tolist()


def gather(x: Tensor, grad: bool = True, *, equal_rows: bool = False) -> Tensor:
    """Concatenate the rows of all ranks, in rank order.

    Args:
        x: local rows, shape [n, ...]; every rank has the same trailing shape and dtype, ``n`` may differ.
        grad: let gradients flow back to the rank that owns a row (summed over the ranks that used it).
        equal_rows: promise that ``n`` is the same on all ranks (``drop_last``), which saves a host synchronisation.

    Returns:
        The global rows, shape [sum of n, ...]; ``x`` itself on one process.
    """
    if world_size() == 1:
        return x if grad else x.detach()
    as_bool = x.dtype == torch.bool
    local = (x.to(torch.uint8) if as_bool else x).contiguous()
    counts = None if equal_rows else _row_counts(x.shape[0], x.device)
    most = x.shape[0] if counts is None else max(counts)
    if most > local.shape[0]:
        local = torch.cat([local, local.new_zeros(most - local.shape[0], *local.shape[1:])])
    everything = _Gather.apply(local) if grad else _Gather.apply(local.detach())
    if counts is not None and min(counts) < most:
        everything = torch.cat([everything[r * most : r * most + n] for r, n in enumerate(counts)])
    return everything.to(torch.bool) if as_bool else everything


def gather_slice(x: Tensor, rows: int) -> Tensor:
    """Cut this rank's rows out of a tensor that ``gather`` made.

    Args:
        x: global rows, shape [N, ...].
        rows: the number of local rows.

    Returns:
        The local rows, shape [rows, ...].
    """
    if world_size() == 1:
        return x
    if rows * world_size() == x.shape[0]:
        return x.narrow(0, rank() * rows, rows)
    counts = _row_counts(rows, x.device)
    return x.narrow(0, sum(counts[: rank()]), rows)


def sum_over_ranks(x: Tensor, grad: bool = True) -> Tensor:
    """Sum a tensor over the ranks; with ``grad`` the gradient is the one-process gradient after DDP's average."""
    if world_size() == 1:
        return x if grad else x.detach()
    return _Sum.apply(x if grad else x.detach())


def mean_over_ranks(total: Tensor, count: Tensor) -> Tensor:
    """Global mean from local sums: ``sum_r total_r / max(sum_r count_r, 1)``, differentiable in ``total``."""
    return sum_over_ranks(total) / sum_over_ranks(count.to(total.dtype), grad=False).clamp_min(1)


def any_over_ranks(mask: Tensor) -> Tensor:
    """Elementwise logical OR of a boolean tensor over the ranks."""
    if world_size() == 1:
        return mask
    packed = mask.to(torch.uint8)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return packed.to(torch.bool)


def broadcast(x: Tensor, source: int = 0) -> Tensor:
    """Give every rank the tensor of rank ``source`` (a new tensor; shapes and dtypes must agree)."""
    if world_size() == 1:
        return x
    copy = x.detach().clone().contiguous()
    dist.broadcast(copy, src=source)
    return copy
