from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_methods.unr_explainer.functional import (
    dgi_loss,
    edge_set_importance,
    explanation_precision_recall,
    knn_importance,
    knn_indices,
    link_loss,
    remove_edges,
    ucb1,
)
from lightning_methods.unr_explainer.incremental import IncrementalSAGE
from lightning_methods.unr_explainer.modules import SAGEEncoder
from tests.vectors import load_cases

PATH = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])


def close(result, expected, atol=1e-5):
    torch.testing.assert_close(result, torch.as_tensor(expected, dtype=result.dtype), rtol=0, atol=atol)


def encoder_of(case) -> SAGEEncoder:
    """With the weights of the case, under torch_geometric's names."""
    weights = case.inputs
    hidden, features = weights["wl0"].shape
    encoder = SAGEEncoder(features, hidden, 2, weights["wl1"].shape[0])
    names = {"wl": "lin_l.weight", "bl": "lin_l.bias", "wr": "lin_r.weight"}
    encoder.load_state_dict({f"convs.{i}.{name}": weights[f"{key}{i}"] for i in (0, 1) for key, name in names.items()})
    return encoder.eval()


def every_case() -> set[int]:
    kinds = ["knn_indices", "importance", "ucb1", "graphsage", "perturb", "dgi_loss", "explanation_precision_recall"]
    return {case.number for kind in kinds for case in load_cases("unr_explainer", kind)}


def test_no_case_is_left_out():
    assert every_case() == {case.number for case in load_cases("unr_explainer")}


@pytest.mark.parametrize("case", load_cases("unr_explainer", "knn_indices"), ids=repr)
def test_knn_vectors(case):
    z, k = case.inputs["z"], case.inputs["k"]
    assert torch.equal(knn_indices(z, k), case.outputs["indices"])
    assert torch.equal(knn_indices(z, k, chunk_size=4), case.outputs["indices"])
    some = torch.tensor([3, 0, 3])
    assert torch.equal(knn_indices(z, k, some), case.outputs["indices"][some])


@pytest.mark.parametrize("case", load_cases("unr_explainer", "importance"), ids=repr)
def test_importance_vectors(case):
    before, after = (knn_indices(case.inputs[name], case.inputs["k"]) for name in ("z_before", "z_after"))
    close(knn_importance(before, after), case.outputs["importance"], atol=1e-4)


@pytest.mark.parametrize("case", load_cases("unr_explainer", "ucb1"), ids=repr)
def test_ucb1_vectors(case):
    close(ucb1(**case.inputs), case.outputs["score"])


@pytest.mark.parametrize("case", load_cases("unr_explainer", "graphsage"), ids=repr)
def test_graphsage_vectors(case):
    x, edges = case.inputs["x"], case.inputs["edge_index"]
    close(encoder_of(case)(x, edges).detach(), case.outputs["z"])
    close(IncrementalSAGE(encoder_of(case), x, edges).z, case.outputs["z"])


@pytest.mark.parametrize("case", load_cases("unr_explainer", "perturb"), ids=repr)
def test_removal_vectors(case):
    x, edges, removed, node, k = (case.inputs[key] for key in ("x", "edge_index", "removed", "node", "k"))
    encoder = encoder_of(case)
    close(encoder(x, remove_edges(edges, removed)).detach(), case.outputs["z"])
    neighbors = knn_indices(encoder(x, edges).detach(), k, torch.tensor([node]))
    importance = edge_set_importance(encoder, x, edges, removed, node, neighbors[0])
    assert importance == pytest.approx(case.outputs["importance"], abs=1e-4)
    fast = IncrementalSAGE(encoder, x, edges)
    pairs = list(map(tuple, removed.tolist()))
    close(fast.embed(pairs), case.outputs["z"])
    close(fast.importance([pairs], torch.tensor([node]), neighbors), [case.outputs["importance"]], 1e-4)


@pytest.mark.parametrize("case", load_cases("unr_explainer", "dgi_loss"), ids=repr)
def test_dgi_vectors(case):
    close(dgi_loss(**case.inputs), case.outputs["loss"], atol=1e-5 * max(1, case.outputs["loss"]))


@pytest.mark.parametrize("case", load_cases("unr_explainer", "explanation_precision_recall"), ids=repr)
def test_precision_recall_vectors(case):
    inputs = dict(case.inputs)
    edges = inputs.pop("edges")
    found = explanation_precision_recall(edges, **inputs)
    assert found == pytest.approx((case.outputs["precision"], case.outputs["recall"]), abs=1e-5)
    both = torch.cat([inputs["graph_edges"], inputs["graph_edges"].flip(1)])
    assert explanation_precision_recall(edges.flip(1), **{**inputs, "graph_edges": both}) == found


# neighbours


def test_duplicates_are_neighbours_and_a_node_is_not_its_own():
    z = torch.zeros(6, 2)
    assert knn_indices(z, 3).tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 30), st.integers(0, 1000))
def test_importance_is_the_share_of_the_set_that_is_lost(k, seed):
    generator = torch.Generator().manual_seed(seed)
    before, after = (torch.stack([torch.randperm(40, generator=generator)[:k] for _ in range(3)]) for _ in range(2))
    expected = [1 - len(set(a) & set(b)) / k for a, b in zip(before.tolist(), after.tolist(), strict=True)]
    found = knn_importance(before, after)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert ((found >= 0) & (found <= 1)).all()
    shuffled = after[:, torch.randperm(k, generator=generator)]
    assert torch.equal(knn_importance(before, shuffled), found)


# edges


def test_edges_go_in_both_directions_and_all_their_copies():
    twice = torch.cat([PATH, torch.tensor([[1], [2]])], dim=1)
    assert remove_edges(twice, torch.tensor([[2, 1]])).tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert torch.equal(remove_edges(PATH, torch.empty(0, 2, dtype=torch.long)), PATH)
    assert remove_edges(torch.tensor([[0, 3], [1, 2]]), torch.tensor([[2, 3]])).tolist() == [[0], [1]]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: knn_indices(torch.ones(4, 2), 0), "k must be"),
        (lambda: knn_indices(torch.ones(4, 2), 4), "k must be"),
        (lambda: knn_indices(torch.ones(4), 1), "z must have shape"),
        (lambda: knn_indices(torch.ones(4, 2), 1, torch.tensor([4])), r"nodes must be in 0..3, got 4..4"),
        (lambda: knn_importance(torch.ones(2, 3), torch.ones(2, 4)), "after must have shape"),
        (lambda: remove_edges(PATH, torch.tensor([[0, 1], [3, 0]])), r"edges holds \[3, 0\]"),
        (lambda: remove_edges(PATH, torch.tensor([[0, 9]])), r"edges holds \[0, 9\]"),
        (lambda: remove_edges(PATH.float(), torch.tensor([[0, 1]])), "dtype int64"),
        (lambda: ucb1(torch.ones(2), torch.ones(3, dtype=torch.long), 1, 1.0), "visits must have shape"),
        (lambda: ucb1(torch.ones(2), torch.ones(2, dtype=torch.long), 1, -1.0), "c must be"),
        (lambda: dgi_loss(torch.ones(3, 2), torch.ones(3, 2), torch.ones(3), torch.eye(2)), "summary must have"),
        (lambda: dgi_loss(torch.ones(3, 2), torch.ones(3, 2), torch.ones(2), torch.ones(2, 3)), "weight must have"),
        (lambda: link_loss(torch.ones(3, 2), PATH, PATH), "pos_edges must have nodes"),
        (lambda: link_loss(torch.ones(3, 2), PATH[:, :0], PATH[:, :0]), "both empty"),
        (lambda: link_loss(torch.ones(4, 2), PATH, PATH, "none"), "reduction must be"),
        (
            lambda: edge_set_importance(lambda x, e: x, torch.ones(4, 2), PATH, PATH.T[:1], 4, torch.tensor([1])),
            "node must be",
        ),
        (
            lambda: explanation_precision_recall(PATH.T, graph_edges=PATH.T, motif=torch.zeros(4).long(), node=-1),
            "node must be",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# search and losses


def test_ucb1_has_no_logarithm_of_zero():
    found = ucb1(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1, 4, 0]), 0, 1.0)
    assert found.tolist() == [0.5, 0.5, math.inf]


def test_losses_have_gradients_and_stay_finite():
    torch.manual_seed(0)
    z_pos, z_neg, summary, weight = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (4, 3), (3,), (3, 3))
    )
    assert torch.autograd.gradcheck(dgi_loss, (z_pos, z_neg, summary, weight))
    z = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: link_loss(z, PATH, PATH.flip(0)[:, :2]), z)
    far = 1e3 * torch.ones(2, 2)
    assert dgi_loss(-far, far, torch.ones(2), torch.eye(2)).item() == pytest.approx(-2 * math.log(1e-15), rel=1e-4)


def test_link_loss_is_the_mean_over_all_pairs():
    z = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0]])
    positive, negative = torch.tensor([[0], [1]]), torch.tensor([[0, 1], [2, 2]])
    terms = [math.log1p(math.exp(-2)), math.log(2), math.log1p(math.exp(1))]
    assert link_loss(z, positive, negative).item() == pytest.approx(sum(terms) / 3, abs=1e-6)
    assert link_loss(z, positive, negative, "sum").item() == pytest.approx(sum(terms), abs=1e-5)


# motifs


def test_recall_of_the_grid_is_by_twelve_edges_or_by_the_authors_six():
    grid = [(3 * r + c, 3 * r + c + 1) for r in range(3) for c in range(2)]
    grid += [(3 * r + c, 3 * r + c + 3) for r in range(2) for c in range(3)]
    edges = torch.tensor([*grid, (8, 9), (9, 10)])
    motif = torch.tensor([0] * 9 + [-1, -1])
    explained = torch.tensor([(0, 1), (1, 4), (8, 9)])
    options = {"graph_edges": edges, "motif": motif}
    assert explanation_precision_recall(explained, node=4, **options) == pytest.approx((2 / 3, 2 / 12))
    assert explanation_precision_recall(explained, node=4, official_recall=True, **options) == pytest.approx(
        (2 / 3, 2 / 6)
    )
    # the base is no motif, although its nodes have one number
    assert explanation_precision_recall(torch.tensor([(9, 10)]), node=9, **options) == (0, 0)
    assert explanation_precision_recall(explained[:0], node=4, **options) == (0, 0)
    # an edge inside the motif that the graph does not have is none of the motif's
    assert explanation_precision_recall(torch.tensor([(0, 8)]), node=4, **options) == (0, 0)
