from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from lightning import Trainer

from datamodules import CorrectnessMatrixDataModule
from lightning_methods.cli import run
from lightning_methods.embed_llm import (
    BenchmarkProbe,
    CommunityProbe,
    CorrectnessBatch,
    CorrectnessMF,
    EmbedLLM,
    KNNCorrectness,
    Router,
    RoutingAccuracy,
    benchmark_contribution,
    correctness_loss,
    fit_benchmark_regression,
    knn_correctness,
    plot_contributions,
    plot_embeddings,
    predict_benchmark_accuracy,
    route_queries,
    routing_accuracy,
    routing_baselines,
    synthetic_outcomes,
)
from tests.ddp import run_two_processes


def quiet_trainer(**kwargs) -> Trainer:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    return Trainer(accelerator="cpu", enable_model_summary=False, **{**options, **kwargs})


def small_data(**kwargs) -> CorrectnessMatrixDataModule:
    options = {"num_models": 8, "num_families": 2, "num_questions": 100, "embedding_dim": 12, "batch_size": 128}
    return CorrectnessMatrixDataModule(**{**options, **kwargs})


def small_model(**kwargs) -> EmbedLLM:
    return EmbedLLM(**{"num_models": 8, "question_dim": 12, "embedding_dim": 6, **kwargs})


# the network


def test_the_network_has_exactly_the_published_parameters():
    network = CorrectnessMF(112)
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert shapes == {
        "model_embedding.weight": (112, 232),
        "question_proj.weight": (232, 768),
        "question_proj.bias": (232,),
        "classifier.weight": (2, 232),
        "classifier.bias": (2,),
    }
    assert sum(parameter.numel() for parameter in network.parameters()) == 204_858
    assert 0.95 < float(network.model_embedding.weight.detach().std()) < 1.05  # N(0, 1), not a small uniform


def test_noise_is_on_the_questions_before_the_projection_and_in_training_only():
    torch.manual_seed(0)
    network = CorrectnessMF(3, 4, 8, noise_std=0.5)
    ids, x = torch.zeros(20000, dtype=torch.long), torch.randn(1, 8).expand(20000, 8)
    before = x.clone()
    noisy, again = network(ids, x), network(ids, x)
    assert torch.equal(x, before), "the data were written to"
    assert not torch.equal(noisy, again)
    clean = network.eval()(ids, x)
    assert torch.equal(clean, network(ids, x))
    # the logits' covariance is that of noise that went through W and C
    effect = network.classifier.weight @ (network.model_embedding.weight[0][:, None] * network.question_proj.weight)
    covariance = 0.25 * effect @ effect.T
    torch.testing.assert_close(torch.cov((noisy - clean).T), covariance, rtol=0.05, atol=1e-3)


def test_matrices_are_without_noise_in_any_mode():
    network, x = CorrectnessMF(3, 4, 8, noise_std=1.0).train(), torch.randn(5, 8)
    scores = network.score_matrix(x)
    torch.testing.assert_close(scores, network.eval().score_matrix(x))
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    logits = network(pairs[:, 0], x[pairs[:, 1]])
    torch.testing.assert_close(scores.flatten(), logits.softmax(dim=1)[:, 1])


def test_score_directions_are_what_scores_depend_on():
    network, x = CorrectnessMF(3, 4, 8).eval(), torch.randn(6, 8)
    directions = network.score_directions()
    change = network.margin_matrix(x) - network.margin_matrix(torch.zeros(6, 8))
    torch.testing.assert_close(directions @ x.T, change, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # the vectors move, the scores and the directions do not
        network.model_embedding.weight *= 2
        network.classifier.weight /= 2
    torch.testing.assert_close(network.score_directions(), directions)


def test_weights_of_the_authors_code_load():
    ours = CorrectnessMF(3, 4, 8)
    theirs = {
        "P.weight": ours.model_embedding.weight,
        "Q.weight": torch.randn(50, 8),
        "text_proj.weight": ours.question_proj.weight,
        "text_proj.bias": ours.question_proj.bias,
        "classifier.weight": ours.classifier.weight,
        "classifier.bias": ours.classifier.bias,
    }
    other, x = CorrectnessMF(3, 4, 8), torch.randn(6, 8)
    assert not torch.equal(other.score_matrix(x), ours.score_matrix(x))
    other.load_state_dict(theirs)
    assert torch.equal(other.score_matrix(x), ours.score_matrix(x))


@pytest.mark.bad_input
def test_bad_input_of_the_network():
    network, x = CorrectnessMF(3, 4, 8), torch.randn(2, 8)
    for call, match in (
        (lambda: network(torch.tensor([0, 3]), x), r"model_ids must be in 0\.\.2, got 3"),
        (lambda: network(torch.tensor([-1, 0]), x), r"model_ids must be in 0\.\.2, got -1"),
        (lambda: network(torch.tensor([0, 1]), x[:, :7]), "question_dim=8"),
        (lambda: network(torch.tensor([0]), x), "model_ids must have shape"),
        (lambda: network.score_matrix(x[:, :7]), "question_dim=8"),
        (lambda: CorrectnessMF(0), "num_models"),
        (lambda: CorrectnessMF(3, noise_std=-1), "noise_std"),
        (lambda: EmbedLLM(3, embedding_dim=0), "embedding_dim"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


# the module


def test_defaults_are_those_of_the_paper():
    model = EmbedLLM(112)
    optimizer = model.configure_optimizers()
    assert type(optimizer) is torch.optim.Adam  # L2 in the gradient, not decoupled
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (1e-4, 1e-5)
    assert model.network.noise_std == 0.05
    assert model.network.embedding_dim == 232
    assert sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) == 204_858


def test_a_step_is_the_cross_entropy_of_the_batch():
    model = small_model(noise_std=0.0)
    batch = CorrectnessBatch(torch.tensor([0, 7]), torch.randn(2, 12), torch.tensor([1, 1]), torch.tensor([3, 3]))
    model.log = lambda *args, **kwargs: None
    loss = model.training_step(batch, 0)
    torch.testing.assert_close(loss, correctness_loss(model(batch.model_ids, batch.question_embeddings), batch.labels))
    loss.backward()
    moved = model.network.model_embedding.weight.grad.abs().sum(dim=1) > 0
    assert moved.nonzero().flatten().tolist() == [0, 7]  # the models of the batch, and no other
    scores = model.eval().predict_step(batch, 0)
    torch.testing.assert_close(scores, model.network.score_matrix(batch.question_embeddings)[batch.model_ids, [0, 1]])


def test_it_learns_and_logs(tmp_path):
    data = small_data(num_questions=400, batch_size=512)
    model = small_model(optimizer=lambda params: torch.optim.Adam(params, lr=0.05))
    trainer = quiet_trainer(max_epochs=12)
    trainer.fit(model, datamodule=data)
    assert {"train/loss", "val/loss", "val/acc"} <= set(trainer.callback_metrics)
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    names = {"loss", "acc", "routing_acc", "best_single_acc", "weighted_random_acc"}
    assert {f"test/{name}" for name in names} == set(logged)
    # what was logged is what the functions say of the whole table
    table = data.table("test")
    correct = table.correct.long()
    margins = model.network.margin_matrix(table.question_embeddings).detach()
    choice = route_queries(margins)
    baselines = routing_baselines(choice, correct)
    assert logged["test/acc"] == pytest.approx(float(((margins > 0) == (correct > 0)).double().mean()), abs=1e-6)
    assert logged["test/routing_acc"] == pytest.approx(float(routing_accuracy(choice, correct)), abs=1e-6)
    assert logged["test/best_single_acc"] == pytest.approx(float(baselines.best_single), abs=1e-6)
    assert logged["test/weighted_random_acc"] == pytest.approx(float(baselines.weighted_random), abs=1e-6)
    majority = float(correct.double().mean(dim=1).sub(0.5).abs().add(0.5).mean())
    assert logged["test/acc"] > majority + 0.02
    assert torch.equal(model.route(table.question_embeddings), choice)
    # one line, with the names of the models
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    again = EmbedLLM.load_from_checkpoint(path)
    assert again.model_names == tuple(data.model_names)
    assert torch.equal(again.model_embeddings, model.model_embeddings)
    assert not again.model_embeddings.requires_grad


def test_another_number_of_models_is_named():
    with pytest.raises(ValueError, match="the data have 8 models, but num_models=9"):
        quiet_trainer().fit(small_model(num_models=9), datamodule=small_data())


def test_routing_among_available_models():
    model, x = small_model(), torch.randn(30, 12)
    chosen = model.route(x, torch.tensor([0, 0, 1, 0, 0, 1, 0, 0]).bool())
    assert set(chosen.tolist()) <= {2, 5}
    mask = torch.rand(8, 30) > 0.5
    mask[3] = True
    chosen = model.route(x, mask)
    assert mask[chosen, torch.arange(30)].all()


def test_a_new_model_finds_its_place():
    """A copy of a known model, told by its outcomes alone, is forecast like that model."""
    outcomes = synthetic_outcomes(num_models=8, num_families=2, num_questions=600, question_dim=12, seed=1)
    rest = [0, 1, 2, 4, 5, 6, 7]
    data = small_data(
        source="tensors",
        tensors={"correct": outcomes.correct[rest], "question_embeddings": outcomes.embeddings},
        val_size=0,
        test_size=100,
        batch_size=512,
    )
    model = small_model(num_models=7, optimizer=lambda params: torch.optim.Adam(params, lr=0.05))
    quiet_trainer(max_epochs=12).fit(model, datamodule=data)
    rows, test = data.split_questions["train"], data.split_questions["test"]
    embedding = model.fit_new_model(outcomes.correct[3, rows], outcomes.embeddings[rows])
    router = Router.from_module(model).with_model("new", outcomes.correct[3, rows], outcomes.embeddings[rows])
    torch.testing.assert_close(router.network.model_embedding.weight[-1], embedding)
    scores = router.scores(outcomes.embeddings[test])
    torch.testing.assert_close(scores[:-1], model.network.score_matrix(outcomes.embeddings[test]).detach())
    accuracy = ((scores[-1] > 0.5) == (outcomes.correct[3, test] > 0)).double().mean()
    best = ((outcomes.probability[3, test] > 0.5) == (outcomes.correct[3, test] > 0)).double().mean()
    assert float(accuracy) > float(best) - 0.08
    assert router.model_names[-1] == "new"


# routing over batches


def test_the_metric_routes_among_the_models_that_are_there():
    correct, scores = (torch.rand(4, 10) > 0.5).long(), torch.rand(4, 10)
    observed = torch.rand(4, 10) > 0.4
    observed[torch.arange(10) % 4, torch.arange(10)] = True
    pairs = observed.nonzero()
    pairs = torch.cat([pairs, pairs[:5]])[torch.randperm(len(pairs) + 5)]  # any order, some twice
    metric = RoutingAccuracy(4)
    for m, q in (part.unbind(dim=1) for part in pairs.split(7)):
        metric.update(100 - q, m, scores[m, q], correct[m, q])
    result = metric.compute()
    choice = route_queries(scores, observed)
    expected = routing_baselines(choice, correct, observed)
    torch.testing.assert_close(result["routing_acc"], routing_accuracy(choice, correct))
    torch.testing.assert_close(result["best_single_acc"], expected.best_single)
    torch.testing.assert_close(result["weighted_random_acc"], expected.weighted_random)
    assert torch.equal(result["counts"], expected.counts)


def _metric_on_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    m, q = torch.cartesian_prod(torch.arange(3), torch.arange(5)).unbind(dim=1)
    scores, labels = torch.rand(15, generator=generator), torch.randint(2, (15,), generator=generator)
    metric = RoutingAccuracy(3)
    part = slice(0, 4) if rank == 0 else slice(4, 15)
    rows = slice(0, 15) if world == 1 else part
    metric.update(q[rows], m[rows], scores[rows], labels[rows])
    return metric.compute()


def test_the_metric_over_two_processes():
    alone = _metric_on_rank(0, 1)
    for result in run_two_processes(_metric_on_rank):
        for name, value in alone.items():
            torch.testing.assert_close(result[name], value)


# the baseline


def test_the_baseline_is_the_vote_of_the_nearest_training_questions():
    data = small_data()
    model = KNNCorrectness(8, ks=[1, 5, 1000])
    trainer = quiet_trainer()
    trainer.fit(model, datamodule=data)
    (logged,) = trainer.test(model, datamodule=data, verbose=False)
    train, val, test = (data.table(split) for split in ("train", "val", "test"))

    def accuracy(part, k):
        forecast = knn_correctness(train.question_embeddings, train.correct, part.question_embeddings, k)
        return float((forecast == part.correct).double().mean())

    best = max((1, 5, len(train.question_ids)), key=lambda k: accuracy(val, k))
    assert model.k == best
    assert logged["test/acc"] == pytest.approx(accuracy(test, best), abs=1e-6)
    again = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match="no training questions"):
        again.votes(torch.tensor([0]), torch.tensor([0]), torch.randn(1, 12))


# benchmarks and communities


def test_benchmark_prediction_agrees_with_scipy():
    from scipy.stats import kendalltau

    embeddings = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    accuracy = (embeddings @ torch.tensor([0.2, 0.1, 0.0, 0.0], dtype=torch.float64)).sigmoid()
    noise = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = predict_benchmark_accuracy(embeddings, accuracy + 0.05 * noise, num_splits=6, train_fraction=0.6, seed=3)
    assert all(value.shape == (6,) for value in result.values())
    from lightning_methods.core.random import make_generator

    for split in range(6):
        order = torch.randperm(30, generator=make_generator(3, "benchmark", split))
        train, test = order[:18], order[18:]
        y = accuracy + 0.05 * noise
        weight, bias = fit_benchmark_regression(embeddings[train], y[train])
        predicted = embeddings[test] @ weight + bias
        tau, _ = kendalltau(predicted, y[test])
        assert float(result["kendall_tau"][split]) == pytest.approx(tau, abs=1e-6)
        assert float(result["mse"][split]) == pytest.approx(float((predicted - y[test]).square().mean()))
        # torchmetrics' p-value is the normal approximation
        _, p_value = kendalltau(predicted, y[test], method="asymptotic")
        assert float(result["p_value"][split]) == pytest.approx(p_value, abs=1e-4)


def test_constant_accuracies_have_no_rank_correlation():
    result = predict_benchmark_accuracy(torch.randn(20, 3), torch.full((20,), 0.5), num_splits=3)
    assert torch.isnan(result["kendall_tau"]).all()
    assert torch.isnan(result["p_value"]).all()
    assert float(result["mse"].max()) < 1e-9


@pytest.mark.bad_input
def test_bad_splits():
    with pytest.raises(ValueError, match="leaves none on one side"):
        predict_benchmark_accuracy(torch.randn(3, 2), torch.rand(3), train_fraction=0.9)
    with pytest.raises(ValueError, match="accuracy must have shape"):
        predict_benchmark_accuracy(torch.randn(9, 2), torch.rand(3))
    with pytest.raises(ValueError, match="at least three benchmarks"):
        benchmark_contribution(lambda excluded: torch.randn(9, 2), {"a": torch.rand(9), "b": torch.rand(9)})


def test_contribution_finds_who_helps_whom():
    """Embeddings hold what the benchmarks trained on tell; only a and b share a skill."""
    skills = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accuracy = {"a": skills[:, 0], "b": skills[:, 0] + 0.05 * noise[:, 0], "c": skills[:, 1]}
    calls = []

    def train(excluded: set[str]) -> torch.Tensor:
        calls.append(frozenset(excluded))
        told = [accuracy[name] for name in accuracy if name not in excluded]
        return torch.stack([*told, noise[:, 1]], dim=1)

    contribution = benchmark_contribution(train, accuracy, num_splits=20)
    assert len(calls) == len(set(calls)) == 6  # three alone, three pairs
    assert contribution.diagonal().abs().max() == 0
    assert float(contribution[0, 1]) > 5
    assert float(contribution[1, 0]) > 5
    others = contribution.clone()
    others[0, 1] = others[1, 0] = 0
    assert float(others.abs().max()) < 3
    plot_contributions(contribution, list(accuracy)).figure.canvas.draw()


def test_the_probes_log_what_the_functions_say():
    data = small_data(num_models=20, num_benchmarks=4, held_out_benchmarks=["benchmark1"], val_size=0)
    model = small_model(num_models=20)
    callbacks = [BenchmarkProbe(num_splits=3, seed=5), CommunityProbe()]
    (logged,) = quiet_trainer(callbacks=callbacks).test(model, datamodule=data, verbose=False)
    expected = predict_benchmark_accuracy(
        model.model_embeddings, data.held_out_accuracy["benchmark1"], num_splits=3, seed=5
    )
    assert logged["test/benchmark_tau"] == pytest.approx(float(expected["kendall_tau"].nanmean()), abs=1e-6)
    assert logged["test/benchmark_mse"] == pytest.approx(float(expected["mse"].mean()), rel=1e-5)
    ratio = float(expected["mse"].sum() / expected["mse_of_mean"].sum())
    assert logged["test/benchmark_mse_ratio"] == pytest.approx(ratio, rel=1e-5)
    assert {"test/intra_distance", "test/inter_distance", "test/communities_closer"} <= set(logged)


@pytest.mark.bad_input
def test_probes_say_what_they_lack():
    with pytest.raises(ValueError, match="held_out_benchmarks"):
        quiet_trainer(callbacks=[BenchmarkProbe()]).test(small_model(), datamodule=small_data(), verbose=False)
    probe = CommunityProbe({"a": ["family0-model0", "nobody"]})
    with pytest.raises(ValueError, match="there is no model 'nobody'"):
        probe.members(None, small_data().model_names)
    with pytest.raises(ValueError, match="the data module has none"):
        CommunityProbe().members(None, [])


def test_communities_by_name():
    found = CommunityProbe({"both": ["family0-model0", "family1-model1"]}).members(None, small_data().model_names)
    assert found["both"].nonzero().flatten().tolist() == [0, 1]


# the router


def test_the_router_is_a_small_object_outside_of_lightning(tmp_path):
    data, model = small_data(), small_model()
    trainer = quiet_trainer(max_steps=2, max_epochs=-1)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    router = Router.from_checkpoint(tmp_path / "model.ckpt")
    x = torch.randn(9, 12)
    expected = [data.model_names[m] for m in model.eval().route(x).tolist()]
    assert router.route(x) == router(x.numpy()) == Router.from_module(model).route(x) == expected
    torch.testing.assert_close(router.scores(x), model.network.score_matrix(x).detach())
    assert set(router.route(x, available=data.model_names[3:5])) <= set(data.model_names[3:5])
    assert set(router.route(x, available=torch.arange(8) < 1)) == {data.model_names[0]}
    data_of = pickle.dumps(router)
    assert len(data_of) < 20_000
    assert pickle.loads(data_of).route(x) == copy.deepcopy(router).route(x) == expected
    (tmp_path / "router.pkl").write_bytes(data_of)
    code = (
        "import pickle, sys, torch; router = pickle.load(open(sys.argv[1], 'rb')); "
        "assert len(router.route(torch.zeros(2, 12))) == 2; "
        "heavy = [n for n in ('lightning', 'torchmetrics', 'transformers', 'sklearn') if n in sys.modules]; "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "router.pkl")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_router_reads_weights_of_the_authors_code(tmp_path):
    network = CorrectnessMF(3, 4, 8)
    theirs = {"P.weight": network.model_embedding.weight.detach(), "Q.weight": torch.zeros(2, 8)}
    for name in ("question_proj", "classifier"):
        for kind in ("weight", "bias"):
            published = name.replace("question_proj", "text_proj")
            theirs[f"{published}.{kind}"] = getattr(getattr(network, name), kind).detach()
    torch.save(theirs, tmp_path / "saved_model.pth")
    router, x = Router.from_checkpoint(tmp_path / "saved_model.pth"), torch.randn(5, 8)
    torch.testing.assert_close(router.scores(x), network.score_matrix(x).detach())
    assert router.model_names == ["model0", "model1", "model2"]


def test_the_router_takes_texts():
    seen = []

    def encoder(texts):
        seen.append(texts)
        return torch.tensor([[float(len(text)), 1.0] for text in texts])

    router = Router(CorrectnessMF(3, 4, 2), ["a", "b", "c"], encoder)
    direct = router.route(torch.tensor([[2.0, 1.0], [5.0, 1.0]]))
    assert router.route(["hi", "hello"]) == direct
    assert router.route("hello") == direct[1:]
    assert seen == [["hi", "hello"], ["hello"]]


@pytest.mark.bad_input
def test_bad_input_of_the_router(tmp_path):
    network = CorrectnessMF(3, 4, 2)
    router = Router(network, ["a", "b", "c"])
    torch.save({"x": torch.zeros(2)}, tmp_path / "other.pth")
    for call, match in (
        (lambda: router.route(["text"]), "need an encoder"),
        (lambda: router.route(torch.zeros(2, 3)), "question_dim=2"),
        (lambda: router.route(torch.zeros(2, 2), available=["d"]), "there is no model 'd'"),
        (lambda: router.route(torch.zeros(2, 2), available=[]), "question 0 has none"),
        (lambda: router.with_model("a", [0, 1], torch.zeros(2, 2)), "'a' occurs twice"),
        (lambda: Router(network, ["a"]), "must have 3 names"),
        (lambda: Router.from_checkpoint(tmp_path / "other.pth"), "is no checkpoint"),
    ):
        with pytest.raises(ValueError, match=match):
            call()


# pictures


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_pictures_of_the_embedding_space(method):
    names = [f"m{i}" for i in range(9)]
    communities = {"first": torch.arange(9) < 3, "second": ["m3", "m4"]}
    axis = plot_embeddings(torch.randn(9, 5), names, communities, method, sizes=torch.rand(9))
    axis.figure.canvas.draw()
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["first", "second"]
    assert [len(points.get_offsets()) for points in axis.collections] == [3, 2, 4]
    assert {text.get_text() for text in axis.texts} == set(names)


def test_components_hold_the_distances_of_a_plane():
    from lightning_methods.embed_llm.plots import project

    plane = torch.randn(9, 2, dtype=torch.float64) @ torch.randn(2, 6, dtype=torch.float64)
    points, share = project(plane)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(plane, plane))
    assert float(share.sum()) == pytest.approx(1)


# from the shell


def test_the_command_line_trains_and_routes(tmp_path, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(Path(__file__).parents[2])
    cli = run(
        [
            "fit",
            "--config=configs/embed_llm/synthetic.yaml",
            "--config=tests/embed_llm/contract.yaml",
            "--trainer.max_epochs=1",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            "--trainer.accelerator=cpu",
        ]
    )
    assert "test/intra_distance" in cli.test_metrics
    (path,) = tmp_path.rglob("last.ckpt")
    router = Router.from_checkpoint(path)
    assert router.model_names == cli.datamodule.model_names
    torch.testing.assert_close(router.network.model_embedding.weight, cli.model.model_embeddings)
