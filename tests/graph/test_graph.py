from __future__ import annotations

import pickle
from types import SimpleNamespace

import networkx as nx
import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_methods.graph import (
    Graph,
    edge_positions,
    gcn_norm,
    has_reverse,
    induced_edges,
    negative_edges,
    neighbor_lists,
    remove_self_loops,
    scatter_mean,
    scatter_softmax,
    scatter_sum,
    to_undirected,
    undirected_pairs,
)


@pytest.fixture
def edges() -> torch.Tensor:
    graph = nx.gnm_random_graph(12, 25, seed=1)
    return to_undirected(torch.tensor(list(graph.edges)).T.contiguous(), 13)  # node 12 is isolated


def test_scatters_against_dense_matrices(edges):
    src = torch.randn(edges.shape[1], 3, dtype=torch.float64, requires_grad=True)
    member = torch.nn.functional.one_hot(edges[1], 13).double()
    torch.testing.assert_close(scatter_sum(src, edges[1], 13), member.T @ src)
    mean = member.T @ src / member.sum(0).clamp_min(1)[:, None]
    torch.testing.assert_close(scatter_mean(src, edges[1], 13), mean)
    assert scatter_mean(src, edges[1], 13)[12].abs().sum() == 0
    weights = scatter_softmax(1e3 * src, edges[1], 13)  # no overflow
    torch.testing.assert_close((member.T @ weights)[:12], torch.ones(12, 3, dtype=torch.float64))
    for row in range(12):
        torch.testing.assert_close(weights[edges[1] == row], (1e3 * src[edges[1] == row]).softmax(0))


@pytest.mark.parametrize("function", [scatter_sum, scatter_mean, scatter_softmax])
def test_gradients_of_scatters(function):
    src = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: function(s, torch.tensor([0, 2, 2, 0, 3]), 5), src)


def test_scatters_sum_in_float32_at_least():
    ones = torch.ones(4096, dtype=torch.bfloat16)
    assert scatter_sum(ones, torch.zeros(4096, dtype=torch.long), 1).item() == 4096  # bfloat16 stops at 256


@pytest.mark.bad_input
def test_bad_scatters():
    with pytest.raises(ValueError, match=r"index must be in 0..2, got 0..3"):
        scatter_sum(torch.ones(2), torch.tensor([0, 3]), 3)
    with pytest.raises(ValueError, match="index must have shape"):
        scatter_mean(torch.ones(2), torch.tensor([0, 1, 2]), 3)
    with pytest.raises(ValueError, match="dtype int64"):
        to_undirected(torch.ones(2, 3), 3)
    with pytest.raises(ValueError, match=r"nodes in 0..2, got 0..5"):
        to_undirected(torch.tensor([[0], [5]]), 3)


def test_edge_lists(edges):
    with_loop = torch.cat([edges, torch.tensor([[3, 12], [3, 12]])], dim=1)
    assert torch.equal(remove_self_loops(with_loop), edges)
    assert has_reverse(edges, 13).all()
    one_way = edges[:, edges[0] < edges[1]]
    assert not has_reverse(one_way, 13).any()
    assert torch.equal(to_undirected(one_way, 13), edges)
    assert torch.equal(undirected_pairs(with_loop, 13), one_way.T)
    lists = neighbor_lists(with_loop, 13)
    for node in range(13):
        assert lists[node] == sorted(edges[1, edges[0] == node].tolist())
    positions = edge_positions(with_loop)
    assert all(with_loop[:, i].tolist() == list(pair) for pair, columns in positions.items() for i in columns)
    assert sum(map(len, positions.values())) == with_loop.shape[1]
    nodes = torch.tensor([0, 4, 5, 7, 9])
    expected = [e for e in edges.T.tolist() if e[0] in nodes.tolist() and e[1] in nodes.tolist()]
    assert induced_edges(edges, nodes).T.tolist() == expected


def test_gcn_norm_is_the_normalised_matrix(edges):
    with_loop = torch.cat([edges, torch.tensor([[3], [3]])], dim=1)
    index, weight = gcn_norm(with_loop, 13)
    dense = torch.zeros(13, 13).index_put((index[0], index[1]), weight, accumulate=True)
    a = torch.eye(13).index_put((edges[0], edges[1]), torch.ones(1))
    scale = a.sum(1).rsqrt().diag()
    torch.testing.assert_close(dense, scale @ a @ scale)
    assert weight[-1] == 1  # the isolated node


def test_negative_edges_are_uniform_over_the_other_pairs():
    edges = torch.tensor([[0, 1, 1, 2, 0], [1, 0, 2, 1, 1]])  # one twice
    pairs = negative_edges(edges, 4, 70_000, torch.Generator().manual_seed(0))
    found, counts = (4 * pairs[0] + pairs[1]).unique(return_counts=True)
    allowed = {(u, v) for u in range(4) for v in range(4) if u != v} - {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert {(int(c) // 4, int(c) % 4) for c in found} == allowed
    expected = 70_000 / len(allowed)
    assert (counts - expected).abs().max() < 5 * expected**0.5
    again = negative_edges(edges, 4, 70_000, torch.Generator().manual_seed(0))
    assert torch.equal(pairs, again)


@pytest.mark.bad_input
def test_a_complete_graph_has_no_negative_edge():
    with pytest.raises(ValueError, match="no negative"):
        negative_edges(to_undirected(torch.tensor([[0, 0, 1], [1, 2, 2]]), 3), 3, 1)


def test_graph_moves_and_pickles():
    graph = Graph(torch.ones(3, 2), torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([0, 1, 1]))
    assert graph._fields == (
        *("x", "edge_index", "y", "motif", "edge_weight", "distance", "train_mask", "val_mask", "test_mask"),
        *("edge_label_index", "edge_label"),
    )
    moved = move_data_to_device(graph, torch.device("meta"))  # what a Trainer does
    assert isinstance(moved, Graph)
    assert moved.x.device.type == moved.edge_index.device.type == moved.y.device.type == "meta"
    assert moved.motif is None
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again.y, graph.y)
    assert graph.num_nodes == 3


def test_from_pyg_takes_the_fields_of_the_same_name():
    data = SimpleNamespace(
        x=torch.ones(3, 2),
        edge_index=torch.tensor([[0, 1], [1, 0]]),
        y=torch.tensor([0, 1, 1]),
        train_mask=None,
        name="a",
    )
    graph = Graph.from_pyg(data)
    assert graph.x is data.x
    assert graph.y is data.y
    assert graph.train_mask is None
    bare = Graph.from_pyg(SimpleNamespace(x=None, edge_index=data.edge_index, num_nodes=4))
    assert torch.equal(bare.x, torch.ones(4, 1))
    with pytest.raises(ValueError, match="no edge_index"):
        Graph.from_pyg(SimpleNamespace(x=data.x))
    with pytest.raises(ValueError, match="holds 10 splits"):
        Graph.from_pyg(SimpleNamespace(**{**vars(data), "train_mask": torch.ones(3, 10)}))
