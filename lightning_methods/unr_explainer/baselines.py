"""Explanations to compare with: a node's surroundings, its nearest nodes, random walks and random edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.checks import check_choice, check_range, check_shape
from ..core.random import make_generator
from ..graph.ops import induced_edges, undirected_pairs
from ..graph.types import Graph
from .explainer import Explanation, UNRExplainer

__all__ = [
    "METHODS",
    "explanations_by",
    "knn_baseline",
    "one_hop_baseline",
    "random_edges_baseline",
    "random_walk_baseline",
]

METHODS = ("unr", "one_hop_2", "one_hop_3", "knn", "random_walk", "random_walk_restart", "random_edges")
MOVES_PER_EDGE = 1000
RESTART = 0.2


def _neighbors(graph: Graph, node: int) -> Tensor:
    """Neighbours of a node, sorted, without itself."""
    check_range("node", node, 0, graph.num_nodes - 1)
    found = graph.edge_index[1, graph.edge_index[0] == node].unique()
    return found[found != node]


def _shuffled(x: Tensor, generator: torch.Generator | None) -> Tensor:
    device = x.device if generator is None else generator.device
    return x[torch.randperm(len(x), generator=generator, device=device).to(x.device)]


def _induced(graph: Graph, nodes: Tensor) -> Tensor:
    return undirected_pairs(induced_edges(graph.edge_index, nodes), graph.num_nodes)


def one_hop_baseline(graph: Graph, node: int, num_nodes: int = 2, generator: torch.Generator | None = None) -> Tensor:
    """All edges among a node and ``num_nodes - 1`` random neighbours: "1hop-2N", "1hop-3N".

    Args:
        graph: the graph.
        node: v.
        num_nodes: nodes of the subgraph, at least 2; all neighbours where there are fewer.
        generator: of the random numbers; None is the global one.

    Returns:
        Sorted pairs u < v, int64 [S, 2].

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> triangle = Graph(torch.ones(3, 1), torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]]))
        >>> one_hop_baseline(triangle, 0, num_nodes=3).tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    check_range("num_nodes", num_nodes, 2)
    chosen = _shuffled(_neighbors(graph, node), generator)[: num_nodes - 1]
    return _induced(graph, torch.cat([chosen, chosen.new_tensor([node])]))


def knn_baseline(graph: Graph, node: int, neighbors: Tensor) -> Tensor:
    """All edges among a node and its nearest nodes in embedding space.

    Args:
        graph: the graph.
        node: v.
        neighbors: the nearest nodes, int64 [k], as :meth:`UNRExplainer.neighbors` gives them.

    Returns:
        Sorted pairs u < v, int64 [S, 2]; possibly none.

    Raises:
        ValueError: the node is out of range, or neighbors is no vector.
    """
    check_range("node", node, 0, graph.num_nodes - 1)
    check_shape("neighbors", neighbors, "k")
    return _induced(graph, torch.cat([neighbors, neighbors.new_tensor([node])]))


def random_walk_baseline(
    graph: Graph, node: int, num_edges: int, restart: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """The edges of a random walk from a node, until it has crossed enough different ones.

    Args:
        graph: the graph.
        node: v.
        num_edges: how many; fewer where the walk finds no more (it gives up after 1000 moves for each).
        restart: probability of a jump back to the node before each move, in [0, 1).
        generator: of the random numbers; None is the global one.

    Returns:
        Sorted pairs u < v, int64 [S, 2].

    Raises:
        ValueError: an argument is out of range.
    """
    check_range("num_edges", num_edges, 0)
    check_range("restart", restart, 0, 1, high_open=True)
    lists: dict[int, list[int]] = {}
    edges: set[tuple[int, int]] = set()
    place, moves = node, 0
    check_range("node", node, 0, graph.num_nodes - 1)
    while len(edges) < num_edges and moves < MOVES_PER_EDGE * num_edges:
        jump, choice = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        moves += 1
        if jump < restart:
            place = node
            continue
        if place not in lists:
            lists[place] = _neighbors(graph, place).tolist()
        if not lists[place]:
            break
        there = lists[place][int(choice * len(lists[place]))]
        edges.add((min(place, there), max(place, there)))
        place = there
    return torch.tensor(sorted(edges), dtype=torch.int64, device=graph.edge_index.device).reshape(-1, 2)


def random_edges_baseline(graph: Graph, num_edges: int, generator: torch.Generator | None = None) -> Tensor:
    """Edges from anywhere in the graph, without replacement.

    Args:
        graph: the graph.
        num_edges: how many; all where there are fewer.
        generator: of the random numbers; None is the global one.

    Returns:
        Sorted pairs u < v, int64 [S, 2].

    Raises:
        ValueError: num_edges is negative.
    """
    check_range("num_edges", num_edges, 0)
    pairs = undirected_pairs(graph.edge_index, graph.num_nodes)
    return undirected_pairs(_shuffled(pairs, generator)[:num_edges].T, graph.num_nodes)


def explanations_by(
    method: str, explainer: UNRExplainer, nodes: Sequence[int], seed: int = 0, num_workers: int = 0
) -> list[Explanation]:
    """Explanations of several nodes by one of the methods, with their importance.

    Args:
        method: "unr", the search; "one_hop_2", "one_hop_3", :func:`one_hop_baseline` with 2 and 3 nodes; "knn",
            :func:`knn_baseline`; "random_walk" and "random_walk_restart" (0.2), :func:`random_walk_baseline`, and
            "random_edges", :func:`random_edges_baseline`, with as many edges as the search finds for the node.
        explainer: the search, and what measures the importance.
        nodes: the nodes.
        seed: of the random numbers of the baselines.
        num_workers: see :meth:`UNRExplainer.explain_all`.

    Returns:
        One explanation for each node; those of a baseline have no history.

    Raises:
        ValueError: unknown method, or a node out of range.
    """
    check_choice("method", method, METHODS)
    graph, searched = explainer.graph, {}
    if method == "unr" or method.startswith("random"):
        found = explainer.explain_all(nodes, num_workers)
        if method == "unr":
            return found
        searched = {explanation.node: len(explanation.edges) for explanation in found}

    def edges_of(node: int) -> Tensor:
        generator = make_generator(seed, method, node)
        if method.startswith("one_hop"):
            return one_hop_baseline(graph, node, int(method[-1]), generator)
        if method == "knn":
            return knn_baseline(graph, node, explainer.neighbors(node))
        if method == "random_edges":
            return random_edges_baseline(graph, searched[node], generator)
        restart = RESTART if method == "random_walk_restart" else 0.0
        return random_walk_baseline(graph, node, searched[node], restart, generator)

    edges = [edges_of(node) for node in nodes]
    importances = explainer.importances(nodes, edges).tolist()
    return [
        Explanation(node, part.cpu(), importance, 0, 1, [])
        for node, part, importance in zip(nodes, edges, importances, strict=True)
    ]
