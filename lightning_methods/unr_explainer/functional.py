"""Importance of edges for a node's neighbourhood in embedding space, and the losses of the encoders.

Source: Kang, Han, Park, "UNR-Explainer: Counterfactual Explanations for Unsupervised Node Representation Learning
Models", ICLR 2024. With Z = f(X, E) the embeddings, N_v the k nearest nodes of v among the rows of Z, and N'_v those
among the rows of Z' = f(X, E without E_s):

    Importance(E_s) = 1 - |N_v and N'_v| / k

It is 1 where removing the edges E_s leaves v none of its neighbours: a counterfactual explanation.

Direction: messages go from row 0 of ``edge_index`` to row 1. Undirected graphs hold every edge in both directions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..core.checks import check_floating, check_range, check_same_rows, check_shape, values_visible
from ..core.losses import at_least_float32
from ..core.neighbors import pairwise_distances
from ..core.ordering import stable_topk
from ..graph.ops import check_edge_index, undirected_pairs

__all__ = [
    "dgi_loss",
    "edge_set_importance",
    "explanation_precision_recall",
    "knn_importance",
    "knn_indices",
    "link_loss",
    "remove_edges",
    "ucb1",
]

MOTIF_EDGES = 6  # of a house and of a cycle: what the authors' code divides by
EPS = 1e-15


# neighbours


@torch.no_grad()
def knn_indices(
    z: Float[Tensor, "n dim"], k: int, nodes: Int[Tensor, " m"] | None = None, chunk_size: int = 1024
) -> Int[Tensor, "m k"]:
    """The k nearest other nodes by Euclidean distance, nearest first; of equally near ones the lower index.

    A node is never its own neighbour, its duplicates are: its own distance is left out by position. (The authors' code
    sorts all distances and drops the first, which among duplicates need not be the node itself.)

    Args:
        z: embeddings, [n, dim].
        k: number of neighbours, 1 to n - 1.
        nodes: the nodes whose neighbours are wanted, int64 [m]; None for all.
        chunk_size: nodes at a time; memory is ``chunk_size * n``.

    Returns:
        int64 [m, k].

    Raises:
        ValueError: shapes do not fit, k or a node is out of range.

    Example:
        >>> knn_indices(torch.tensor([[0.0], [1.0], [3.0], [1.0]]), 2)
        tensor([[1, 3],
                [3, 0],
                [1, 3],
                [1, 0]])
    """
    n = check_shape("z", z, "n dim")["n"]
    check_range("k", k, 1, n - 1)
    check_range("chunk_size", chunk_size, 1)
    if nodes is None:
        nodes = torch.arange(n, device=z.device)
    _check_nodes("nodes", nodes, n)
    chunks = []
    for part in nodes.split(chunk_size):
        distance = pairwise_distances(z[part], z, exact=True)
        distance.scatter_(1, part[:, None], torch.inf)
        chunks.append(stable_topk(distance, k, largest=False)[1])
    return torch.cat(chunks) if chunks else nodes.new_empty(0, k)


def _check_nodes(name: str, nodes: Tensor, n: int) -> None:
    check_shape(name, nodes, "m")
    if values_visible(nodes) and nodes.numel() and not (int(nodes.min()) >= 0 and int(nodes.max()) < n):
        raise ValueError(f"{name} must be in 0..{n - 1}, got {int(nodes.min())}..{int(nodes.max())}.")


def knn_importance(before: Int[Tensor, "m k"], after: Int[Tensor, "m k"]) -> Float[Tensor, " m"]:
    """Share of the neighbours that are lost, ``1 - |before and after| / k``.

    Args:
        before: neighbours with all edges, different nodes in each row, int64 [m, k].
        after: neighbours without the explanation's edges, [m, k].

    Returns:
        float64 [m] in [0, 1].

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> knn_importance(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[4, 9, 8, 7]]))
        tensor([0.7500], dtype=torch.float64)
    """
    sizes = check_shape("before", before, "m k")
    check_shape("after", after, "m k", **sizes)
    check_range("k", sizes["k"], 1)
    kept = (before[:, :, None] == after[:, None, :]).any(dim=2).sum(dim=1)
    return (sizes["k"] - kept).double() / sizes["k"]


# edges


def remove_edges(edge_index: Int[Tensor, "2 edges"], edges: Int[Tensor, "removed 2"]) -> Int[Tensor, "2 kept"]:
    """The graph without some of its edges, each removed in both directions; nodes and order stay.

    Args:
        edge_index: int64 [2, E].
        edges: pairs of nodes in any order, int64 [S, 2].

    Returns:
        int64 [2, E'].

    Raises:
        ValueError: shapes do not fit, or the graph does not have one of the edges in any direction.

    Example:
        >>> remove_edges(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.tensor([[2, 1]]))
        tensor([[0, 1],
                [1, 0]])
    """
    return edge_index[:, ~in_edges(edge_index, edges)]


def in_edges(edge_index: Tensor, edges: Tensor) -> Tensor:
    """Which columns are one of the edges, in whichever direction: bool [E]; for the checks see :func:`remove_edges`."""
    check_edge_index("edge_index", edge_index)
    check_shape("edges", edges, "removed two", two=2)
    if edges.numel() == 0:
        return torch.zeros(edge_index.shape[1], dtype=torch.bool, device=edge_index.device)
    base = torch.maximum(edge_index.max(), edges.max()) + 1 if edge_index.numel() else edges.max() + 1
    columns = edge_index.amin(0) * base + edge_index.amax(0)
    wanted = edges.amin(1) * base + edges.amax(1)
    if values_visible(edges):
        absent = ~torch.isin(wanted, columns)
        if absent.any():
            raise ValueError(f"edges holds {edges[absent][0].tolist()}, which is no edge of the graph.")
    return torch.isin(columns, wanted)


@torch.no_grad()
def edge_set_importance(
    encoder: Callable[[Tensor, Tensor], Tensor],
    x: Float[Tensor, "n features"],
    edge_index: Int[Tensor, "2 edges"],
    edges: Int[Tensor, "removed 2"],
    node: int,
    neighbors: Int[Tensor, " k"],
) -> float:
    """Importance of a set of edges for a node, by a whole forward pass without them. No gradient.

    Args:
        encoder: ``encoder(x, edge_index)`` gives embeddings [n, dim]; a module should be in eval mode.
        x: node features, [n, features].
        edge_index: int64 [2, E].
        edges: the edges E_s, int64 [S, 2]; they are removed in both directions.
        node: v.
        neighbors: N_v, the k nearest nodes of v with all edges, int64 [k].

    Returns:
        In [0, 1].

    Raises:
        ValueError: shapes do not fit, an edge is not in the graph, or the node is out of range.

    Example:
        >>> def degree(x, edge_index):
        ...     return torch.bincount(edge_index[1], minlength=len(x)).float()[:, None]
        >>> path = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])  # degrees 1, 2, 2, 1
        >>> edge_set_importance(degree, torch.ones(4, 1), path, torch.tensor([[0, 1]]), 1, torch.tensor([2]))
        1.0
    """
    n = check_shape("x", x, "n features")["n"]
    k = check_shape("neighbors", neighbors, "k")["k"]
    check_range("node", node, 0, n - 1)
    z = encoder(x, remove_edges(edge_index, edges))
    after = knn_indices(z, k, torch.tensor([node], device=z.device))
    return float(knn_importance(neighbors[None], after))


# search


def ucb1(
    value: Float[Tensor, " children"], visits: Int[Tensor, " children"], total: int, c: float
) -> Float[Tensor, " children"]:
    """Upper confidence bound of a tree's nodes, ``V_i + c sqrt(ln N / N_i)``.

    Args:
        value: V_i, here the largest importance seen below the node, [children].
        visits: N_i, int64 [children].
        total: N, here the visits of the root.
        c: weight of the exploration, not negative.

    Returns:
        [children]; infinite where there was no visit.

    Raises:
        ValueError: shapes do not fit, total or c is negative.

    Example:
        >>> ucb1(torch.tensor([0.2, 0.4, 0.0]), torch.tensor([1, 2, 0]), 3, 1.0)
        tensor([1.2481, 1.1412,    inf])
    """
    check_floating("value", value)
    children = check_shape("value", value, "children")["children"]
    check_shape("visits", visits, "children", children=children)
    check_range("total", total, 0)
    check_range("c", c, 0)
    log_total = torch.tensor(float(max(total, 1)), dtype=torch.float64).log().item()
    bound = value + c * (log_total / visits.clamp_min(1).to(value.dtype)).sqrt()
    return torch.where(visits == 0, torch.inf, bound)


# losses of the encoders


def dgi_loss(
    z_pos: Float[Tensor, "n dim"],
    z_neg: Float[Tensor, "m dim"],
    summary: Float[Tensor, " dim"],
    weight: Float[Tensor, "dim dim"],
) -> Float[Tensor, ""]:
    """Deep Graph Infomax: tell nodes of the graph from nodes of its corruption by the graph's summary.

    Source: Velickovic et al., "Deep Graph Infomax", ICLR 2019, with D(z) = sigmoid(z^T W s):

        loss = -mean log(D(z_pos) + eps) - mean log(1 - D(z_neg) + eps),    eps = 1e-15

    In float32 a saturated discriminator gives 1 - D = 0, so a term is at most -log eps = 34.5.

    Args:
        z_pos: embeddings of the graph, [n, dim].
        z_neg: embeddings of the corrupted graph, [m, dim].
        summary: s, [dim].
        weight: W, [dim, dim].

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> zeros = torch.zeros(3, 2)
        >>> dgi_loss(zeros, zeros, torch.ones(2), torch.eye(2))  # 2 log 2
        tensor(1.3863)
    """
    dim = check_shape("z_pos", z_pos, "n dim")["dim"]
    check_shape("z_neg", z_neg, "m dim", dim=dim)
    check_shape("summary", summary, "dim", dim=dim)
    check_shape("weight", weight, "rows columns", rows=dim, columns=dim)
    z_pos, z_neg, summary, weight = map(at_least_float32, (z_pos, z_neg, summary, weight))
    with torch.autocast(z_pos.device.type, enabled=False):
        direction = weight @ summary
        real, fake = torch.sigmoid(z_pos @ direction), torch.sigmoid(z_neg @ direction)
        return -(real + EPS).log().mean() - (1 - fake + EPS).log().mean()


def link_loss(
    z: Float[Tensor, "n dim"],
    pos_edges: Int[Tensor, "2 P"],
    neg_edges: Int[Tensor, "2 Q"],
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """Binary cross-entropy of the scores z_i . z_j of edges and of pairs that are none.

    Args:
        z: embeddings, [n, dim].
        pos_edges: edges, int64 [2, P].
        neg_edges: other pairs of nodes, int64 [2, Q].
        reduction: "mean" over all P + Q pairs, or their "sum".

    Returns:
        A scalar, float32 or wider.

    Raises:
        ValueError: shapes do not fit, nodes out of range, no pairs, or an unknown reduction.

    Example:
        >>> z = torch.tensor([[1.0], [0.0], [0.0]])
        >>> link_loss(z, torch.tensor([[0], [1]]), torch.tensor([[1], [2]]))  # both scores are 0
        tensor(0.6931)
    """
    n = check_shape("z", z, "n dim")["n"]
    check_edge_index("pos_edges", pos_edges, n)
    check_edge_index("neg_edges", neg_edges, n)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be one of 'mean', 'sum'; got {reduction!r}.")
    pairs = torch.cat([pos_edges, neg_edges], dim=1)
    if pairs.shape[1] == 0:
        raise ValueError("pos_edges and neg_edges are both empty, [2, 0].")
    z = at_least_float32(z)
    with torch.autocast(z.device.type, enabled=False):
        scores = (z[pairs[0]] * z[pairs[1]]).sum(dim=1)
        target = torch.zeros_like(scores)
        target[: pos_edges.shape[1]] = 1
        return F.binary_cross_entropy_with_logits(scores, target, reduction=reduction)


# explanations against planted motifs


def explanation_precision_recall(
    edges: Int[Tensor, "explained 2"],
    *,
    graph_edges: Int[Tensor, "edges 2"],
    motif: Int[Tensor, " n"],
    node: int,
    official_recall: bool = False,
) -> tuple[float, float]:
    """How much of an explanation lies in the motif of the node, and how much of the motif it covers.

    The motif's edges are the graph's edges with both ends in the node's motif. Both lists are read as undirected, and
    an edge that is given twice counts once.

    Args:
        edges: the explanation, int64 [S, 2].
        graph_edges: the graph's edges, in one or both directions, int64 [E, 2].
        motif: motif of every node, int64 [n]; -1 is none.
        node: the explained node.
        official_recall: divide the recall by 6, as the authors' code does for every graph. The grid's motifs have 12
            edges, so that their recall on it is twice the true one.

    Returns:
        ``(precision, recall)``; the precision of an empty explanation is 0, and both are 0 for a node in no motif.

    Raises:
        ValueError: shapes do not fit, or the node is out of range.

    Example:
        >>> triangle_and_tail = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 3]])
        >>> motif = torch.tensor([7, 7, 7, -1])
        >>> explanation_precision_recall(
        ...     torch.tensor([[0, 2], [2, 3]]), graph_edges=triangle_and_tail, motif=motif, node=0
        ... )
        (0.5, 0.3333333333333333)
    """
    n = check_shape("motif", motif, "n")["n"]
    check_shape("edges", edges, "explained two", two=2)
    check_shape("graph_edges", graph_edges, "edges two", two=2)
    check_same_rows(motif=motif)
    check_range("node", node, 0, n - 1)
    explained, present = undirected_pairs(edges.T, n), undirected_pairs(graph_edges.T, n)
    home = motif[node]
    planted = present[(motif[present] == home).all(dim=1) & (home >= 0)]
    hits = int(torch.isin(explained[:, 0] * n + explained[:, 1], planted[:, 0] * n + planted[:, 1]).sum())
    size = MOTIF_EDGES if official_recall else len(planted)
    return hits / max(len(explained), 1), hits / max(size, 1)
