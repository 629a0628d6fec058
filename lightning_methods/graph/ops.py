"""Operations on edge lists ``edge_index`` int64 [2, E], without a graph library."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.checks import check_range, check_shape, values_visible
from ..core.losses import at_least_float32

__all__ = [
    "edge_positions",
    "gcn_norm",
    "has_reverse",
    "induced_edges",
    "negative_edges",
    "neighbor_lists",
    "remove_self_loops",
    "scatter_mean",
    "scatter_softmax",
    "scatter_sum",
    "to_undirected",
    "undirected_pairs",
]


def check_edge_index(name: str, edge_index: Tensor, num_nodes: int | None = None) -> None:
    """Raise a ``ValueError`` unless the edge list is int64 [2, E] with nodes in 0 .. num_nodes - 1."""
    check_shape(name, edge_index, "two edges", two=2)
    if edge_index.dtype != torch.int64:
        raise ValueError(f"{name} must have dtype int64, got {edge_index.dtype}.")
    if num_nodes is None or edge_index.numel() == 0 or not values_visible(edge_index):
        return
    low, high = int(edge_index.min()), int(edge_index.max())
    if low < 0 or high >= num_nodes:
        raise ValueError(f"{name} must have nodes in 0..{num_nodes - 1}, got {low}..{high}.")


# sums over the edges of a node


def _check_scatter(src: Tensor, index: Tensor, dim_size: int) -> None:
    if src.dim() == 0:
        raise ValueError("src must have shape [edges, ...], got [].")
    check_shape("index", index, "edges", edges=src.shape[0])
    check_range("dim_size", dim_size, 0)
    if index.numel() and values_visible(index) and not (int(index.min()) >= 0 and int(index.max()) < dim_size):
        raise ValueError(f"index must be in 0..{dim_size - 1}, got {int(index.min())}..{int(index.max())}.")


def scatter_sum(src: Float[Tensor, "edges *rest"], index: Int[Tensor, " edges"], dim_size: int) -> Tensor:
    """Sum of the rows of ``src`` that have the same index, float32 or wider.

    Args:
        src: [edges, ...].
        index: row of the result that each row is added to, int64 [edges].
        dim_size: rows of the result.

    Returns:
        [dim_size, ...]; a row that nothing is added to is 0.

    Raises:
        ValueError: shapes do not fit, or an index is out of range.

    Example:
        >>> scatter_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([2, 0, 2]), 3)
        tensor([2., 0., 6.])
    """
    _check_scatter(src, index, dim_size)
    src = at_least_float32(src)
    return src.new_zeros(dim_size, *src.shape[1:]).index_add(0, index, src)


def scatter_mean(src: Float[Tensor, "edges *rest"], index: Int[Tensor, " edges"], dim_size: int) -> Tensor:
    """Mean of the rows of ``src`` that have the same index; see :func:`scatter_sum`.

    Example:
        >>> scatter_mean(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([2, 0, 2]), 3)
        tensor([2., 0., 3.])
    """
    total = scatter_sum(src, index, dim_size)
    count = torch.bincount(index, minlength=dim_size).clamp_min(1).to(total.dtype)
    return total / count.view(-1, *[1] * (total.dim() - 1))


def scatter_softmax(src: Float[Tensor, "edges *rest"], index: Int[Tensor, " edges"], dim_size: int) -> Tensor:
    """Softmax among the rows of ``src`` that have the same index, [edges, ...]; see :func:`scatter_sum`.

    Example:
        >>> scatter_softmax(torch.tensor([0.0, 3.0, 0.0]), torch.tensor([1, 0, 1]), 2)
        tensor([0.5000, 1.0000, 0.5000])
    """
    _check_scatter(src, index, dim_size)
    src = at_least_float32(src)
    rows = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    # The maximum cancels in the quotient: it takes no gradient.
    top = src.new_full((dim_size, *src.shape[1:]), -torch.inf).scatter_reduce(0, rows, src.detach(), "amax")
    weight = (src - top[index]).exp()
    return weight / scatter_sum(weight, index, dim_size)[index]


# edge lists


def _codes(edge_index: Tensor, num_nodes: int) -> Tensor:
    """One number for each ordered pair of nodes."""
    return edge_index[0] * num_nodes + edge_index[1]


def remove_self_loops(edge_index: Int[Tensor, "2 edges"]) -> Int[Tensor, "2 kept"]:
    """The edges between different nodes, in order."""
    check_edge_index("edge_index", edge_index)
    return edge_index[:, edge_index[0] != edge_index[1]]


def to_undirected(edge_index: Int[Tensor, "2 edges"], num_nodes: int) -> Int[Tensor, "2 both"]:
    """Every edge in both directions, each once, sorted by first and then second node.

    Example:
        >>> to_undirected(torch.tensor([[0, 1, 2], [1, 0, 1]]), 3)
        tensor([[0, 1, 1, 2],
                [1, 0, 2, 1]])
    """
    check_edge_index("edge_index", edge_index, num_nodes)
    codes = torch.cat([_codes(edge_index, num_nodes), _codes(edge_index.flip(0), num_nodes)]).unique()
    return torch.stack([codes // num_nodes, codes % num_nodes])


def undirected_pairs(edge_index: Int[Tensor, "2 edges"], num_nodes: int) -> Int[Tensor, "pairs 2"]:
    """Every edge once as a pair u < v, sorted; self-loops are left out.

    Example:
        >>> undirected_pairs(torch.tensor([[2, 0, 1, 1], [1, 1, 0, 1]]), 3)
        tensor([[0, 1],
                [1, 2]])
    """
    check_edge_index("edge_index", edge_index, num_nodes)
    low, high = edge_index.amin(0), edge_index.amax(0)
    codes = _codes(torch.stack([low, high])[:, low < high], num_nodes).unique()
    return torch.stack([codes // num_nodes, codes % num_nodes], dim=1)


def has_reverse(edge_index: Int[Tensor, "2 edges"], num_nodes: int) -> Bool[Tensor, " edges"]:
    """Whether the reverse of every edge is in the list too, [edges]."""
    check_edge_index("edge_index", edge_index, num_nodes)
    return torch.isin(_codes(edge_index.flip(0), num_nodes), _codes(edge_index, num_nodes))


def induced_edges(edge_index: Int[Tensor, "2 edges"], nodes: Int[Tensor, " m"]) -> Int[Tensor, "2 kept"]:
    """The edges with both ends among the nodes, in order; nodes keep their numbers."""
    check_edge_index("edge_index", edge_index)
    return edge_index[:, torch.isin(edge_index, nodes).all(dim=0)]


def edge_positions(edge_index: Int[Tensor, "2 edges"]) -> dict[tuple[int, int], list[int]]:
    """The columns in which every ordered pair of nodes stands.

    Example:
        >>> edge_positions(torch.tensor([[0, 1, 0], [1, 0, 1]]))
        {(0, 1): [0, 2], (1, 0): [1]}
    """
    check_edge_index("edge_index", edge_index)
    found: dict[tuple[int, int], list[int]] = {}
    for position, pair in enumerate(edge_index.T.tolist()):
        found.setdefault(tuple(pair), []).append(position)
    return found


def neighbor_lists(edge_index: Int[Tensor, "2 edges"], num_nodes: int) -> list[list[int]]:
    """The other ends of the edges that leave each node, sorted, each once; a node is no neighbour of itself."""
    check_edge_index("edge_index", edge_index, num_nodes)
    codes = _codes(remove_self_loops(edge_index), num_nodes).unique()
    degrees = torch.bincount(codes // num_nodes, minlength=num_nodes)
    return [part.tolist() for part in (codes % num_nodes).cpu().split(degrees.tolist())]


def gcn_norm(
    edge_index: Int[Tensor, "2 edges"], num_nodes: int
) -> tuple[Int[Tensor, "2 edges_and_loops"], Float[Tensor, " edges_and_loops"]]:
    """Edges with a self-loop at every node, and the entries of D^-1/2 (A + I) D^-1/2.

    Self-loops that are there already are replaced, so that every node has one. Degrees count the edges that enter a
    node (row 1); for undirected graphs it is the same.

    Args:
        edge_index: int64 [2, edges].
        num_nodes: n.

    Returns:
        ``(edge_index, weight)``: int64 [2, edges + n] without the old self-loops, float32 [edges + n].

    Raises:
        ValueError: wrong shape or dtype, or nodes out of range.

    Example:
        >>> gcn_norm(torch.tensor([[0, 1], [1, 0]]), 2)[1]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_edge_index("edge_index", edge_index, num_nodes)
    loops = torch.arange(num_nodes, device=edge_index.device).expand(2, -1)
    edges = torch.cat([remove_self_loops(edge_index), loops], dim=1)
    scale = torch.bincount(edges[1], minlength=num_nodes).float().rsqrt()
    return edges, scale[edges[0]] * scale[edges[1]]


def negative_edges(
    edge_index: Int[Tensor, "2 edges"], num_nodes: int, n: int, generator: torch.Generator | None = None
) -> Int[Tensor, "2 n"]:
    """Ordered pairs of different nodes that are no edges, uniform and with replacement.

    No draw is thrown away: a random number is the rank of a pair among the pairs that are allowed.

    Args:
        edge_index: the edges, int64 [2, edges]; of an undirected graph in both directions.
        num_nodes: number of nodes.
        n: number of pairs.
        generator: of the random numbers; None is the global one of the edges' device.

    Returns:
        int64 [2, n].

    Raises:
        ValueError: wrong shape or dtype, nodes out of range, or all pairs are edges.

    Example:
        >>> negative_edges(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3, 4, torch.Generator().manual_seed(0)).sum(0)
        tensor([2, 2, 2, 2])
    """
    check_edge_index("edge_index", edge_index, num_nodes)
    check_range("n", n, 0)
    device = edge_index.device
    diagonal = torch.arange(num_nodes, device=device) * (num_nodes + 1)
    taken = torch.cat([_codes(edge_index, num_nodes), diagonal]).unique()
    free = num_nodes**2 - len(taken)
    if free < 1:
        raise ValueError(f"all pairs of the {num_nodes} nodes are edges: there is no negative one.")
    source = device if generator is None else generator.device
    rank = torch.randint(free, (n,), generator=generator, device=source).to(device)
    # In front of the i-th taken code stand `taken[i] - i` free ones; the others up to it have to be jumped over.
    before = taken - torch.arange(len(taken), device=device)
    codes = rank + torch.searchsorted(before, rank, right=True)
    return torch.stack([codes // num_nodes, codes % num_nodes])
