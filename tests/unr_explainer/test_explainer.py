from __future__ import annotations

import math
import pickle
import warnings

import networkx as nx
import pytest
import torch
from torch import nn

from lightning_methods.graph import Graph, to_undirected
from lightning_methods.unr_explainer import (
    Explanation,
    ExplanationSize,
    MeanImportance,
    ProbabilityOfNecessity,
    SAGEEncoder,
    UNRExplainer,
    Validity,
    draw_explanation,
    edge_set_importance,
    explanations_by,
    knn_baseline,
    link_necessity,
    node_necessity,
    one_hop_baseline,
    probability_of_necessity,
    random_edges_baseline,
    random_walk_baseline,
    ucb1,
)
from lightning_methods.unr_explainer.explainer import RESTARTED, _Search
from tests.ddp import run_two_processes


def make_graph(n: int = 40, isolated: int = 1, seed: int = 0, features: int = 5) -> Graph:
    graph = nx.barabasi_albert_graph(n - isolated, 2, seed=seed)
    edges = to_undirected(torch.tensor(list(graph.edges)).T, n)
    x = torch.randn(n, features, generator=torch.Generator().manual_seed(seed))
    return Graph(x, edges, y=(x[:, 0] > 0).long())


def make_encoder(graph: Graph, hidden: int = 8, layers: int = 2) -> SAGEEncoder:
    torch.manual_seed(1)
    return SAGEEncoder(graph.x.shape[1], hidden, layers).to(graph.x.dtype)


def make_explainer(**options) -> UNRExplainer:
    graph = make_graph()
    return UNRExplainer(make_encoder(graph), graph, **options)


class Degree(nn.Module):
    """A node's embedding is its number of neighbours: what is lost can be counted by hand."""

    def forward(self, x, edge_index):
        return torch.bincount(edge_index[1], minlength=len(x)).float()[:, None]


# importance, fast and plain


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"perturb": 0.3}, {"weighted": True}, {"weighted": True, "perturb": 0.3}])
def test_the_incremental_pass_equals_the_whole_one(layers, options):
    graph = make_graph()
    graph = graph._replace(x=graph.x.double())
    options = dict(options)
    if options.pop("weighted", False):
        graph = graph._replace(edge_weight=torch.rand(graph.edge_index.shape[1], dtype=torch.float64))
    encoder = make_encoder(graph, layers=layers)
    fast, plain = (UNRExplainer(encoder, graph, incremental=way, **options) for way in (True, False))
    pairs = graph.edge_index.T[graph.edge_index[0] < graph.edge_index[1]]
    generator = torch.Generator().manual_seed(2)
    nodes, sets = [0, 7, 7, 39, 20], []
    for size in (1, 3, 6, 2, 0):
        sets.append(pairs[torch.randperm(len(pairs), generator=generator)[:size]])
        torch.testing.assert_close(fast.embed(sets[-1]), plain.embed(sets[-1]))
    expected = torch.tensor([plain.importance(*pair) for pair in zip(nodes, sets, strict=True)], dtype=torch.float64)
    assert torch.equal(fast.importances(nodes, sets), expected)
    assert torch.equal(plain.importances(nodes, sets), expected)
    assert [fast.importance(*pair) for pair in zip(nodes, sets, strict=True)] == expected.tolist()


def test_a_node_that_loses_its_last_edge_has_a_mean_of_zero():
    graph = Graph(torch.randn(3, 2), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    encoder = make_encoder(graph)
    explainer = UNRExplainer(encoder, graph, k=1)
    alone = encoder(graph.x[:1], torch.empty(2, 0, dtype=torch.long))
    torch.testing.assert_close(explainer.embed([(0, 1)])[:1], alone)


def test_importance_looks_at_the_perturbed_embeddings_of_all_nodes():
    graph = make_graph()
    encoder = make_encoder(graph)
    explainer = UNRExplainer(encoder, graph)
    edges = graph.edge_index.T[:4]
    expected = edge_set_importance(encoder, graph.x, graph.edge_index, edges, 3, explainer.neighbors(3))
    assert explainer.importance(3, edges) == expected
    assert explainer.importance(3, edges.flip(1)) == expected


# search


def test_a_star_is_explained_by_hand():
    """A leaf's degree is that of the other leaves until its only edge is gone; then it is nearest to the isolated."""
    leaves = torch.arange(1, 7)
    star = to_undirected(torch.stack([torch.zeros_like(leaves), leaves]), 14)  # 0 the centre, 7..13 isolated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explainer = UNRExplainer(Degree(), Graph(torch.ones(14, 1), star), k=5)
        found = explainer.explain(3)
        assert found.edges.tolist() == [[0, 3]]
        assert found.importance == 1.0
        assert found.history == [1.0]  # the first leaf of the tree is the one edge: no second iteration
        alone = explainer.explain(9)
    assert alone.edges.shape == (0, 2)
    assert alone.importance == 0
    assert alone.num_evaluations == 0


def test_explanations_are_connected_edges_and_the_best_of_the_history():
    explainer = make_explainer(max_iterations=25)
    for node in (0, 5, 17, 38):
        found = explainer.explain(node)
        assert found.importance == max(found.history) == explainer.importance(node, found.edges)
        assert (found.edges[:, 0] < found.edges[:, 1]).all()
        assert found.edges.tolist() == sorted(found.edges.tolist())
        drawn = nx.Graph(found.edges.tolist())
        assert nx.is_connected(drawn)
        assert node in drawn
        assert len(found.history) == found.num_iterations <= 25
        assert found.num_evaluations <= found.num_iterations


def test_the_end_of_a_search():
    explainer = make_explainer(min_iterations=20, patience=5, k=15, max_iterations=40)
    for node in range(4):
        found = explainer.explain(node)
        better = max(i for i, value in enumerate(found.history) if value > max(found.history[:i], default=-1)) + 1
        if found.importance < 1:
            assert found.num_iterations == min(max(21, better + 6), 40)
        else:
            assert found.num_iterations == better
    # two nodes within two hops: one iteration; three: a hundred
    pair = Graph(torch.randn(20, 3), torch.tensor([[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 4, 3]]))
    small = UNRExplainer(make_encoder(pair), pair, k=9)
    assert small.explain(0).num_iterations == 1
    stopped = small.explain(2)
    assert stopped.num_iterations == 100 or stopped.importance == 1


def test_without_restarts_a_walk_is_a_path_and_with_them_it_branches():
    graph = make_graph()

    def shapes(restart):
        explainer = UNRExplainer(make_encoder(graph), graph, restart=restart)
        search = _Search(explainer, 12, lambda edges: 0.5)
        walks = [search.iterate()[1] for _ in range(150)]
        return max(sum(12 in edge for edge in walk) for walk in walks), search

    plain, _ = shapes(0.0)
    branched, search = shapes(0.5)
    assert branched > plain
    assert search.root.visits == 150  # a walk counts once for the root, however often it comes back


def test_a_walk_after_a_restart_takes_another_branch():
    explainer = make_explainer()
    search = _Search(explainer, 3, lambda edges: 0.0)
    children = search.root.children
    for child, value in zip(children, (0.9, 0.1, 0.2), strict=False):
        child.update(value)
    total = 3 * len(children)
    allowed = list(range(len(children)))
    visits = torch.tensor([child.visits for child in children])
    bounds = ucb1(torch.tensor([child.value for child in children]), visits, total, explainer.c1)
    best = search.choose(search.root, allowed, total, after_restart=False)
    assert best == int(bounds.argmax())
    others = {search.choose(search.root, allowed, total, after_restart=True) for _ in range(50)}
    assert others == set(allowed) - {best}
    assert search.choose(search.root, [best], total, after_restart=True) == best


def test_values_are_maxima_and_visits_follow_the_path():
    search = _Search(make_explainer(), 3, lambda edges: 0.0)
    first, second = search.root.children[:2]
    search.expand(first)
    search.back_up([0, 1, RESTARTED, 1], 0.6)
    search.back_up([0], 0.2)
    assert (search.root.visits, search.root.value) == (2, 0.6)
    assert (first.visits, first.value) == (2, 0.6)
    assert (first.children[1].visits, first.children[0].visits) == (1, 0)
    assert (second.visits, second.value) == (1, 0.6)


def test_a_place_is_expanded_at_its_second_visit_to_some_neighbours():
    explainer = make_explainer()
    assert explainer.expansion_num == max(round(explainer.graph.edge_index.shape[1] / 40), 3)
    search = _Search(explainer, 0, lambda edges: 0.0)  # the hub
    assert len(search.root.children) == explainer.expansion_num < len(explainer.neighbor_lists[0])
    assert len({child.node for child in search.root.children}) == explainer.expansion_num
    sizes = [len(search.iterate()[1]) for _ in range(explainer.expansion_num)]
    assert all(child.children is None for child in search.root.children) or max(sizes) > 1


def test_limit_on_nodes_and_minimal_explanations():
    graph = make_graph()
    encoder = make_encoder(graph)
    for node in (0, 21):
        limited = UNRExplainer(encoder, graph, max_nodes=3, max_iterations=20).explain(node)
        assert len(limited.edges.unique()) <= 3
        found, small = (
            UNRExplainer(encoder, graph, minimize=way, k=8, max_iterations=20).explain(node) for way in (False, True)
        )
        assert small.importance >= found.importance
        assert len(small.edges) <= len(found.edges)
        explainer = UNRExplainer(encoder, graph, k=8)
        for edge in small.edges.tolist():
            rest = [tuple(other) for other in small.edges.tolist() if other != edge]
            if rest and explainer._connected(node, rest):
                assert explainer.importance(node, rest) < small.importance


def test_self_loops_are_no_part_of_an_explanation():
    graph = make_graph()
    loops = torch.arange(40).expand(2, -1)
    graph = graph._replace(edge_index=torch.cat([graph.edge_index, loops], dim=1))
    found = UNRExplainer(make_encoder(graph), graph, max_iterations=20).explain(4)
    assert (found.edges[:, 0] != found.edges[:, 1]).all()


def test_directed_graphs_are_walked_along_their_edges():
    edges = torch.tensor([[0, 1, 2, 4], [1, 2, 3, 0]])
    graph = Graph(torch.randn(12, 3), edges)
    found = UNRExplainer(make_encoder(graph), graph, k=3, allow_directed=True, max_iterations=10).explain(0)
    assert {tuple(edge) for edge in found.edges.tolist()} <= {(0, 1), (1, 2), (2, 3)}  # never (0, 4)


# many nodes


def same(a: list[Explanation], b: list[Explanation]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.edges, y.edges) and x._replace(edges=None) == y._replace(edges=None)
        for x, y in zip(a, b, strict=True)
    )


def test_a_result_depends_on_the_seed_and_the_node_alone():
    explainer = make_explainer(max_iterations=8, k=12)
    nodes = [9, 2, 30, 5]
    found = explainer.explain_all(nodes)
    assert [part.node for part in found] == nodes
    assert same(explainer.explain_all(nodes[::-1])[::-1], found)
    assert same([explainer.explain(node) for node in nodes], found)
    assert same(pickle.loads(pickle.dumps(explainer)).explain_all(torch.tensor(nodes)), found)
    other = make_explainer(max_iterations=8, k=12, seed=1).explain_all(nodes)
    assert [part.history for part in other] != [part.history for part in found]


def explained_by_a_rank(rank: int, world: int) -> list[Explanation]:
    return make_explainer(max_iterations=6, k=12).explain_all([4, 1, 8, 3, 30])


def test_two_processes_share_the_nodes_and_get_all():
    expected = make_explainer(max_iterations=6, k=12).explain_all([4, 1, 8, 3, 30])
    for found in run_two_processes(explained_by_a_rank):
        assert same(found, expected)


def test_workers_give_the_same():
    explainer = make_explainer(max_iterations=10, k=12)
    assert same(explainer.explain_all([4, 1, 8], num_workers=1), explainer.explain_all([4, 1, 8]))


# the encoder


def test_the_encoder_is_left_as_it_was():
    graph = make_graph()
    encoder = nn.ModuleDict({"sage": make_encoder(graph), "drop": nn.Dropout(0.9)})
    encoder["drop"].eval()

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = encoder
            self.noise = nn.Dropout(0.5)

        def forward(self, x, edge_index):
            assert not torch.is_grad_enabled()
            return self.noise(self.parts["sage"](x, edge_index))

    network = Noisy()
    explainer = UNRExplainer(network, graph, max_iterations=3)
    assert torch.equal(explainer.embed(), encoder["sage"](graph.x, graph.edge_index))  # no dropout
    explainer.explain(2)
    assert network.training
    assert network.noise.training
    assert not encoder["drop"].training
    assert explainer.z.grad_fn is None
    with torch.no_grad():
        encoder["sage"].convs[0].lin_l.weight.mul_(2)
    before = explainer.z
    explainer.refresh()
    assert not torch.equal(explainer.z, before)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be"),
        ({"k": 40}, "k must be"),
        ({"restart": 1.0}, "restart must be"),
        ({"restart": -0.1}, "restart must be"),
        ({"c1": -1.0}, "c1 must be"),
        ({"perturb": 1.0}, "perturb must be"),
        ({"expansion_num": 0}, "expansion_num must be"),
        ({"max_nodes": 1}, "max_nodes must be"),
        ({"max_iterations": 0}, "max_iterations must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_explainer(**options)


@pytest.mark.bad_input
def test_bad_graphs_and_nodes():
    graph = make_graph()
    with pytest.raises(ValueError, match="directed: 1 of its"):
        UNRExplainer(make_encoder(graph), graph._replace(edge_index=graph.edge_index[:, 1:]))
    with pytest.raises(ValueError, match="needs a SAGEEncoder"):
        UNRExplainer(Degree(), graph, incremental=True)
    explainer = make_explainer()
    for call in (explainer.explain, explainer.neighbors, lambda node: explainer.explain_all([node])):
        with pytest.raises(ValueError, match="node must be"):
            call(40)
    with pytest.raises(ValueError, match="no edge of the graph"):
        explainer.importance(0, [(0, 39)])
    with pytest.raises(ValueError, match="same length"):
        explainer.importances([0, 1], [[(0, 1)]])


def test_warnings_where_importance_says_little():
    graph = make_graph(11, isolated=0)
    with pytest.warns(UserWarning, match="cannot be reached"):
        UNRExplainer(make_encoder(graph), graph, k=6)
    ring = torch.arange(20)
    same_features = Graph(torch.ones(20, 2), to_undirected(torch.stack([ring, ring.roll(1)]), 20))
    with pytest.warns(UserWarning, match="19 nodes have the same embedding"):
        UNRExplainer(Degree(), same_features, max_iterations=2).explain(0)


# baselines


def test_baselines():
    graph = make_graph()
    generator = torch.Generator().manual_seed(0)
    pairs = {tuple(edge) for edge in graph.edge_index.T.tolist()}

    def edges_of(found):
        assert all(u < v and (u, v) in pairs for u, v in found.tolist())
        return {tuple(edge) for edge in found.tolist()}

    for node in (0, 6, 33):
        (edge,) = edges_of(one_hop_baseline(graph, node, 2, generator))
        assert node in edge
        three = edges_of(one_hop_baseline(graph, node, 3, generator))
        ends = {end for edge in three for end in edge}
        assert len(ends) == 3
        assert three == {pair for pair in pairs if set(pair) <= ends and pair[0] < pair[1]}
        walk = edges_of(random_walk_baseline(graph, node, 5, 0.2, generator))
        assert len(walk) == 5
        assert nx.is_connected(nx.Graph(list(walk)))
        assert node in nx.Graph(list(walk))
        near = torch.tensor([1, 2, 3])
        expected = {p for p in pairs if set(p) <= {1, 2, 3, node} and p[0] < p[1]}
        assert edges_of(knn_baseline(graph, node, near)) == expected
    assert len(edges_of(random_edges_baseline(graph, 9, generator))) == 9
    everything = len(pairs) // 2
    assert len(random_edges_baseline(graph, 10**6)) == everything
    assert one_hop_baseline(graph, 39).shape == random_walk_baseline(graph, 39, 4).shape == (0, 2)
    path = Graph(torch.ones(3, 1), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
    assert len(random_walk_baseline(path, 0, 4, generator=generator)) == 2  # there are no more


def test_explanations_by_a_baseline_have_the_size_of_the_search():
    explainer = make_explainer(max_iterations=10)
    nodes = [0, 4, 39]
    sizes = [len(part.edges) for part in explanations_by("unr", explainer, nodes)]
    for method in ("random_walk", "random_walk_restart", "random_edges"):
        found = explanations_by(method, explainer, nodes)
        assert [len(part.edges) for part in found] == sizes
        assert [part.importance for part in found] == [explainer.importance(p.node, p.edges) for p in found]
        assert same(explanations_by(method, explainer, nodes[::-1])[::-1], found)
    assert len(explanations_by("knn", explainer, nodes)) == 3


# metrics


def test_metrics_of_explanations():
    edges = torch.tensor([[0, 1], [1, 2]])
    found = [
        Explanation(1, edges, 1.0, 3, 2, [1.0]),
        Explanation(2, edges[:1], 0.4, 3, 2, [0.4]),
        Explanation(3, edges[:0], 0.0, 1, 0, [0.0]),
    ]
    for metric, expected in ((Validity(), 1 / 3), (MeanImportance(), 1.4 / 3), (ExplanationSize(), 1.0)):
        metric.update(found[:1])
        metric.update(found[1:])
        assert metric.compute().item() == pytest.approx(expected)


def test_probability_of_necessity_follows_the_class_predicted_before():
    before = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
    after = torch.tensor([[0.1, 0.9], [0.3, 0.7]])
    torch.testing.assert_close(probability_of_necessity(before, after), torch.tensor([0.6, -0.1]))
    metric = ProbabilityOfNecessity()
    metric.update(before, after)
    assert metric.compute().item() == pytest.approx(0.25)


@pytest.mark.bad_input
def test_probabilities_are_checked():
    with pytest.raises(ValueError, match="after must have shape"):
        probability_of_necessity(torch.full((2, 2), 0.5), torch.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="before must hold probabilities"):
        probability_of_necessity(torch.ones(2, 2), torch.full((2, 2), 0.5))


def test_node_necessity_is_that_of_a_logistic_regression():
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split

    explainer = make_explainer(max_iterations=4)
    y = explainer.graph.y
    found = explainer.explain_all([3])
    train, _ = train_test_split(range(40), train_size=0.8, stratify=y.numpy(), random_state=42)
    z = explainer.z.double().numpy()
    model = LogisticRegression(max_iter=1000).fit(z[train], y[train].numpy())
    drops = []
    for part in found:
        p = model.predict_proba(z[[part.node]])[0]
        moved = model.predict_proba(explainer.embed(part.edges).double().numpy()[[part.node]])[0]
        drops.append(p[p.argmax()] - moved[p.argmax()])
    assert node_necessity(explainer, found, y) == pytest.approx(sum(drops), abs=1e-6)


def test_link_necessity_removes_each_ends_own_explanation():
    explainer = make_explainer()
    pairs = torch.tensor([[0, 5, 7], [1, 20, 9]])
    label = torch.tensor([1, 0, 1])
    edges = {
        node: explainer.graph.edge_index.T[explainer.graph.edge_index[0] == node][:3] for node in (0, 1, 5, 7, 9, 20)
    }
    found = [Explanation(node, part, 0.0, 1, 1, []) for node, part in edges.items()]

    def accuracy(removed):
        right = 0
        for a, b, linked in zip(*pairs.tolist(), label.tolist(), strict=True):
            for u, v in ((a, b), (b, a)):
                z = explainer.embed(edges[u] if removed else ())
                distance = (z - z[u]).norm(dim=1)
                distance[u] = math.inf
                right += (v in distance.argsort()[:5].tolist()) == bool(linked)
        return right / 6

    assert link_necessity(explainer, found, pairs, label) == pytest.approx(abs(accuracy(False) - accuracy(True)))
    with pytest.raises(ValueError, match="none for node 20"):
        link_necessity(explainer, found[:-1], pairs, label)


def test_the_drawing_shows_the_explanation():
    explainer = make_explainer(max_iterations=5)
    found = explainer.explain(4)
    axis = draw_explanation(explainer.graph, found, explainer.neighbors(4), max_nodes=12)
    thick = [line for line in axis.lines if line.get_linewidth() > 3]
    assert len(thick) == len(found.edges)
    assert len(axis.collections) <= max(12, len(found.edges.unique()))
    assert axis.get_title(loc="left").startswith("node 4: ")
