from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from lightning import Trainer
from torch import nn

from datamodules import BAShapesDataModule
from lightning_methods.graph import Graph, undirected_pairs
from lightning_methods.unr_explainer import (
    DGI,
    EvaluateExplanations,
    ExplainOnFitEnd,
    SAGEEncoder,
    UnsupervisedGraphSAGE,
    dgi_loss,
    explanation_precision_recall,
    link_loss,
)
from lightning_methods.unr_explainer.callbacks import choose_nodes
from tests.ddp import run_two_processes


def make_data(**options) -> BAShapesDataModule:
    return BAShapesDataModule(num_base=20, attach=2, num_motifs=4, noise_features=4, num_features=6, **options)


def make_trainer(folder, **options) -> Trainer:
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **options}
    return Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **options,
    )


def make(kind, **options):
    torch.manual_seed(0)
    return kind(SAGEEncoder(6, 8), **options)


def test_sage_layer_by_hand():
    encoder = SAGEEncoder(2, 3, num_layers=1)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    edges = torch.tensor([[1, 2, 0], [0, 0, 1]])  # messages 1 -> 0, 2 -> 0, 0 -> 1
    left, right = encoder.convs[0].lin_l, encoder.convs[0].lin_r
    mean = torch.stack([(x[1] + x[2]) / 2, x[0], torch.zeros(2)])
    torch.testing.assert_close(encoder(x, edges), left(mean) + x @ right.weight.T)
    # a weight multiplies a message, and the mean still divides by two
    weighted = encoder(x, edges, torch.tensor([0.5, 0.0, 1.0]))
    mean = torch.stack([x[1] / 4, x[0], torch.zeros(2)])
    torch.testing.assert_close(weighted, left(mean) + x @ right.weight.T)
    narrow = SAGEEncoder(6, 2, 1)  # the other order of mean and linear map
    wide = SAGEEncoder(1, 2, 1)
    for network, width in ((narrow, 6), (wide, 1)):
        x = torch.randn(3, width)
        mean = torch.stack([(x[1] + x[2]) / 2, x[0], torch.zeros(width)])
        expected = network.convs[0].lin_l(mean) + network.convs[0].lin_r(x)
        torch.testing.assert_close(network(x, edges), expected)


def test_there_is_a_relu_between_layers_and_none_at_the_end():
    encoder = SAGEEncoder(4, 5, 2, out_channels=3)
    x, edges = torch.randn(6, 4), torch.tensor([[0, 1, 2], [1, 0, 5]])
    first, second = encoder.convs
    torch.testing.assert_close(encoder(x, edges), second(first(x, edges).relu(), edges))
    assert (encoder(x, edges) < 0).any()
    assert encoder.num_features == 3
    assert set(encoder.state_dict()) == {
        f"convs.{i}.{name}" for i in (0, 1) for name in ("lin_l.weight", "lin_l.bias", "lin_r.weight")
    }


@pytest.mark.bad_input
def test_bad_encoders_and_inputs():
    with pytest.raises(ValueError, match="num_layers must be"):
        SAGEEncoder(2, num_layers=0)
    with pytest.raises(ValueError, match="x must have shape"):
        SAGEEncoder(2)(torch.ones(3, 4), torch.tensor([[0], [1]]))
    with pytest.raises(ValueError, match=r"edge_index must have nodes in 0..2"):
        SAGEEncoder(2)(torch.ones(3, 2), torch.tensor([[0], [3]]))
    with pytest.raises(ValueError, match="number of features"):
        DGI(nn.Linear(2, 2))


# link training


def test_held_out_links_are_never_trained_on(monkeypatch):
    data = make_data(test_links=0.3)
    graph = next(iter(data.test_dataloader()))
    seen = []
    monkeypatch.setattr(
        "lightning_methods.unr_explainer.module.link_loss",
        lambda z, positive, negative, **kwargs: seen.append((positive, negative)) or link_loss(z, positive, negative),
    )
    module = make(UnsupervisedGraphSAGE, negatives_per_edge=2)
    module.training_loss(graph)
    positive, negative = seen[0]
    pairs = set(map(tuple, undirected_pairs(graph.edge_index, graph.num_nodes).tolist()))
    assert set(map(tuple, positive.T.tolist())) == pairs  # every edge once
    assert negative.shape[1] == 2 * len(pairs)
    assert not {tuple(sorted(pair)) for pair in negative.T.tolist()} & pairs
    module.training_loss(graph, batch_idx=1)
    assert not torch.equal(seen[1][1], negative)  # fresh negatives
    module.training_loss(graph)
    assert torch.equal(seen[2][1], negative)  # which the seed decides
    first = module.evaluation_loss(graph, module.embed(graph))
    assert torch.equal(first, module.evaluation_loss(graph, module.embed(graph)))


def test_an_epoch_goes_through_all_edges_in_batches(monkeypatch):
    graph = make_data().graph
    seen = []
    monkeypatch.setattr(
        "lightning_methods.unr_explainer.module.link_loss",
        lambda z, positive, negative: seen.append(positive) or link_loss(z, positive, negative),
    )
    module = make(UnsupervisedGraphSAGE, edge_batch_size=8)
    total = graph.edge_index.shape[1] // 2
    for step in range(-(-2 * total // 8)):
        module.training_loss(graph, step)
    assert all(part.shape == (2, 8) for part in seen)
    order = list(map(tuple, torch.cat(seen, dim=1).T.tolist()))
    assert len(set(order[:total])) == len(set(order[total : 2 * total])) == total
    assert order[:total] != order[total : 2 * total]


def test_sampled_parts_bring_their_own_pairs():
    graph = make_data().graph
    part = SimpleNamespace(
        x=graph.x[:10],
        edge_index=torch.tensor([[0, 1, 2], [1, 0, 3]]),
        edge_label_index=torch.tensor([[0, 1, 2, 3], [1, 2, 7, 9]]),
        edge_label=torch.tensor([1.0, 1.0, 0.0, 0.0]),
    )
    module = make(UnsupervisedGraphSAGE)
    z = module.encoder(part.x, part.edge_index)
    expected = link_loss(z, part.edge_label_index[:, :2], part.edge_label_index[:, 2:])
    torch.testing.assert_close(module.training_loss(part), expected)


def losses_of_a_rank(rank: int, world: int) -> list[torch.Tensor]:
    graph = make_data().graph
    module = make(UnsupervisedGraphSAGE)
    loss = module.training_loss(graph)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
    return [loss.detach(), *(gradient / world for gradient in gradients)]


def test_two_processes_share_the_edges_and_get_the_gradient_of_one():
    graph = make_data().graph
    module = make(UnsupervisedGraphSAGE)
    loss = module.training_loss(graph)
    loss.backward()
    results = run_two_processes(losses_of_a_rank)
    torch.testing.assert_close(torch.stack([part[0] for part in results]).mean(), loss.detach())
    assert not torch.allclose(results[0][0], results[1][0])  # each has its own share
    for part in results:
        torch.testing.assert_close(part[1:], [parameter.grad for parameter in module.parameters()])


# DGI


def test_dgi_corrupts_the_rows_and_keeps_the_edges():
    graph = make_data().graph
    module = make(DGI)
    inputs = []
    module.encoder.register_forward_pre_hook(lambda _, args: inputs.append(args))
    loss = module.training_loss(graph)
    (x, edges), (corrupted, same) = inputs
    assert torch.equal(x, graph.x)
    assert torch.equal(edges, same)
    assert not torch.equal(corrupted, x)
    assert torch.equal(corrupted.sort(dim=0).values, x.sort(dim=0).values)
    z, z_neg = module.encoder(x, edges), module.encoder(corrupted, edges)
    torch.testing.assert_close(loss, dgi_loss(z, z_neg, z.mean(0).sigmoid(), module.weight))
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    bound = module.weight.shape[0] ** -0.5
    assert bound * 0.8 < module.weight.abs().max() <= bound
    module.training_loss(graph, 1)
    assert not torch.equal(inputs[-1][0], corrupted)


@pytest.mark.parametrize("kind", [UnsupervisedGraphSAGE, DGI])
def test_training_logs_and_learns(kind, tmp_path):
    module = make(kind, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
    data = make_data(val_links=0.1, test_links=0.1)
    trainer = make_trainer(tmp_path, max_epochs=25, check_val_every_n_epoch=25)
    before = module.evaluation_loss(data.graph, module.embed(data.graph)).item()
    trainer.fit(module, data)
    assert {"train/loss", "val/loss", "val/link_auc"} <= set(trainer.callback_metrics)
    assert trainer.callback_metrics["val/loss"] < before
    (logged,) = trainer.test(module, data, verbose=False)
    assert 0 <= logged["test/link_auc"] <= 1
    assert logged["test/probe_acc"] > 0.2
    (z,) = trainer.predict(module, data)
    torch.testing.assert_close(z, module.embed(next(iter(data.predict_dataloader()))))


def test_link_auc_is_of_the_held_out_pairs(tmp_path):
    data = make_data(test_links=0.2)
    graph = next(iter(data.test_dataloader()))
    module = make(UnsupervisedGraphSAGE)
    z = module.embed(graph).detach()
    scores = (z[graph.edge_label_index[0]] * z[graph.edge_label_index[1]]).sum(1)
    positive, negative = scores[graph.edge_label == 1], scores[graph.edge_label == 0]
    higher = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    (logged,) = make_trainer(tmp_path).test(module, data, verbose=False)
    assert logged["test/link_auc"] == pytest.approx(higher.mean().item(), abs=1e-6)
    (plain,) = make_trainer(tmp_path).test(module, make_data(), verbose=False)
    assert "test/link_auc" not in plain  # nothing is held out


@pytest.mark.bad_input
def test_bad_modules():
    with pytest.raises(ValueError, match="negatives_per_edge must be"):
        make(UnsupervisedGraphSAGE, negatives_per_edge=0)
    with pytest.raises(ValueError, match="edge_batch_size must be"):
        make(UnsupervisedGraphSAGE, edge_batch_size=0)
    with pytest.raises(ValueError, match="no edges to learn from"):
        make(UnsupervisedGraphSAGE).training_loss(Graph(torch.ones(3, 6), torch.empty(2, 0, dtype=torch.long)))


# callbacks


def test_explanations_are_written_when_training_ends(tmp_path):
    search = {"max_iterations": 5, "k": 3}
    callback = ExplainOnFitEnd(num_nodes=3, path="out/found.jsonl", explainer=search, surroundings=True)
    module, data = make(UnsupervisedGraphSAGE), make_data()
    make_trainer(tmp_path, callbacks=[callback]).fit(module, data)
    rows = [json.loads(line) for line in (tmp_path / "out" / "found.jsonl").read_text().splitlines()]
    graph = data.graph
    assert [row["node"] for row in rows] == choose_nodes(graph, "motif", 3, 0)
    explainer = callback.make_explainer(module, graph)
    for row in rows:
        found = explainer.explain(row["node"])
        assert row["edges"] == found.edges.tolist()
        assert row["importance"] == found.importance
        expected = explanation_precision_recall(
            found.edges, graph_edges=graph.edge_index.T, motif=graph.motif, node=row["node"]
        )
        assert (row["precision"], row["recall"]) == expected
        assert row["neighbors"] == explainer.neighbors(row["node"]).tolist()
        lost = set(row["neighbors"]) - set(row["neighbors_after"])
        assert len(lost) / 3 == pytest.approx(row["importance"])
        assert {tuple(edge) for edge in row["edges"]} <= {tuple(edge) for edge in row["surroundings"]}


@pytest.mark.parametrize("method", ["unr", "one_hop_3", "random_walk"])
def test_explanations_are_measured_by_the_test(method, tmp_path):
    search = {"max_iterations": 5, "k": 3}
    callback = EvaluateExplanations(method, num_nodes=4, explainer=search, path="found.jsonl")
    module = make(UnsupervisedGraphSAGE)
    state = copy.deepcopy(module.state_dict())
    (logged,) = make_trainer(tmp_path, callbacks=[callback]).test(module, make_data(), verbose=False)
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for name, values in {
        "importance": [row["importance"] for row in rows],
        "validity": [row["importance"] == 1 for row in rows],
        "size": [len(row["edges"]) for row in rows],
        "precision": [row["precision"] for row in rows],
        "recall": [row["recall"] for row in rows],
    }.items():
        assert logged[f"test/{name}"] == pytest.approx(sum(values) / 4), name
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.bad_input
def test_bad_callbacks(tmp_path):
    for options, message in (({"nodes": "motives"}, "nodes must be"), ({"num_nodes": 0}, "num_nodes must be")):
        with pytest.raises(ValueError, match=message):
            ExplainOnFitEnd(**options)
    with pytest.raises(ValueError, match="method must be"):
        EvaluateExplanations("1hop")
    graph = make_data().graph._replace(motif=None)
    with pytest.raises(ValueError, match="planted motifs"):
        choose_nodes(graph, "motif", None, 0)
    assert choose_nodes(graph, [4, 2], None, 0) == [4, 2]
    assert choose_nodes(graph, "all", None, 0) == list(range(40))
    with pytest.raises(ValueError, match="explains a Graph"):
        ExplainOnFitEnd().make_explainer(make(UnsupervisedGraphSAGE), torch.ones(2))
