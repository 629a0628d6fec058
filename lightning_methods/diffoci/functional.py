"""The dependence coefficient of Azadkia and Chatterjee, its differentiable form, and what the paper builds on them.

Symbols as in the papers: n samples, ``y`` the ordered response, ``z`` the variables whose influence is asked for, ``x``
the variables that are given; R_i = #{j: y_j <= y_i}, L_i = #{j: y_j >= y_i}; M(i) the nearest neighbour of (x_i, z_i),
N(i) that of x_i.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.checks import check_choice, check_finite, check_labels, check_range, check_same_rows, check_shape
from ..core.losses import at_least_float32
from ..core.modes import evaluating
from ..core.neighbors import knn, pairwise_distances
from ..core.ordering import ranks

__all__ = [
    "FOCIResult",
    "codec",
    "diffoci_coefficient",
    "foci",
    "group_dro_update",
    "rank_statistics",
    "saliency_map",
]

# Below this temperature a distance of 0 that the matrix-product form of cdist turns into 1e-2 would move the weights.
_EXACT_BELOW = 0.05


# ranks and input


def rank_statistics(
    y: Shaped[Tensor, "n *c"], ties: Literal["max", "ordinal"] = "max"
) -> tuple[Float[Tensor, "n *c"], Float[Tensor, "n *c"]]:
    """Ranks from below and from above, column by column, without gradient.

    Source: Azadkia & Chatterjee (2021): R_i = #{j: y_j <= y_i} and L_i = #{j: y_j >= y_i}.

    Args:
        y: response, [n] or [n, c], any real dtype or bool.
        ties: "max" is the definition. "ordinal" gives equal values different ranks by position, as the authors' code
            does.

    Returns:
        ``(R, L)``, shaped as ``y``; float64 for float64 input, else float32.

    Raises:
        ValueError: ``y`` is not 1-D or 2-D, or ``ties`` is unknown.

    Example:
        >>> rank_statistics(torch.tensor([0, 1, 1]))
        (tensor([1., 3., 3.]), tensor([3., 2., 2.]))
    """
    check_choice("ties", ties, ("max", "ordinal"))
    if y.dim() not in (1, 2):
        raise ValueError(f"y must have shape [n] or [n, c], got {list(y.shape)}.")
    lower = ranks(y, ties, dim=0)
    upper = len(y) + 1 - (ranks(y, "min", dim=0) if ties == "max" else lower)
    return lower, upper


def _check_inputs(y: Tensor, z: Tensor, x: Tensor | None, validate: bool) -> int:
    """Check shapes and values, and return n."""
    if y.dim() not in (1, 2):
        raise ValueError(f"y must have shape [n] or [n, c], got {list(y.shape)}.")
    given = {"z": z} if x is None else {"z": z, "x": x}
    for name, value in given.items():
        if value.dim() not in (1, 2):
            raise ValueError(f"{name} must have shape [n] or [n, features], got {list(value.shape)}.")
    n = check_same_rows(y=y, **given)
    if n < 2:
        raise ValueError(f"at least 2 samples are needed, got y of shape {list(y.shape)}.")
    for name, value in {"y": y, **given}.items():
        check_finite(name, value, validate=validate)
    return n


def _columns(x: Tensor) -> Tensor:
    """[n] as one column, half precision and integers as float32."""
    x = x if x.is_floating_point() else x.float()
    return at_least_float32(x[:, None] if x.dim() == 1 else x)


def _wide(x: Tensor) -> Tensor:
    """float64 where the device has it."""
    return x.float() if x.device.type == "mps" else x.double()


# the exact coefficient


class _Ties(NamedTuple):
    """The nearest neighbours of some rows: all pairs (row, neighbour) at the row's smallest distance, rows in order."""

    row: Tensor
    neighbor: Tensor
    count: Tensor


def _nearest(distance: Tensor) -> _Ties:
    """Pairs at the smallest distance of their row, from distances [rows, n] with inf at the sample itself."""
    tied = distance == distance.amin(dim=-1, keepdim=True)
    row, neighbor = tied.nonzero(as_tuple=True)
    return _Ties(row, neighbor, tied.sum(dim=-1))


def _minimum_ranks(r: Tensor, own: Tensor, ties: _Ties, mode: str, uniform: Tensor | None) -> Tensor:
    """min(R_i, R_M(i)) of the rows ``own`` [m]; [m, c]."""
    if mode == "average":
        pairs = torch.minimum(r[own[ties.row]], r[ties.neighbor])
        return torch.zeros_like(r[own]).index_add_(0, ties.row, pairs) / ties.count[:, None]
    position = ties.count.cumsum(0) - ties.count
    if mode == "random":
        position = position + (uniform * ties.count).long().clamp_max(ties.count - 1)
    return torch.minimum(r[own], r[ties.neighbor[position]])


def _search(z: Tensor, r: Tensor, mode: str, generator: torch.Generator | None, chunk_size: int) -> Tensor:
    """min(R_i, R_M(i)) for all i by exact search, ``chunk_size`` rows at a time."""
    n = len(z)
    # One draw per sample, whatever the chunks.
    device = z.device if generator is None else generator.device
    uniform = torch.rand(n, generator=generator, device=device).to(z.device) if mode == "random" else None
    found = []
    for own in torch.arange(n, device=z.device).split(chunk_size):
        distance = pairwise_distances(z[own], z, exact=True)
        distance[torch.arange(len(own), device=z.device), own] = torch.inf
        found.append(_minimum_ranks(r, own, _nearest(distance), mode, None if uniform is None else uniform[own]))
    return torch.cat(found)


def _given(r: Tensor, neighbors: Tensor) -> Tensor:
    """min(R_i, R_M(i)) with neighbours from elsewhere: [n], or [n, k] of which the first that is not i counts."""
    n = len(r)
    if neighbors.dim() not in (1, 2) or len(neighbors) != n or neighbors.is_floating_point():
        shape, dtype = list(neighbors.shape), neighbors.dtype
        raise ValueError(f"neighbors must be integers of shape [n={n}] or [n={n}, k], got {shape} of {dtype}.")
    neighbors = neighbors.reshape(n, -1).long()
    if (neighbors < 0).any() or (neighbors >= n).any():
        raise ValueError(f"neighbors must be in 0..{n - 1}, got {int(neighbors.min())}..{int(neighbors.max())}.")
    other = neighbors != torch.arange(n, device=r.device)[:, None]
    if not other.any(dim=1).all():
        row = int((~other.any(dim=1)).nonzero()[0, 0])
        raise ValueError(f"neighbors: sample {row} has no neighbour but itself.")
    return torch.minimum(r, r[neighbors.gather(1, other.int().argmax(dim=1, keepdim=True))[:, 0]])


@torch.no_grad()
def codec(
    y: Shaped[Tensor, "n *c"],
    z: Num[Tensor, "n *q"],
    x: Num[Tensor, "n *p"] | None = None,
    *,
    neighbor_ties: Literal["average", "random", "first"] = "average",
    neighbors: Int[Tensor, "n *k"] | None = None,
    generator: torch.Generator | None = None,
    chunk_size: int = 1024,
) -> Float[Tensor, ""]:
    """How much ``y`` depends on ``z``, or on ``z`` given ``x``: the coefficient T_n, without gradient.

    In the limit 0 is independence and 1 says that y is a function of z (given x). In a sample T_n can be negative, in
    the conditional case far below -1; it is not clamped. It is invariant to strictly increasing maps of y.

    Source: Azadkia & Chatterjee (2021), the estimators T_n(Y, Z) and T_n(Y, Z | X).

    Args:
        y: ordered response, [n]; or [n, c], e.g. one-hot: the mean over the columns that are not constant.
        z: variables, [n] or [n, q].
        x: variables that are given, [n] or [n, p].
        neighbor_ties: which of several nearest neighbours counts: "average" takes the mean over all of them (the
            expectation of the random choice, deterministic), "random" draws one (the definition), "first" the lowest
            index.
        neighbors: neighbours from any index instead of the search in z (in (x, z) when x is given): [n], or [n, k] of
            which the first column that is not the sample itself counts.
        generator: for "random".
        chunk_size: rows at a time; memory is ``chunk_size * n``.

    Returns:
        T_n, in the floating dtype of z. 1 for a constant y, and when y is a function of x in the sample.

    Raises:
        ValueError: shapes do not fit, fewer than 2 samples, NaN or infinite values, unknown ``neighbor_ties``,
            neighbours out of range.

    Example:
        >>> z = torch.linspace(-2, 2, 400)
        >>> codec(z.square(), z).item() > 0.97
        True
    """
    check_choice("neighbor_ties", neighbor_ties, ("average", "random", "first"))
    check_range("chunk_size", chunk_size, 1)
    n = _check_inputs(y, z, x, validate=True)
    r, l = (_wide(rank.reshape(n, -1)) for rank in rank_statistics(y))  # noqa: E741 - the paper's symbol
    dtype = _columns(z).dtype
    wide = _wide(_columns(z))  # in float64 equal squared distances of float32 data stay equal, unequal ones unequal
    given = None if x is None else _wide(_columns(x))

    def search(features: Tensor) -> Tensor:
        """min(R_i, R_M(i)) with neighbours by these features, [n, c]."""
        return _search(features, r, neighbor_ties, generator, chunk_size)

    if neighbors is not None:
        with_z = _given(r, neighbors)
    else:
        with_z = search(wide if given is None else torch.cat([given, wide], dim=1))
    if given is None:
        numerator, denominator = (n * with_z - l.square()).sum(dim=0), (l * (n - l)).sum(dim=0)
    else:
        without_z = search(given)
        numerator, denominator = (with_z - without_z).sum(dim=0), (r - without_z).sum(dim=0)
    defined = denominator > 0
    values = torch.where(defined, numerator / torch.where(defined, denominator, 1), 0)
    count = defined.sum()
    return torch.where(count > 0, values.sum() / count.clamp_min(1), 1).to(dtype)


# the differentiable coefficient


def _soft_ranks_of_rows(
    z: Tensor, r: Tensor, start: int, stop: int, neighbors: Tensor | None, temperature: Tensor | float, exact: bool
) -> Tensor:
    """Rtilde_i = sum_j W_ij R_j, W_i = softmax_j(-D_ij / temperature), W_ii = 0, of rows start..stop; [rows, c]."""
    rows = z[start:stop]
    if neighbors is not None:
        distance = torch.linalg.vector_norm(rows[:, None] - z[neighbors], dim=-1)
        weights = torch.softmax(distance / -temperature, dim=-1)
        return torch.einsum("ik,ikc->ic", weights, r[neighbors])
    logits = pairwise_distances(rows, z, exact=exact) / -temperature
    logits[:, start:stop].fill_diagonal_(-torch.inf)
    return torch.softmax(logits, dim=-1) @ r


@torch.no_grad()
def _mean_distance(z: Tensor, exact: bool, chunk_size: int) -> Tensor:
    """Mean distance between two different samples."""
    total = sum(pairwise_distances(rows, z, exact=exact).sum() for rows in z.split(chunk_size))
    mean = total / (len(z) * (len(z) - 1))
    return torch.where(mean > 0, mean, 1)


def _soft_ranks(
    z: Tensor, r: Tensor, beta: float, num_neighbors: int | None, distance_scale: str, chunk_size: int | None
) -> Tensor:
    """Rtilde for all rows, [n, c]."""
    n = len(z)
    exact = beta < _EXACT_BELOW
    if not exact:
        z = z - z.detach().mean(dim=0)  # distances stay, the rounding error of their matrix-product form shrinks
    block = min(chunk_size or (1024 if num_neighbors is None else 256), n)
    temperature = beta * _mean_distance(z, exact, block) if distance_scale == "mean" else beta
    neighbors = None
    if num_neighbors is not None:
        neighbors = knn(z.detach(), z.detach(), num_neighbors, exclude_self=True, exact=exact, chunk_size=block)[1]
        # [rows, k, features] is as large a temporary as one block of distances, and is not kept for the backward pass
        chunk_size = max(1, block * n // (num_neighbors * z.shape[1]))
    if chunk_size is None or chunk_size >= n:
        return _soft_ranks_of_rows(z, r, 0, n, neighbors, temperature, exact)
    parts = []
    for start in range(0, n, chunk_size):
        stop = min(start + chunk_size, n)
        chosen = None if neighbors is None else neighbors[start:stop]
        arguments = (z, r, start, stop, chosen, temperature, exact)
        if torch.is_grad_enabled() and z.requires_grad:
            parts.append(checkpoint(_soft_ranks_of_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_soft_ranks_of_rows(*arguments))
    return torch.cat(parts)


def diffoci_coefficient(
    y: Shaped[Tensor, "n *c"],
    z: Num[Tensor, "n *q"],
    x: Num[Tensor, "n *p"] | None = None,
    *,
    beta: float = 0.2,
    ties: Literal["max", "ordinal"] = "max",
    num_neighbors: int | None = None,
    distance_scale: Literal["none", "mean"] = "none",
    validate: bool = False,
    chunk_size: int | None = None,
) -> Float[Tensor, ""]:
    """The differentiable coefficient T_{n,beta}: :func:`codec` with a softmax over neighbours instead of the nearest.

    Maximise it to make z tell y; minimise it to make z forget y. The gradient reaches z (and x) through the soft ranks
    Rtilde_i, from samples with Rtilde_i < R_i only.

    What values mean: for beta -> 0 it tends to T_n. When beta is large or the features collapse to a point, Rtilde is
    the mean rank and T tends to 1/4 for a continuous y and to 0 for a binary one: values at large beta are not
    comparable with T_n, and minimising T over a continuous attribute cannot reach 0.

    Source: Lehman Pavasovic et al. (2025), the definition of difFOCI; there beta is the inverse of the ``beta`` here.

    Args:
        y: ordered response, [n], any real dtype or bool; or [n, c]: the mean over the columns, of which constant ones
            count 0. An attribute of more than two unordered classes goes in one-hot.
        z: variables, [n] or [n, q].
        x: variables that are given, [n] or [n, p].
        beta: temperature, the divisor of the distances; > 0.
        ties: "max" ranks are the definition; "ordinal" breaks ties of y by position, as the authors' code does. They
            differ for a discrete y: for y = 1[z > 0] "max" tends to 1 and "ordinal" to about 0.6.
        num_neighbors: softmax over the k nearest only; the backward pass keeps [n, k] values. None: all.
        distance_scale: "mean" divides the distances by their (detached) mean, which makes beta free of units and takes
            away the escape of shrinking all features. Not in the paper.
        validate: look for NaN and infinite values on an accelerator too.
        chunk_size: rows at a time; then memory is ``chunk_size * n``, and the backward pass computes the distances
            again.

    Returns:
        T, a scalar. Value and gradient are 0 for a constant y, and when y is a function of x in the sample.

    Raises:
        ValueError: shapes do not fit, fewer than 2 samples, beta not positive and finite, unknown choices,
            num_neighbors outside 1..n-1, NaN or infinite values.

    Example:
        >>> z = torch.linspace(-2, 2, 400)
        >>> diffoci_coefficient(z.square(), z, beta=0.01).item() > 0.95
        True
    """
    check_range("beta", beta, 0, low_open=True)
    check_choice("ties", ties, ("max", "ordinal"))
    check_choice("distance_scale", distance_scale, ("none", "mean"))
    n = _check_inputs(y, z, x, validate)
    if num_neighbors is not None:
        check_range("num_neighbors", num_neighbors, 1, n - 1)
    if chunk_size is not None:
        check_range("chunk_size", chunk_size, 1)
    z = _columns(z)
    with torch.autocast(z.device.type, enabled=False):
        # Ranks as shares of n: the sums stay small enough for float32.
        r, l = (rank.reshape(n, -1).to(z.dtype) / n for rank in rank_statistics(y, ties))  # noqa: E741

        def minimum(features: Tensor) -> Tensor:
            """min(R_i, Rtilde_i) with soft neighbours by these features, [n, c]."""
            soft = _soft_ranks(features, r, beta, num_neighbors, distance_scale, chunk_size)
            return torch.where(soft < r, soft, r)  # not torch.minimum, which halves the gradient at equality

        if x is None:
            numerator, denominator = (minimum(z) - l.square()).sum(dim=0), (l * (1 - l)).sum(dim=0)
            defined = denominator > 0
        else:
            x = _columns(x)
            without_z = minimum(x)
            numerator = (minimum(torch.cat([x, z], dim=1)) - without_z).sum(dim=0)
            denominator = (r - without_z).sum(dim=0)
            # Weights that sum to 1 up to rounding leave this much of a sum that should be 0.
            defined = denominator > 32 * torch.finfo(r.dtype).eps * n
        return torch.where(defined, numerator / torch.where(defined, denominator, 1), 0).mean()


# forward selection


class FOCIResult(NamedTuple):
    """What :func:`foci` selected.

    Attributes:
        indices: selected columns in order, int64 [s].
        step_t: the coefficient T_n of y on the columns selected so far, [s].
    """

    indices: Tensor
    step_t: Tensor


def _inverse_scale(x: Tensor, standardize: str) -> Tensor:
    """Factor of each column, [p]."""
    if standardize == "none":
        return x.new_ones(x.shape[1])
    spread = x.std(dim=0) if standardize == "scale" else x.amax(dim=0) - x.amin(dim=0)
    constant = (x == x[0]).all(dim=0)
    if constant.any():
        raise ValueError(
            f"x: column {int(constant.nonzero()[0, 0])} is constant and cannot be standardised; remove it or use "
            "standardize='none'."
        )
    return 1 / spread


def _sums_of_minimum_ranks(
    x: Tensor, weight: Tensor, r: Tensor, selected: list[int], candidates: Tensor, chunk_size: int
) -> Tensor:
    """sum_i min(R_i, R_M(i)), M(i) by the selected columns and one candidate, for every candidate; [candidates]."""
    n = len(x)
    sums = x.new_zeros(len(candidates))
    columns = x[:, candidates].T
    for own in torch.arange(n, device=x.device).split(chunk_size):
        base = x.new_zeros(len(own), n)
        for j in selected:  # one after the other, so that what is equal stays equal in floating point
            base += (x[own, j, None] - x[None, :, j]).square() * weight[j]
        base[torch.arange(len(own), device=x.device), own] = torch.inf
        for block in torch.arange(len(candidates), device=x.device).split(max(1, chunk_size // len(own))):
            difference = columns[block][:, own, None] - columns[block][:, None, :]
            distance = base + difference.square() * weight[candidates[block], None, None]
            ties = _nearest(distance.flatten(0, 1))
            everyone = own.repeat(len(block))
            minimum = _minimum_ranks(r, everyone, ties, "average", None)
            sums[block] += minimum.view(len(block), -1).sum(dim=1)
    return sums


@torch.no_grad()
def foci(
    y: Shaped[Tensor, " n"],
    x: Num[Tensor, "n p"],
    *,
    max_features: int | None = None,
    stop: bool = True,
    standardize: Literal["scale", "bounded", "none"] = "scale",
    chunk_size: int = 1024,
) -> FOCIResult:
    """Forward selection of variables by the coefficient T_n, without a model or a tuning parameter.

    Step by step the column that gives the largest T_n together with those selected is added (the lowest index on ties).

    Source: Azadkia & Chatterjee (2021), the algorithm FOCI.

    Args:
        y: ordered response, [n].
        x: candidate variables, [n, p].
        max_features: at most this many; None is p.
        stop: end when T_n does not grow (it starts at 0: nothing may be selected). Otherwise go on to ``max_features``.
        standardize: "scale" (standard deviation 1), "bounded" (range 1) or "none", before distances are taken.
        chunk_size: memory is ``chunk_size * n``.

    Returns:
        ``FOCIResult(indices, step_t)``.

    Raises:
        ValueError: shapes do not fit, fewer than 2 samples, NaN or infinite values, a constant column (unless
            standardize="none"), max_features outside 1..p.

    Example:
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> foci(x[:, 2], x).indices
        tensor([2])
    """
    check_choice("standardize", standardize, ("scale", "bounded", "none"))
    check_shape("y", y, "n")
    p = check_shape("x", x, "n p")["p"]
    n = _check_inputs(y, x, None, validate=True)
    max_features = p if max_features is None else max_features
    check_range("max_features", max_features, 1, p)
    check_range("chunk_size", chunk_size, 1)
    dtype, x = _columns(x).dtype, _wide(_columns(x))
    weight = _inverse_scale(x, standardize).square()
    r, l = (_wide(rank) for rank in rank_statistics(y))  # noqa: E741
    denominator = (l * (n - l)).sum()
    selected: list[int] = []
    steps: list[Tensor] = []
    previous = x.new_zeros(())
    while len(selected) < max_features:
        candidates = torch.tensor([j for j in range(p) if j not in selected], device=x.device)
        sums = _sums_of_minimum_ranks(x, weight, r[:, None], selected, candidates, chunk_size)
        t = torch.where(denominator > 0, (n * sums - l.square().sum()) / denominator, 1)
        best = t.argmax()  # the first of equal values
        if stop and t[best] <= previous:
            break
        previous = t[best]
        selected.append(int(candidates[best]))
        steps.append(previous)
    indices = torch.tensor(selected, dtype=torch.int64, device=x.device)
    return FOCIResult(indices, (torch.stack(steps) if steps else x.new_zeros(0)).to(dtype))


# training a classifier


def group_dro_update(
    q: Float[Tensor, " groups"], losses: Float[Tensor, " n"], groups: Int[Tensor, " n"], eta: float
) -> tuple[Float[Tensor, ""], Float[Tensor, " groups"]]:
    """One step of group distributionally robust optimisation: weights grow with the loss of their group.

    q_g is multiplied by exp(eta * mean loss of g) for every group in the batch, all are divided by their sum, and the
    loss is sum_g q_g * mean loss of g with the new weights.

    Source: Sagawa et al., "Distributionally robust neural networks" (2020).

    Args:
        q: weights of the groups, non-negative, [G].
        losses: loss of every sample, [n].
        groups: group of every sample, 0..G-1, [n].
        eta: step size, at least 0.

    Returns:
        ``(loss, new_q)``; the loss has gradient, ``new_q`` sums to 1 and has none.

    Raises:
        ValueError: shapes do not fit, eta is negative, or a group is out of range.

    Example:
        >>> loss, q = group_dro_update(torch.ones(2), torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), eta=0.1)
        >>> q
        tensor([0.4502, 0.5498])
    """
    check_range("eta", eta, 0)
    size = check_shape("q", q, "groups")["groups"]
    check_shape("losses", losses, "n")
    check_labels("groups", groups, size, batch=len(losses))
    losses = at_least_float32(losses)
    count = torch.zeros(size, dtype=losses.dtype, device=losses.device).index_add(0, groups, torch.ones_like(losses))
    mean = torch.zeros_like(count).index_add(0, groups, losses) / count.clamp_min(1)
    # In logarithms, since exp(eta * loss) overflows for large losses; groups that are not there have mean 0.
    new_q = torch.softmax(q.detach().to(losses.dtype).log() + eta * mean.detach(), dim=0)
    return (new_q * mean).sum(), new_q.to(q.dtype)


def saliency_map(
    model: nn.Module, images: Float[Tensor, "batch channels height width"], target: Int[Tensor, " batch"] | None = None
) -> Float[Tensor, "batch height width"]:
    """Which pixels the score of a class depends on: the largest absolute derivative over the channels.

    The model is put in eval mode for the call; its gradients and modes are as before afterwards.

    Source: Simonyan et al., "Deep inside convolutional networks" (2014).

    Args:
        model: images to scores [batch, classes].
        images: [batch, channels, height, width].
        target: class whose score is taken, [batch]; None is the highest score.

    Returns:
        Maps scaled to [0, 1] image by image, [batch, height, width]; zeros where a map is constant.

    Raises:
        ValueError: shapes do not fit.
    """
    batch = check_shape("images", images, "batch channels height width")["batch"]
    with torch.enable_grad(), evaluating(model, grad=True):
        images = images.detach().clone().requires_grad_()
        scores = model(images)
        classes = check_shape("model(images)", scores, "batch classes", batch=batch)["classes"]
        if target is not None:
            check_labels("target", target, classes, batch=batch)
            score = scores.gather(1, target[:, None])
        else:
            score = scores.amax(dim=1)
        gradient = torch.autograd.grad(score.sum(), images)[0]
    saliency = gradient.abs().amax(dim=1)
    low, high = saliency.amin(dim=(1, 2), keepdim=True), saliency.amax(dim=(1, 2), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (saliency - low) / torch.where(spread > 0, spread, 1), 0)
