from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from lightning_methods.embed_llm import (
    CorrectnessMF,
    community_distances,
    correctness_logits,
    correctness_loss,
    correctness_margin_matrix,
    correctness_score,
    correctness_score_matrix,
    fit_benchmark_regression,
    fit_model_embedding,
    knn_correctness,
    knn_votes,
    route_queries,
    routing_accuracy,
    routing_baselines,
)
from tests.vectors import load_cases

CASES = {case.number: case for case in load_cases("embed_llm")}
PARAMETERS = (
    "model_embedding.weight",
    "question_proj.weight",
    "question_proj.bias",
    "classifier.weight",
    "classifier.bias",
)


def close(result, expected, dtype=None):
    double = (dtype or result.dtype) == torch.float64
    tolerance = 1e-8 if double else 1e-6
    expected = torch.as_tensor(expected, dtype=result.dtype)
    torch.testing.assert_close(result, expected, rtol=1e-8 if double else 1e-5, atol=tolerance)


def network_of(inputs) -> CorrectnessMF:
    P, W = inputs["model_embedding.weight"], inputs["question_proj.weight"]
    network = CorrectnessMF(len(P), P.shape[1], W.shape[1]).to(P.dtype).eval()
    network.load_state_dict({name: inputs[name] for name in PARAMETERS})
    return network


# vectors


@pytest.mark.parametrize("number", [0, 1, 2])
def test_factorisation_vectors(number):
    inputs, outputs = CASES[number].inputs, CASES[number].outputs
    network = network_of(inputs)
    logits = network(inputs["model_ids"], inputs["question_embeddings"][inputs["question_ids"]])
    close(logits.detach(), outputs["logits"])
    close(correctness_score(logits.detach()), outputs["score"])
    assert torch.equal(logits.argmax(dim=1), outputs["pred"])
    loss = correctness_loss(logits, inputs["labels"])
    close(loss.detach(), outputs["loss"])
    loss.backward()
    close(network.model_embedding.weight.grad, outputs["grad_model_embedding"])
    close(network.question_proj.weight.grad, outputs["grad_question_proj_weight"])
    close(network.score_matrix(inputs["question_embeddings"]).detach(), outputs["score_matrix"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_functions_without_the_network(number):
    inputs, outputs = CASES[number].inputs, CASES[number].outputs
    P, W, b, C, c = (inputs[name] for name in PARAMETERS)
    projected = inputs["question_embeddings"] @ W.T + b
    logits = correctness_logits(P[inputs["model_ids"]], projected[inputs["question_ids"]], C, c)
    close(logits, outputs["logits"])
    close(correctness_score_matrix(P, projected, C, c), outputs["score_matrix"])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_routing_vectors(number):
    inputs, outputs = CASES[number].inputs, CASES[number].outputs
    network, correct = network_of(inputs), inputs["correct"]
    margins = network.margin_matrix(inputs["question_embeddings"]).detach()
    choice = route_queries(margins)
    baselines = routing_baselines(choice, correct)
    assert torch.equal(baselines.counts, outputs["model_counts"])
    for result, name in (
        (routing_accuracy(choice, correct), "routing_accuracy"),
        (baselines.best_single, "best_single"),
        (baselines.weighted_random, "weighted_random"),
    ):
        torch.testing.assert_close(result.double(), torch.tensor(outputs[name], dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("number", [3, 4])
def test_neighbour_vectors(number):
    inputs, outputs = CASES[number].inputs, CASES[number].outputs
    arguments = inputs["train_embeddings"], inputs["train_correct"], inputs["test_embeddings"], inputs["k"]
    predicted = knn_correctness(*arguments)
    assert torch.equal(predicted, outputs["pred"])
    accuracy = (predicted == inputs["test_correct"]).double().mean()
    torch.testing.assert_close(accuracy, torch.tensor(outputs["mean_accuracy"], dtype=torch.float64))
    assert torch.equal(knn_correctness(*arguments, chunk_size=2), predicted)


@pytest.mark.parametrize("number", [5, 6])
def test_regression_vectors(number):
    from torchmetrics.functional import kendall_rank_corrcoef

    inputs, outputs = CASES[number].inputs, CASES[number].outputs
    weight, bias = fit_benchmark_regression(inputs["train_embeddings"], inputs["train_accuracy"])
    predicted = inputs["test_embeddings"] @ weight + bias
    close(predicted, outputs["pred"])
    close((predicted - inputs["test_accuracy"]).square().mean(), outputs["mse"])
    # torchmetrics computes in single precision
    tau = kendall_rank_corrcoef(predicted, inputs["test_accuracy"])
    assert float(tau) == pytest.approx(outputs["kendall_tau"], abs=1e-6)


def test_community_vectors():
    inputs, outputs = CASES[7].inputs, CASES[7].outputs
    intra, inter = community_distances(inputs["embeddings"], inputs["membership"])
    close(intra, outputs["intra"])
    close(inter, outputs["inter"])


# the decoder


def random_case(models=4, questions=6, dim=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((models, dim), (questions, dim), (2, dim), (2,))
    return [torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes]


def test_gradients():
    P, V, C, c = (x.requires_grad_() for x in random_case(6, 6))
    labels = torch.tensor([0, 1, 1, 0, 1, 1])
    assert gradcheck(lambda *args: correctness_loss(correctness_logits(*args), labels), (P, V, C, c))
    assert gradcheck(correctness_score_matrix, (P, V, C, c))


def test_the_loss_is_binary_cross_entropy_of_the_score():
    logits = random_case(30, 30)[0][:, :2] * 5
    labels = torch.arange(30) % 2
    expected = torch.nn.functional.binary_cross_entropy(correctness_score(logits), labels.double(), reduction="none")
    for reduction in ("none", "mean", "sum"):
        reduced = expected if reduction == "none" else getattr(expected, reduction)()
        torch.testing.assert_close(correctness_loss(logits, labels, reduction), reduced, rtol=1e-6, atol=1e-9)


def test_the_loss_survives_extreme_logits_and_one_class():
    logits = torch.tensor([[400.0, -400.0], [-400.0, 400.0]], requires_grad=True)
    loss = correctness_loss(logits, torch.tensor([1, 1]))
    assert float(loss) == pytest.approx(400)
    loss.backward()
    assert torch.isfinite(logits.grad).all()


def test_half_precision_is_computed_in_single():
    logits = torch.randn(8, 2).bfloat16()
    assert correctness_loss(logits, torch.ones(8, dtype=torch.long)).dtype == torch.float32
    assert correctness_score(logits).dtype == torch.float32
    assert correctness_margin_matrix(*(x.bfloat16() for x in random_case(dtype=torch.float32))).dtype == torch.float32


def test_the_matrix_is_every_pair():
    P, V, C, c = random_case()
    scores = correctness_score_matrix(P, V, C, c)
    for m, q in itertools.product(range(4), range(6)):
        pair = correctness_score(correctness_logits(P[m : m + 1], V[q : q + 1], C, c))[0]
        torch.testing.assert_close(scores[m, q], pair)


def test_scores_do_not_change_when_the_scales_move():
    """Embeddings are known up to a joint scaling with the decoder: why runs are not compared with one another."""
    P, V, C, c = random_case()
    torch.testing.assert_close(correctness_score_matrix(3 * P, V / 3, C, c), correctness_score_matrix(P, V, C, c))
    scale = torch.rand(5, dtype=torch.float64) + 0.5
    moved = correctness_score_matrix(P * scale, V, C / scale, c)
    torch.testing.assert_close(moved, correctness_score_matrix(P, V, C, c))


# routing


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[0.5, 0.1], [0.5, 0.7], [0.5, 0.7]])
    assert route_queries(scores).tolist() == [0, 1]
    assert route_queries(scores, torch.tensor([False, True, True])).tolist() == [1, 1]
    per_question = torch.tensor([[False, True], [False, False], [True, False]])
    assert route_queries(scores, per_question).tolist() == [2, 0]
    assert route_queries(torch.full((3, 2), -torch.inf), torch.tensor([False, True, True])).tolist() == [1, 1]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda m: st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=m, max_size=m), min_size=1, max_size=6)
    )
)
def test_routing_is_the_first_argmax(rows):
    scores = torch.tensor(rows).T
    expected = [row.index(max(row)) for row in rows]
    assert route_queries(scores).tolist() == expected
    assert route_queries(scores, torch.ones(len(scores), dtype=torch.bool)).tolist() == expected


def test_confident_models_are_still_told_apart():
    P = torch.tensor([[50.0], [60.0]])
    one, decoder = torch.ones(1, 1), (torch.tensor([[0.0], [1.0]]), torch.zeros(2))
    assert correctness_score_matrix(P, one, *decoder).unique().numel() == 1  # the sigmoid is saturated
    assert route_queries(correctness_margin_matrix(P, one, *decoder)).tolist() == [1]


def test_baselines_with_missing_outcomes():
    correct = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    observed = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    result = routing_baselines(torch.tensor([0, 0, 1, 1]), correct, observed)
    assert float(result.best_single) == 1.0
    assert float(result.weighted_random) == pytest.approx(0.5 * 1.0 + 0.5 * 0.25)
    assert result.counts.tolist() == [2, 2, 0]
    whole = routing_baselines(torch.tensor([0, 0, 1, 1]), correct)
    assert float(whole.best_single) == 0.5


def test_the_order_of_questions_does_not_matter():
    scores, correct = torch.rand(4, 9), (torch.rand(4, 9) > 0.5).long()
    order = torch.randperm(9)
    choice = route_queries(scores)
    assert torch.equal(route_queries(scores[:, order]), choice[order])
    assert routing_accuracy(choice[order], correct[:, order]) == routing_accuracy(choice, correct)


# nearest questions


def test_neighbours_agree_with_a_loop():
    generator = torch.Generator().manual_seed(1)
    train, test = torch.randn(40, 3, generator=generator), torch.randn(11, 3, generator=generator)
    correct = torch.randint(2, (5, 40), generator=generator)
    observed = torch.rand(5, 40, generator=generator) > 0.3
    for k in (1, 4, 9, 40):
        predicted = knn_correctness(train, correct, test, k)
        masked = knn_correctness(train, correct, test, k, observed)
        for t, m in itertools.product(range(11), range(5)):
            nearest = (train - test[t]).norm(dim=1).argsort()[:k]
            votes = correct[m, nearest]
            assert predicted[m, t] == (2 * votes.sum() > k)
            votes = votes[observed[m, nearest]]
            assert masked[m, t] == (2 * votes.sum() > len(votes))


def test_many_ks_at_once():
    train, correct, test = torch.randn(30, 4), torch.randint(2, (3, 30)), torch.randn(7, 4)
    votes = knn_votes(train, correct, test, (1, 5, 8), chunk_size=3)
    assert votes.shape == (3, 3, 7)
    for row, k in zip(votes, (1, 5, 8), strict=True):
        assert torch.equal((row > 0).long(), knn_correctness(train, correct, test, k))


# regression, communities


def test_the_underdetermined_fit_has_the_least_norm():
    embeddings, accuracy = CASES[6].inputs["train_embeddings"], CASES[6].inputs["train_accuracy"]
    weight, bias = fit_benchmark_regression(embeddings, accuracy)
    torch.testing.assert_close(embeddings @ weight + bias, accuracy)
    # adding what the models cannot see fits as well, and is longer
    centred = embeddings - embeddings.mean(dim=0)
    unseen = torch.linalg.svd(centred, full_matrices=True).Vh[-1]
    assert float((weight @ unseen).abs()) < 1e-10


def test_regression_takes_single_precision_and_constant_targets():
    weight, bias = fit_benchmark_regression(torch.randn(10, 20), torch.full((10,), 0.3))
    assert weight.dtype == bias.dtype == torch.float32
    torch.testing.assert_close(weight, torch.zeros(20), rtol=0, atol=1e-6)
    assert float(bias) == pytest.approx(0.3)


def test_communities_do_not_change_under_rotation():
    embeddings, membership = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) < 4
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    torch.testing.assert_close(
        community_distances(embeddings @ rotation + 2, membership), community_distances(embeddings, membership)
    )


# a new model


def new_model(questions=400, dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(questions, dim, generator=generator, dtype=torch.float64)
    C, c = torch.randn(2, dim, generator=generator, dtype=torch.float64), torch.tensor([0.3, 0.1], dtype=torch.float64)
    p = torch.randn(dim, generator=generator, dtype=torch.float64)
    score = correctness_score(correctness_logits(p.expand_as(V), V, C, c))
    correct = (torch.rand(questions, generator=generator, dtype=torch.float64) < score).long()
    return correct, V, C, c, p


def test_a_new_model_is_at_the_minimum():
    correct, V, C, c, _ = new_model()
    mean = torch.full((5,), 0.2, dtype=torch.float64)
    fitted = fit_model_embedding(correct, V, C, c, mean, prior_precision=2.0).requires_grad_()
    loss = correctness_loss(correctness_logits(fitted.expand_as(V), V, C, c), correct, "sum")
    (loss + (fitted - mean).square().sum()).backward()
    assert float(fitted.grad.abs().max()) < 1e-5


def test_a_new_model_is_found_again():
    correct, V, C, c, p = new_model(20000)
    torch.testing.assert_close(fit_model_embedding(correct, V, C, c, prior_precision=1e-3), p, rtol=0, atol=0.15)


def test_separable_outcomes_stay_finite():
    _, V, C, c, p = new_model(50)
    correct = (V * (C[1] - C[0])) @ p > 0
    fitted = fit_model_embedding(correct, 100 * V, 10 * C, c)
    assert torch.isfinite(fitted).all()
    assert (((100 * V * 10 * (C[1] - C[0])) @ fitted > 0) == correct).double().mean() > 0.95
    assert fit_model_embedding(torch.ones(50), V.float(), C.float(), c.float()).dtype == torch.float32


# bad input


def bad(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.bad_input
def test_bad_shapes_of_the_decoder():
    P, V, C, c = random_case(4, 4)
    bad(lambda: correctness_logits(P, V[:3], C, c), "one row per pair")
    bad(lambda: correctness_logits(P, V[:, :3], C, c), "question_embeddings must have shape")
    bad(lambda: correctness_logits(P[0], V, C, c), "model_embeddings must have shape")
    bad(lambda: correctness_logits(P, V, C[:1], c), "weight must have shape")
    bad(lambda: correctness_score_matrix(P, V, C, c[:1]), "bias must have shape")
    bad(lambda: correctness_score(torch.zeros(3, 3)), "logits must have shape")


@pytest.mark.bad_input
def test_bad_labels():
    bad(lambda: correctness_loss(torch.zeros(2, 2), torch.tensor([0, 2])), r"labels must be in 0\.\.1, got 2")
    bad(lambda: correctness_loss(torch.zeros(2, 2), torch.tensor([-1, 0])), r"labels must be in 0\.\.1, got -1")
    bad(lambda: correctness_loss(torch.zeros(2, 2), torch.tensor([0])), "labels must have shape")
    bad(lambda: correctness_loss(torch.zeros(2, 3), torch.tensor([0, 1])), "logits must have shape")
    bad(lambda: correctness_loss(torch.zeros(2, 2), torch.tensor([0, 1]), "max"), "reduction must be one of")


@pytest.mark.bad_input
def test_bad_routing():
    scores = torch.rand(3, 2)
    bad(lambda: route_queries(scores, torch.tensor([[1, 0], [1, 0], [1, 0]]).bool()), "question 1 has none")
    bad(lambda: route_queries(scores, torch.zeros(3, dtype=torch.bool)), "question 0 has none")
    bad(lambda: route_queries(scores, torch.ones(2, dtype=torch.bool)), "available must have shape")
    bad(lambda: route_queries(scores, torch.ones(3)), "available must be boolean")
    bad(lambda: route_queries(scores[0]), "scores must have shape")
    bad(lambda: route_queries(scores[:0]), "at least one model")
    bad(lambda: routing_accuracy(torch.tensor([0, 3]), torch.ones(3, 2)), r"choice must be in 0\.\.2, got 3")
    bad(lambda: routing_accuracy(torch.tensor([0]), torch.ones(3, 2)), "choice must have shape")
    bad(lambda: routing_baselines(torch.tensor([0, 1]), torch.full((3, 2), 2)), "correct must hold 0 and 1")


@pytest.mark.bad_input
@pytest.mark.parametrize("k", [0, -1, 11])
def test_bad_k(k):
    bad(lambda: knn_correctness(torch.randn(10, 2), torch.ones(3, 10), torch.randn(4, 2), k), "k must be a finite")


@pytest.mark.bad_input
def test_bad_neighbours():
    train, correct, test = torch.randn(10, 2), torch.ones(3, 10), torch.randn(4, 2)
    bad(lambda: knn_correctness(train, correct, test[:, :1], 3), "test_embeddings must have shape")
    bad(lambda: knn_correctness(train, correct[:, :9], test, 3), "train_correct must have shape")
    bad(lambda: knn_correctness(train, 2 * correct, test, 3), "train_correct must hold 0 and 1")
    bad(lambda: knn_votes(train, correct, test, ()), "at least one number")


@pytest.mark.bad_input
@pytest.mark.parametrize("members", [0, 1, 5])
def test_bad_communities(members):
    bad(lambda: community_distances(torch.randn(5, 2), torch.arange(5) < members), "at least two members")


@pytest.mark.bad_input
def test_bad_fits():
    bad(lambda: community_distances(torch.randn(5, 2), torch.ones(5)), "membership must be boolean")
    bad(lambda: fit_benchmark_regression(torch.randn(5, 2), torch.randn(4)), "accuracy must have shape")
    bad(lambda: fit_benchmark_regression(torch.randn(0, 2), torch.randn(0)), "at least one row")
    correct, V, C, c, _ = new_model(20)
    bad(lambda: fit_model_embedding(correct[:3], V, C, c), "correct must have shape")
    bad(lambda: fit_model_embedding(correct + 1, V, C, c), "correct must hold 0 and 1")
    bad(lambda: fit_model_embedding(correct, V, C, c, prior_precision=0), "prior_precision must be")
