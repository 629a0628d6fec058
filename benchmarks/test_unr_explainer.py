"""Importance of an edge set: only what changes, against a whole pass with all distances, as it is usually written."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

from lightning_methods.graph import Graph, to_undirected
from lightning_methods.unr_explainer import SAGEEncoder, UNRExplainer


def plain(encoder: nn.Module, graph: Graph, node: int, edges: list[tuple[int, int]], before: Tensor) -> float:
    """Edges are looked for one by one in the list, and every pair of nodes gets a distance."""
    gone = {*edges, *((v, u) for u, v in edges)}
    columns = [i for i, pair in enumerate(zip(*graph.edge_index.tolist(), strict=True)) if pair not in gone]
    with torch.no_grad():
        z = encoder(graph.x, graph.edge_index[:, columns])
    distance = torch.cdist(z, z)
    after = distance[node].argsort()[1 : len(before) + 1]
    return 1 - len(set(before.tolist()) & set(after.tolist())) / len(before)


def ours(explainer: UNRExplainer, node: int, edges: list[tuple[int, int]], before: Tensor) -> float:
    """One evaluation of the search."""
    return explainer._importance(node, before, edges)


@pytest.mark.shapes(small={"n": 500, "m": 2}, cora={"n": 2708, "m": 2}, pubmed={"n": 19717, "m": 2})
@pytest.mark.parametrize("form", [ours, plain])
def test_importance(measure, shape, form, device):
    if form is plain and shape["n"] > 5000:
        pytest.skip("n^2 distances of 19717 nodes are 1.5 GB")
    tree = nx.barabasi_albert_graph(shape["n"], shape["m"], seed=0)
    edges = to_undirected(torch.tensor(list(tree.edges)).T, shape["n"])
    graph = Graph(torch.randn(shape["n"], 64), edges).to(device)
    encoder = SAGEEncoder(64).to(device).eval()
    explainer = UNRExplainer(encoder, graph)
    node = shape["n"] // 2
    first = explainer.neighbor_lists[node][0]
    removed = [(min(node, first), max(node, first))]
    removed += [tuple(sorted((first, other))) for other in explainer.neighbor_lists[first][-3:] if other != node]
    before = explainer.neighbors(node)
    if form is plain:
        assert plain(encoder, graph, node, removed, before) == pytest.approx(ours(explainer, node, removed, before))
        measure(lambda: plain(encoder, graph, node, removed, before))
    else:
        measure(lambda: ours(explainer, node, removed, before))


def one_by_one(explainer: UNRExplainer, nodes: list[int], edges: list[Tensor]) -> Tensor:
    """An evaluation for each node."""
    return torch.tensor([explainer.importance(*pair) for pair in zip(nodes, edges, strict=True)], dtype=torch.float64)


def together(explainer: UNRExplainer, nodes: list[int], edges: list[Tensor]) -> Tensor:
    """All nodes as one graph of many components."""
    return explainer.importances(nodes, edges)


@pytest.mark.shapes(cora={"n": 2708, "nodes": 100})
@pytest.mark.parametrize("form", [together, one_by_one])
def test_many_importances(measure, shape, form, device):
    tree = nx.barabasi_albert_graph(shape["n"], 2, seed=0)
    index = to_undirected(torch.tensor(list(tree.edges)).T, shape["n"])
    explainer = UNRExplainer(SAGEEncoder(64).to(device), Graph(torch.randn(shape["n"], 64), index).to(device))
    nodes = torch.randperm(shape["n"])[: shape["nodes"]].tolist()
    edges = [torch.tensor([[node, explainer.neighbor_lists[node][0]]]) for node in nodes]
    torch.testing.assert_close(together(explainer, nodes, edges), one_by_one(explainer, nodes, edges))
    measure(lambda: form(explainer, nodes, edges))
