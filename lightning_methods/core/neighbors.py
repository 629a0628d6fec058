"""Distances and exact nearest neighbours."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_choice, check_range, check_shape
from .losses import at_least_float32
from .ordering import stable_topk

__all__ = ["knn", "pairwise_distances"]

_METRICS = ("euclidean", "sqeuclidean", "cosine")


def _distances(x: Tensor, y: Tensor, metric: str, exact: bool) -> Tensor:
    if metric == "cosine":
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        if not exact:
            return 1 - x @ y.T
        # 1 - cos = |x - y|^2 / 2 on unit vectors, without cancellation between near vectors
    mode = "donot_use_mm_for_euclid_dist" if exact else "use_mm_for_euclid_dist_if_necessary"
    distances = torch.cdist(x, y, compute_mode=mode)
    if metric == "cosine":
        return distances.square() / 2
    return distances.square() if metric == "sqeuclidean" else distances


def pairwise_distances(
    x: Float[Tensor, "n dim"],
    y: Float[Tensor, "m dim"],
    metric: Literal["euclidean", "sqeuclidean", "cosine"] = "euclidean",
    exact: bool = False,
    chunk_size: int | None = None,
) -> Float[Tensor, "n m"]:
    """Distances between the rows of two matrices, differentiable (0 is the gradient at coinciding rows).

    Args:
        x: [n, dim].
        y: [m, dim].
        metric: "euclidean", "sqeuclidean", or "cosine" (1 - cosine similarity).
        exact: sum squared differences instead of expanding the square into a matrix product. The expansion is faster,
            but in float32 it can turn a distance of 0 into 1e-2 where the norms of the rows are large.
        chunk_size: rows of ``x`` at a time; None takes all at once.

    Returns:
        [n, m], float32 or wider.

    Raises:
        ValueError: shapes do not fit, unknown metric, chunk_size below 1.
    """
    check_choice("metric", metric, _METRICS)
    dim = check_shape("x", x, "n dim")["dim"]
    check_shape("y", y, "m dim", dim=dim)
    x, y = at_least_float32(x), at_least_float32(y)
    with torch.autocast(x.device.type, enabled=False):
        if chunk_size is None:
            return _distances(x, y, metric, exact)
        check_range("chunk_size", chunk_size, 1)
        return torch.cat([_distances(rows, y, metric, exact) for rows in x.split(chunk_size)])


@torch.no_grad()
def knn(
    query: Float[Tensor, "n dim"],
    bank: Float[Tensor, "m dim"],
    k: int,
    metric: Literal["euclidean", "sqeuclidean", "cosine"] = "euclidean",
    exclude_self: bool = False,
    exact: bool = False,
    chunk_size: int = 1024,
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k nearest rows of a bank, nearest first; of equally near rows the one with the lower index. No gradient.

    Args:
        query: [n, dim].
        bank: [m, dim].
        k: number of neighbours, at most ``m`` (``m - 1`` with ``exclude_self``).
        metric: as in :func:`pairwise_distances`.
        exclude_self: the query is the bank: row i is not a neighbour of itself (its duplicates are).
        exact: as in :func:`pairwise_distances`; needed where ties or duplicates matter.
        chunk_size: rows of the query at a time; memory is ``chunk_size * m``.

    Returns:
        ``(distance, index)``, both [n, k].

    Raises:
        ValueError: shapes do not fit, ``k`` or ``chunk_size`` is out of range, unknown metric.

    Example:
        >>> points = torch.tensor([[0.0], [1.0], [3.0], [1.0]])
        >>> knn(points, points, 2, exclude_self=True, exact=True)[1]
        tensor([[1, 3],
                [3, 0],
                [1, 3],
                [1, 0]])
    """
    check_choice("metric", metric, _METRICS)
    check_range("chunk_size", chunk_size, 1)
    dim = check_shape("query", query, "n dim")["dim"]
    size = check_shape("bank", bank, "m dim", dim=dim)["m"]
    if exclude_self:
        check_shape("query", query, "n dim", n=size)
    check_range("k", k, 1, size - exclude_self)
    query, bank = at_least_float32(query), at_least_float32(bank)
    distance = query.new_empty(len(query), k)
    index = torch.empty(len(query), k, dtype=torch.int64, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, len(query), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = _distances(query[rows], bank, metric, exact)
            if exclude_self:
                chunk.diagonal(offset=start).fill_(torch.inf)
            distance[rows], index[rows] = stable_topk(chunk, k, largest=False)
    return distance, index
