"""A ring buffer of past rows, as momentum-contrast methods keep it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .checks import check_range, check_same_rows, check_shape

__all__ = ["FeatureQueue"]


class FeatureQueue(nn.Module):
    """First-in first-out store of feature rows, kept in buffers and so in every checkpoint.

    Each keyword names a buffer of shape [size, width]; all of them advance together. They start as Gaussian rows of
    unit norm. Under DDP, gather the rows first (:func:`lightning_methods.core.distributed.gather`), so that every
    rank holds the same queue.

    Args:
        size: number of rows; a multiple of the rows of every ``enqueue``.
        **widths: width of each buffer by its name.

    Raises:
        ValueError: a size or width below 1, or no width.

    Example:
        >>> queue = FeatureQueue(4, keys=3)
        >>> queue.enqueue(keys=torch.ones(2, 3))
        >>> queue.keys.shape, queue.keys[:2].sum().item()
        (torch.Size([4, 3]), 6.0)
    """

    position: Tensor

    def __init__(self, size: int, **widths: int) -> None:
        super().__init__()
        check_range("size", size, 1)
        if not widths:
            raise ValueError("FeatureQueue needs at least one named width, e.g. FeatureQueue(4096, keys=128).")
        self.size = size
        self.names = tuple(widths)
        for name, width in widths.items():
            check_range(name, width, 1)
            self.register_buffer(name, F.normalize(torch.randn(size, width), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def snapshot(self, name: str) -> Tensor:
        """A copy of one buffer: what a loss may keep for its backward pass while the queue moves on."""
        return getattr(self, name).clone()

    @torch.no_grad()
    def enqueue(self, **rows: Tensor) -> None:
        """Replace the oldest rows.

        Args:
            **rows: new rows for every buffer, [n, width], the same n.

        Raises:
            ValueError: names or shapes do not fit, or ``size`` is not a multiple of n.
        """
        if set(rows) != set(self.names):
            raise ValueError(f"enqueue needs rows for {', '.join(self.names)}; got {', '.join(rows) or 'nothing'}.")
        count = check_same_rows(**rows)
        if count == 0 or self.size % count:
            raise ValueError(
                f"the queue size must be a multiple of the number of rows that are enqueued: {self.size} is not a "
                f"multiple of {count}. Choose another size, or drop the last incomplete batch (drop_last=True)."
            )
        for name, x in rows.items():
            buffer = getattr(self, name)
            check_shape(name, x, "rows width", width=buffer.shape[1])
            buffer.index_copy_(0, self._slots(count), x.to(buffer.dtype))
        self.position.copy_((self.position + count) % self.size)

    def _slots(self, count: int) -> Tensor:
        return (self.position + torch.arange(count, device=self.position.device)) % self.size
