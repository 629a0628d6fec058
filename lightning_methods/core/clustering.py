"""k-means with all restarts in one matrix product.

All restarts share the data, so their centroids are stacked and every distance comes from a single product; a restart
that has converged leaves it. Memory is bounded: rows are taken in chunks. Nothing here takes a gradient, and everything
is computed in float32 or wider, also under autocast.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import check_choice, check_finite, check_floating, check_range, check_shape
from .losses import at_least_float32

__all__ = ["kmeans", "kmeans_plusplus", "lloyd"]

_CHUNK_ELEMENTS = 2**24  # distances held at a time: 64 MiB of float32
_ACCELERATOR_CHECK = 8  # iterations between two looks at "has everything converged", which wait for the device


def _rows_per_chunk(columns: int, chunk_size: int | None) -> int:
    return chunk_size or max(1, _CHUNK_ELEMENTS // max(columns, 1))


def _assign(x: Tensor, centroids: Tensor, chunk_size: int | None) -> Tensor:
    """Nearest centroid of every row in every run, [runs, n]; ties go to the lower index."""
    runs, k, _ = centroids.shape
    flat = centroids.flatten(0, 1)
    squares = flat.square().sum(dim=1)
    labels = [
        # |x|^2 is the same for all centroids of a row: leave it out.
        torch.addmm(squares, rows, flat.t(), alpha=-2).view(-1, runs, k).argmin(dim=-1)
        for rows in x.split(_rows_per_chunk(runs * k, chunk_size))
    ]
    return torch.cat(labels).t()


def _means(x: Tensor, labels: Tensor, previous: Tensor, chunk_size: int | None) -> Tensor:
    """Mean of every cluster in every run, [runs, k, d]; an empty cluster keeps its previous centroid."""
    runs, k, _ = previous.shape
    if x.device.type == "cpu":
        sums, counts = _sparse_sums(x, labels, k)
    else:
        sums, counts = _dense_sums(x, labels, k, _rows_per_chunk(runs * k, chunk_size))
    return torch.where(counts > 0, sums / counts.clamp_min(1), previous)


def _sparse_sums(x: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sum [runs, k, d] and number [runs, k, 1] of the rows of every cluster, by a sparse membership matrix.

    Only the n ones of each run are ever multiplied: the fast way on a CPU.
    """
    runs, n = labels.shape
    flat = (labels + k * torch.arange(runs, device=x.device)[:, None]).flatten()  # cluster numbers over all runs
    clusters, order = flat.sort(stable=True)
    positions, ones = torch.stack([clusters, order % n]), x.new_ones(runs * n)
    members = torch.sparse_coo_tensor(positions, ones, (runs * k, n), is_coalesced=True, check_invariants=False)
    return (members @ x).view(runs, k, -1), torch.bincount(flat, minlength=runs * k).view(runs, k, 1)


def _dense_sums(x: Tensor, labels: Tensor, k: int, step: int) -> tuple[Tensor, Tensor]:
    """The same by a dense membership matrix, ``step`` rows at a time: the fast way on an accelerator.

    Unlike atomic additions it gives the same sum every time, and unlike counting it does not wait for the device.
    """
    runs = labels.shape[0]
    sums, counts = x.new_zeros(runs * k, x.shape[1]), x.new_zeros(runs, k)
    for rows, part in zip(x.split(step), labels.split(step, dim=1), strict=True):
        members = x.new_zeros(runs, k, rows.shape[0]).scatter_(1, part[:, None], 1)
        sums += members.flatten(0, 1) @ rows
        counts += members.sum(dim=2)
    return sums.view(runs, k, -1), counts[..., None]


def _inertia(x: Tensor, centroids: Tensor, labels: Tensor, chunk_size: int | None) -> Tensor:
    """Sum of squared distances to the own centroid, [runs]; from differences, so that it is exact near zero."""
    runs, _, d = centroids.shape
    total = x.new_zeros(runs)
    step = _rows_per_chunk(runs * d, chunk_size)
    for rows, part in zip(x.split(step), labels.split(step, dim=1), strict=True):
        own = centroids.gather(1, part[..., None].expand(-1, -1, d))
        total += (rows - own).square().sum(dim=(1, 2))
    return total


def _check_points(x: Tensor, num_clusters: int) -> Tensor:
    check_floating("x", x)
    n = check_shape("x", x, "points features")["points"]
    check_finite("x", x)
    check_range("num_clusters", num_clusters, 1)
    if num_clusters > n:
        raise ValueError(f"num_clusters must be at most the number of points, got {num_clusters} for {n} points.")
    return at_least_float32(x.detach())


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    # Distances come from |x|^2 - 2 x c + |c|^2, which loses digits when the points lie far from the origin.
    centre = x.mean(dim=0)
    return x - centre, centre


@torch.no_grad()
def kmeans_plusplus(
    x: Float[Tensor, "points features"],
    num_clusters: int,
    *,
    n_init: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "runs clusters features"]:
    """Draw starting centroids: each next one is a point drawn with probability proportional to its squared distance.

    Source: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding", SODA 2007.

    Args:
        x: points, [n, d].
        num_clusters: k, at most n.
        n_init: number of independent draws, made together.
        generator: source of randomness, on any device; the global one if None.

    Returns:
        Rows of ``x``, [n_init, k, d]. A copy of a point that was drawn is not drawn while there is any other point.

    Raises:
        ValueError: ``x`` is not a finite matrix, or there are more clusters than points.
    """
    points = _check_points(x, num_clusters)
    check_range("n_init", n_init, 1)
    n = points.shape[0]
    source = generator.device if generator is not None else points.device
    with torch.autocast(points.device.type, enabled=False):
        centred, _ = _centred(points)
        squares = centred.square().sum(dim=1)
        tiny = 8 * torch.finfo(points.dtype).eps
        weights = torch.ones(n_init, n, dtype=points.dtype, device=points.device)
        chosen = []
        for _ in range(num_clusters):
            # An exponential race: argmax(w / Exp(1)) is a draw proportional to w, without a cumulative sum or a wait
            # for the device. Where all weights are zero (fewer distinct points than clusters) it is the first point.
            race = torch.empty(n_init, n, dtype=points.dtype, device=source).exponential_(generator=generator)
            index = (weights / race.to(points.device)).argmax(dim=1)
            chosen.append(index)
            scale = squares[index][:, None] + squares
            distance = scale - 2 * centred[index] @ centred.t()
            distance = torch.where(distance <= tiny * scale, 0, distance)  # the same point up to rounding
            weights = torch.minimum(weights, distance) if len(chosen) > 1 else distance
    return points[torch.stack(chosen, dim=1)]


@torch.no_grad()
def lloyd(
    x: Float[Tensor, "points features"],
    centroids: Float[Tensor, "*runs clusters features"],
    max_iter: int = 300,
    *,
    tol: float = 0.0,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "*runs clusters features"], Int[Tensor, "*runs points"], Float[Tensor, "*runs"]]:
    """Lloyd's iterations from given centroids, for one run or for several at a time.

    A point belongs to the nearest centroid (ties: the lower index); an empty cluster keeps its centroid.

    Args:
        x: points, [n, d].
        centroids: where to start, [k, d], or [runs, k, d].
        max_iter: most iterations.
        tol: a run ends when the summed squared shift of its centroids is at most ``tol`` times the features' mean
            variance; 0 is "until nothing changes".
        chunk_size: rows whose distances are held at a time (the result is the same); by default 64 MiB of them.

    Returns:
        The centroids [(runs,) k, d], the labels under them [(runs,) n] and the inertia [(runs)], the sum of squared
        distances.

    Raises:
        ValueError: shapes do not fit, ``x`` is not finite, or max_iter or tol is negative.
    """
    check_floating("x", x)
    features = check_shape("x", x, "points features")["features"]
    check_finite("x", x)
    check_shape("centroids", centroids, "... clusters features", features=features)
    if centroids.dim() not in (2, 3):
        shape = list(centroids.shape)
        raise ValueError(f"centroids must have shape [(runs,) clusters, features={features}], got {shape}.")
    check_range("max_iter", max_iter, 0)
    check_range("tol", tol, 0)
    points = at_least_float32(x.detach())
    every = 1 if points.device.type == "cpu" else _ACCELERATOR_CHECK
    with torch.autocast(points.device.type, enabled=False):
        points, centre = _centred(points)
        result = centroids.detach().to(points.dtype).view(-1, *centroids.shape[-2:]) - centre
        threshold = tol * points.var(dim=0, correction=0).mean()
        active = torch.arange(result.shape[0], device=points.device)
        current, done = result, torch.zeros_like(active, dtype=torch.bool)
        for iteration in range(1, max_iter + 1):
            new = _means(points, _assign(points, current, chunk_size), current, chunk_size)
            still = (new - current).square().sum(dim=(1, 2)) > threshold
            # A finished run stays where it is, so how often we look does not change the result.
            current, done = torch.where(done[:, None, None], current, new), done | ~still
            if iteration % every == 0 or iteration == max_iter:
                result = result.index_copy(0, active, current)
                active, current, done = active[~done], current[~done], done[~done]
                if active.numel() == 0:
                    break
        labels = _assign(points, result, chunk_size)
        inertia = _inertia(points, result, labels, chunk_size)
        result = result + centre
    runs = centroids.shape[:-2]
    return result.view(*runs, *result.shape[1:]), labels.reshape(*runs, -1), inertia.view(runs)


@torch.no_grad()
def kmeans(
    x: Float[Tensor, "points features"],
    num_clusters: int,
    *,
    n_init: int = 10,
    max_iter: int = 300,
    tol: float = 1e-4,
    metric: Literal["euclidean"] = "euclidean",
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "clusters features"], Int[Tensor, " points"], Float[Tensor, ""]]:
    """k-means from k-means++ starts, the best of ``n_init`` restarts.

    Runs where ``x`` lies. There is one wait for the device every few iterations and none in between.

    Args:
        x: points, [n, d].
        num_clusters: k, at most n.
        n_init: number of restarts, run together.
        max_iter: most iterations of a restart.
        tol: a restart ends when the summed squared shift of its centroids is at most ``tol`` times the features' mean
            variance.
        metric: "euclidean".
        generator: source of randomness, on any device; the global one if None.
        chunk_size: rows whose distances are held at a time; by default 64 MiB of them.

    Returns:
        Centroids [k, d], labels [n] int64 and the inertia (sum of squared distances), float32 or wider.

    Raises:
        ValueError: ``x`` is not a finite matrix, there are more clusters than points, or n_init or max_iter is below 1.

    Example:
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> centroids, labels, inertia = kmeans(x, 2, generator=torch.Generator().manual_seed(0))
        >>> centroids.flatten().sort().values
        tensor([0.1000, 5.1000])
        >>> bool(labels[0] == labels[1]), bool(labels[0] == labels[2])
        (True, False)
    """
    check_choice("metric", metric, ("euclidean",))
    check_range("n_init", n_init, 1)
    check_range("max_iter", max_iter, 1)
    start = kmeans_plusplus(x, num_clusters, n_init=n_init, generator=generator)
    centroids, labels, inertia = lloyd(x, start, max_iter, tol=tol, chunk_size=chunk_size)
    best = inertia.argmin()
    return centroids[best], labels[best], inertia[best]
