"""Soft nearest neighbours over an embedding, and periodic embeddings of numeric columns.

Source: Ye, Yin, Zhan, Chao, "Revisiting Nearest Neighbor for Tabular Data: A Deep Tabular Baseline Two Decades Later",
ICLR 2025. With phi the encoder, query i and candidate rows j with labels y_j:

    d_ij = ||phi(x_i) - phi(x_j)||_2 / T,    w_ij = softmax_j(-d_ij),    prediction_i = sum_j w_ij y_j

The distance is Euclidean, not squared as in the classical NCA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.checks import check_choice, check_floating, check_labels, check_range, check_shape
from ..core.losses import at_least_float32
from ..core.neighbors import pairwise_distances
from ..core.ordering import stable_topk

__all__ = [
    "neighbor_weights",
    "plr",
    "plr_lite",
    "rows_outside",
    "sample_candidates",
    "soft_nearest_neighbor_log_probs",
    "soft_nearest_neighbor_regression",
]

Distance = Literal["euclidean", "cosine"]


# periodic embeddings of numbers


def _periodic(x: Tensor, frequencies: Tensor) -> Tensor:
    """cos and sin of ``2 pi f_mk x_m``: [..., m] -> [..., m, 2k]."""
    angle = 2 * math.pi * frequencies * x.unsqueeze(-1)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def plr_lite(
    x: Float[Tensor, "*batch columns"],
    frequencies: Float[Tensor, "columns k"],
    weight: Float[Tensor, "dim two_k"],
    bias: Float[Tensor, " dim"],
) -> Float[Tensor, "*batch columns dim"]:
    """Periodic features, one linear map shared by all columns, ReLU.

    Source: Gorishniy et al., "On embeddings for numerical features in tabular deep learning", NeurIPS 2022 (PLR); the
    sharing is the "lite" form that ModernNCA uses.

    Args:
        x: standardised numbers, [batch, columns].
        frequencies: [columns, k].
        weight: [dim, 2k]; the first k inputs are the cosines.
        bias: [dim].

    Returns:
        [batch, columns, dim].

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> plr_lite(torch.zeros(2, 3), torch.ones(3, 1), torch.ones(4, 2), torch.zeros(4)).shape
        torch.Size([2, 3, 4])
    """
    columns = check_shape("x", x, "... columns")["columns"]
    k = check_shape("frequencies", frequencies, "columns k", columns=columns)["k"]
    dim = check_shape("weight", weight, "dim two_k", two_k=2 * k)["dim"]
    check_shape("bias", bias, "dim", dim=dim)
    return F.relu(F.linear(_periodic(x, frequencies), weight, bias))


def plr(
    x: Float[Tensor, "*batch columns"],
    frequencies: Float[Tensor, "columns k"],
    weight: Float[Tensor, "columns two_k dim"],
    bias: Float[Tensor, "columns dim"],
) -> Float[Tensor, "*batch columns dim"]:
    """Periodic features, a linear map of its own for every column, ReLU (see :func:`plr_lite`).

    Args:
        x: standardised numbers, [batch, columns].
        frequencies: [columns, k].
        weight: [columns, 2k, dim].
        bias: [columns, dim].

    Returns:
        [batch, columns, dim].

    Raises:
        ValueError: shapes do not fit.
    """
    columns = check_shape("x", x, "... columns")["columns"]
    k = check_shape("frequencies", frequencies, "columns k", columns=columns)["k"]
    dim = check_shape("weight", weight, "columns two_k dim", columns=columns, two_k=2 * k)["dim"]
    check_shape("bias", bias, "columns dim", columns=columns, dim=dim)
    return F.relu(torch.einsum("...mk,mkd->...md", _periodic(x, frequencies), weight) + bias)


# soft nearest neighbours


def _check_neighbors(
    query: Tensor, keys: Tensor, temperature: float, exclude_self: bool, distance: str, chunk_size: int | None
) -> tuple[int, int]:
    check_floating("query", query)
    check_floating("keys", keys)
    sizes = check_shape("query", query, "batch dim")
    rows = check_shape("keys", keys, "rows dim", dim=sizes["dim"])["rows"]
    check_range("temperature", temperature, 0, low_open=True)
    check_choice("distance", distance, ("euclidean", "cosine"))
    if chunk_size is not None:
        check_range("chunk_size", chunk_size, 1)
    if rows == 0:
        raise ValueError(f"keys must have at least one row, got shape {list(keys.shape)}.")
    if exclude_self and rows < sizes["batch"]:
        raise ValueError(
            f"exclude_self needs the queries as the first keys: at least {sizes['batch']} rows, but keys has {rows}."
        )
    if exclude_self and rows == sizes["batch"] == 1:
        raise ValueError("exclude_self with one query and one key leaves no candidate; keys needs 2 rows.")
    return sizes["batch"], rows


def _common_dtype(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype of the two, float32 at least."""
    query, keys = at_least_float32(query), at_least_float32(keys)
    dtype = torch.promote_types(query.dtype, keys.dtype)
    return query.to(dtype), keys.to(dtype)


def _logits(
    query: Tensor, keys: Tensor, start: int, temperature: float, exclude_self: bool, distance: Distance
) -> Tensor:
    """``-d_ij`` for the keys ``start, start + 1, ...``; -inf where key i is query i."""
    # 1 - cos instead of -cos: a constant, which the softmax does not see.
    logits = pairwise_distances(query, keys, distance) / -temperature
    if exclude_self and start < len(query):
        logits.diagonal(offset=-start).fill_(-torch.inf)
    return logits


def _soft_average(
    query: Tensor,
    keys: Tensor,
    values_of: Callable[[slice], Tensor],
    temperature: float,
    exclude_self: bool,
    distance: Distance,
    chunk_size: int | None,
) -> Tensor:
    """``sum_j softmax_j(-d_ij) v_j``, [batch, outputs], where ``values_of(rows)`` gives v for a slice of the keys."""
    rows = keys.shape[0]
    if chunk_size is None or chunk_size >= rows:
        weights = _logits(query, keys, 0, temperature, exclude_self, distance).softmax(dim=1)
        return weights @ values_of(slice(0, rows))

    def chunk(query: Tensor, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit, sum of the weights and weighted sum of the values over a part of the keys."""
        logits = _logits(query, keys, start, temperature, exclude_self, distance)
        # The maximum cancels in the quotient, so it takes no gradient. A chunk may hold nothing but the query itself.
        top = logits.detach().amax(dim=1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
        weights = (logits - top).exp()
        return top, weights.sum(dim=1, keepdim=True), weights @ values

    # In training the chunk's matrix is computed again in the backward pass: kept, all chunks together would be the full
    # one.
    again = torch.is_grad_enabled()
    top, mass, total = None, None, None
    for start in range(0, rows, chunk_size):
        part = slice(start, start + chunk_size)
        arguments = (query, keys[part], values_of(part), start)
        if again:
            new = checkpoint(chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            new = chunk(*arguments)
        if top is None:
            top, mass, total = new
            continue
        highest = torch.maximum(top, new[0])
        old_scale, new_scale = (top - highest).exp(), (new[0] - highest).exp()
        top, mass, total = highest, mass * old_scale + new[1] * new_scale, total * old_scale + new[2] * new_scale
    return total / mass


def soft_nearest_neighbor_log_probs(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "rows dim"],
    labels: Int[Tensor, " rows"],
    num_classes: int,
    *,
    temperature: float = 1.0,
    exclude_self: bool = False,
    distance: Distance = "euclidean",
    eps: float = 1e-7,
    chunk_size: int | None = None,
) -> Float[Tensor, "batch classes"]:
    """Log of the softmax weight that each class has among the keys, ``log(sum_{j: y_j = c} w_ij + eps)``.

    The negative log-likelihood of these is the training loss of ModernNCA. A class without a key gets ``log(eps)``, so
    the exponentials sum to ``1 + classes * eps``: renormalise where probabilities are needed.

    Args:
        query: embeddings, [batch, dim].
        keys: embeddings of the candidates, [rows, dim].
        labels: classes of the candidates, [rows].
        num_classes: K.
        temperature: T > 0, divides the distance.
        exclude_self: key i is query i for i < batch, and no neighbour of itself.
        distance: "euclidean", or "cosine" (minus the cosine; needs a temperature far below 1).
        eps: inside the logarithm.
        chunk_size: keys at a time, with a running maximum and sum. The result is the same, the memory is
            ``batch * chunk_size`` instead of ``batch * rows``, in the backward pass too (chunks are computed again).

    Returns:
        [batch, classes], float32 or wider.

    Raises:
        ValueError: widths differ, no keys, temperature or chunk_size out of range, a label outside 0..K-1, or
            exclude_self where the queries cannot be the first keys or nothing would be left.

    Example:
        >>> keys = torch.tensor([[0.0], [1.0], [10.0]])
        >>> query, labels = torch.tensor([[0.5]]), torch.tensor([0, 0, 1])
        >>> soft_nearest_neighbor_log_probs(query, keys, labels, num_classes=2).exp().round(decimals=3)
        tensor([[1., 0.]])
    """
    rows = _check_neighbors(query, keys, temperature, exclude_self, distance, chunk_size)[1]
    check_range("num_classes", num_classes, 1)
    check_range("eps", eps, 0)
    check_labels("labels", labels, num_classes, batch=rows)
    query, keys = _common_dtype(query, keys)
    classes = torch.arange(num_classes, device=labels.device)

    def one_hot(part: slice) -> Tensor:
        """Labels of a part of the keys, one-hot."""
        return (labels[part, None] == classes).to(query.dtype)

    with torch.autocast(query.device.type, enabled=False):
        mass = _soft_average(query, keys, one_hot, temperature, exclude_self, distance, chunk_size)
        return (mass + eps).log()


def soft_nearest_neighbor_regression(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "rows dim"],
    values: Float[Tensor, "rows *outputs"],
    *,
    temperature: float = 1.0,
    exclude_self: bool = False,
    distance: Distance = "euclidean",
    chunk_size: int | None = None,
) -> Float[Tensor, "batch *outputs"]:
    """Average of the keys' values under the softmax of negative distances.

    Args:
        query: embeddings, [batch, dim].
        keys: embeddings of the candidates, [rows, dim].
        values: targets of the candidates, [rows] or [rows, outputs].
        temperature: T > 0, divides the distance.
        exclude_self: key i is query i for i < batch, and no neighbour of itself.
        distance: "euclidean", or "cosine" (minus the cosine).
        chunk_size: keys at a time, see :func:`soft_nearest_neighbor_log_probs`.

    Returns:
        [batch] or [batch, outputs], float32 or wider.

    Raises:
        ValueError: as :func:`soft_nearest_neighbor_log_probs`; values of another shape.

    Example:
        >>> keys = torch.tensor([[0.0], [1.0], [1000.0]])
        >>> soft_nearest_neighbor_regression(torch.tensor([[0.5]]), keys, torch.tensor([2.0, 4.0, 100.0]))
        tensor([3.])
    """
    rows = _check_neighbors(query, keys, temperature, exclude_self, distance, chunk_size)[1]
    check_floating("values", values)
    if values.dim() not in (1, 2) or values.shape[0] != rows:
        raise ValueError(f"values must have shape [rows={rows}] or [rows={rows}, outputs], got {list(values.shape)}.")
    query, keys = _common_dtype(query, keys)
    columns = (values if values.dim() == 2 else values.unsqueeze(1)).to(query.dtype)
    with torch.autocast(query.device.type, enabled=False):
        average = _soft_average(query, keys, columns.__getitem__, temperature, exclude_self, distance, chunk_size)
    return average if values.dim() == 2 else average.squeeze(1)


def neighbor_weights(
    query: Float[Tensor, "batch dim"],
    keys: Float[Tensor, "rows dim"],
    k: int,
    *,
    temperature: float = 1.0,
    exclude_self: bool = False,
    distance: Distance = "euclidean",
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, "batch k"], Int[Tensor, "batch k"]]:
    """The k keys with the largest weight in a prediction: which training rows it rests on.

    Args:
        query: embeddings, [batch, dim].
        keys: embeddings of the candidates, [rows, dim].
        k: how many, at most the number of candidates.
        temperature: T > 0, divides the distance.
        exclude_self: key i is query i for i < batch, and no neighbour of itself.
        distance: "euclidean", or "cosine" (minus the cosine).
        chunk_size: keys at a time; the result is the same.

    Returns:
        ``(weights, indices)``, [batch, k] each, largest weight first, of equal ones the lower index. The weights are
        shares of the softmax over *all* keys: what their sum lacks to 1 lies on the other keys.

    Raises:
        ValueError: as :func:`soft_nearest_neighbor_log_probs`; k out of range.

    Example:
        >>> weights, indices = neighbor_weights(torch.tensor([[0.0]]), torch.tensor([[5.0], [0.0], [1.0]]), k=2)
        >>> indices
        tensor([[1, 2]])
    """
    batch, rows = _check_neighbors(query, keys, temperature, exclude_self, distance, chunk_size)
    check_range("k", k, 1, rows - exclude_self)
    query, keys = _common_dtype(query, keys)
    step = rows if chunk_size is None else chunk_size
    best = query.new_empty(batch, 0)
    indices = torch.empty(batch, 0, dtype=torch.int64, device=query.device)
    log_mass = query.new_full((batch, 1), -torch.inf)
    for start in range(0, rows, step):
        logits = _logits(query, keys[start : start + step], start, temperature, exclude_self, distance)
        log_mass = torch.logaddexp(log_mass, logits.logsumexp(dim=1, keepdim=True))
        new, chosen = stable_topk(logits, min(k, logits.shape[1]))
        # Earlier keys come first, so a stable choice keeps the lower index.
        best, kept = stable_topk(torch.cat([best, new], dim=1), min(k, best.shape[1] + new.shape[1]))
        indices = torch.cat([indices, chosen + start], dim=1).gather(1, kept)
    return (best - log_mass).exp(), indices


# stochastic neighbourhood sampling


def sample_candidates(
    n: int, rate: float, generator: torch.Generator | None = None, device: torch.device | str | None = None
) -> Int[Tensor, " sampled"]:
    """Draw ``floor(n * rate)`` of ``n`` rows uniformly without replacement (stochastic neighbourhood sampling).

    Args:
        n: number of rows.
        rate: share in (0, 1].
        generator: random generator on ``device``; None is the global one.
        device: where the indices live.

    Returns:
        Row numbers in random order.

    Raises:
        ValueError: n is negative or the rate is outside (0, 1].

    Example:
        >>> sample_candidates(10, 0.35).shape
        torch.Size([3])
    """
    check_range("n", n, 0)
    check_range("rate", rate, 0, 1, low_open=True)
    return torch.randperm(n, generator=generator, device=device)[: int(n * rate)]


def rows_outside(position: Int[Tensor, " m"], excluded: Int[Tensor, " batch"]) -> Int[Tensor, " m"]:
    """Row numbers of the ``position``-th rows that are left when some rows are taken out.

    In this way the pool of a training step (all rows but the batch) is never written down: O(m log batch), no mask over
    the whole table and no wait for the device.

    Args:
        position: positions among the rows that are left, [m].
        excluded: row numbers, each once, [batch].

    Returns:
        Row numbers, [m].

    Example:
        >>> rows_outside(torch.tensor([0, 1, 2]), torch.tensor([3, 0]))
        tensor([1, 2, 4])
    """
    check_shape("position", position, "m")
    batch = check_shape("excluded", excluded, "batch")["batch"]
    # The i-th smallest excluded row e_i has e_i - i rows of the pool before it.
    before = excluded.sort().values - torch.arange(batch, device=excluded.device)
    return position + torch.searchsorted(before, position, right=True)
