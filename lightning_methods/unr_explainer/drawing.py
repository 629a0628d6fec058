"""An explanation as a picture: the node's surroundings, the edges that matter, the neighbours that are lost."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_range
from ..graph.ops import induced_edges, neighbor_lists, undirected_pairs
from ..graph.types import Graph
from .explainer import Explanation

__all__ = ["draw_explanation"]

COLORS = {"explanation": "#D55E00", "motif": "#56B4E9", "base": "#C9C9C4", "lost": "#009E73", "edge": "#B5B5B0"}


def draw_explanation(
    graph: Graph,
    explanation: Explanation,
    neighbors: Collection[int] | Tensor = (),
    axis: Any = None,
    hops: int = 2,
    max_nodes: int = 60,
    labels: bool = True,
) -> Any:
    """Draw the edges of an explanation among the node's surroundings.

    The explained node is a star, edges of the explanation are thick; nodes of its planted motif are blue, and its
    nearest nodes in embedding space, of which removing the edges loses some, have a green ring where they are in sight.

    Args:
        graph: the graph.
        explanation: what to draw.
        neighbors: nearest nodes in embedding space, as :meth:`UNRExplainer.neighbors` gives them.
        axis: matplotlib axes; None makes a figure.
        hops: how far the surroundings go, at least 1.
        max_nodes: draw at most so many nodes, those near the explained one first; those of the explanation always.
        labels: write the nodes' numbers.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: hops or max_nodes is below 1, or the node is out of range.
    """
    import networkx as nx

    check_range("hops", hops, 1)
    check_range("max_nodes", max_nodes, 1)
    node = explanation.node
    check_range("explanation.node", node, 0, graph.num_nodes - 1)
    explained = [tuple(edge) for edge in explanation.edges.tolist()]
    nodes = _surroundings(graph, node, [end for edge in explained for end in edge], hops, max_nodes)
    index = torch.tensor(sorted(nodes), device=graph.edge_index.device)
    edges = [tuple(edge) for edge in undirected_pairs(induced_edges(graph.edge_index, index), graph.num_nodes).tolist()]
    drawn = nx.Graph(edges)
    drawn.add_nodes_from(nodes)
    place = nx.kamada_kawai_layout(drawn)
    if axis is None:
        from matplotlib.figure import Figure

        axis = Figure(figsize=(5, 4.5)).subplots()
    for u, v in edges:
        ends = list(zip(place[u], place[v], strict=True))
        if (u, v) in explained:
            axis.plot(*ends, color=COLORS["explanation"], lw=3.2, zorder=2, solid_capstyle="round")
        else:
            axis.plot(*ends, color=COLORS["edge"], lw=0.8, zorder=1)
    near = {int(other) for other in neighbors}
    home = -1 if graph.motif is None else int(graph.motif[node])
    for other in nodes:
        in_motif = home >= 0 and int(graph.motif[other]) == home
        axis.scatter(
            *place[other],
            s=260 if other == node else 70,
            marker="*" if other == node else "o",
            color=COLORS["motif" if in_motif else "base"],
            edgecolors=COLORS["lost"] if other in near else "#5A5A5A",
            linewidths=2.2 if other in near else 0.6,
            zorder=3,
        )
        if labels:
            axis.annotate(str(other), place[other], xytext=(4, 4), textcoords="offset points", fontsize=6.5, zorder=4)
    axis.set_axis_off()
    axis.set_aspect("equal")
    axis.set_title(f"node {node}: {len(explained)} edges, importance {explanation.importance:.1f}", loc="left")
    return axis


def _surroundings(graph: Graph, node: int, always: list[int], hops: int, max_nodes: int) -> list[int]:
    """The node, the explanation's, then the others by distance."""
    lists = neighbor_lists(graph.edge_index, graph.num_nodes)
    found = dict.fromkeys([node, *always])
    ring = list(found)
    for _ in range(hops):
        ring = [other for place in ring for other in lists[place] if other not in found]
        for other in dict.fromkeys(ring):
            if len(found) < max_nodes:
                found[other] = None
        ring = [other for other in dict.fromkeys(ring) if other in found]
    return list(found)
