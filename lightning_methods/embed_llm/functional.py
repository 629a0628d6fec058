"""Which model answers which question rightly: scores from embeddings, routing, nearest questions, probing.

Source: Zhuang, Wu, Wen, Li, Jiao, Ramchandran, "EmbedLLM: Learning Compact Representations of Large Language Models",
ICLR 2025. With v_m the embedding of model m and v_q = W x_q + b the projected text embedding of question q,

    logits = C (v_m * v_q) + c  in R^2,    s_mq = sigmoid(logits_1 - logits_0)

is the probability that m is right on q; ``*`` is the entry-wise product.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.checks import check_choice, check_labels, check_range, check_shape, values_visible
from ..core.losses import at_least_float32, float64_if_possible
from ..core.neighbors import knn

__all__ = [
    "RoutingBaselines",
    "community_distances",
    "correctness_logits",
    "correctness_loss",
    "correctness_margin_matrix",
    "correctness_score",
    "correctness_score_matrix",
    "fit_benchmark_regression",
    "fit_model_embedding",
    "knn_correctness",
    "knn_votes",
    "route_queries",
    "routing_accuracy",
    "routing_baselines",
]


# the decoder


def _check_decoder(model_embeddings: Tensor, questions: Tensor, weight: Tensor, bias: Tensor) -> tuple[int, int]:
    """Rows of the two sides."""
    sizes = check_shape("model_embeddings", model_embeddings, "models dim")
    rows = check_shape("question_embeddings", questions, "questions dim", dim=sizes["dim"])["questions"]
    check_shape("weight", weight, "two dim", two=2, dim=sizes["dim"])
    check_shape("bias", bias, "two", two=2)
    return sizes["models"], rows


def correctness_logits(
    model_embeddings: Float[Tensor, "batch dim"],
    question_embeddings: Float[Tensor, "batch dim"],
    weight: Float[Tensor, "two dim"],
    bias: Float[Tensor, " two"],
) -> Float[Tensor, "batch two"]:
    """Logits of "wrong" and "right" of model-question pairs, ``C (v_m * v_q) + c``.

    Args:
        model_embeddings: v_m of every pair, [batch, dim].
        question_embeddings: *projected* question embeddings v_q of every pair, [batch, dim].
        weight: C, [2, dim].
        bias: c, [2].

    Returns:
        [batch, 2]; class 1 is "right".

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> ones = torch.ones(3, 4)
        >>> correctness_logits(ones, 2 * ones, torch.stack([-ones[0], ones[0]]), torch.zeros(2))[0]
        tensor([-8.,  8.])
    """
    models, questions = _check_decoder(model_embeddings, question_embeddings, weight, bias)
    if models != questions:
        raise ValueError(
            f"model_embeddings and question_embeddings must have one row per pair, got {models} and {questions} rows."
        )
    return F.linear(model_embeddings * question_embeddings, weight, bias)


def correctness_score(logits: Float[Tensor, "*batch two"]) -> Float[Tensor, "*batch"]:
    """Probability of "right", ``sigmoid(logits_1 - logits_0)``, which is the softmax over the two logits.

    Args:
        logits: [..., 2].

    Returns:
        [...], float32 or wider.

    Raises:
        ValueError: the last dimension is not 2.

    Example:
        >>> correctness_score(torch.tensor([[1.0, 1.0], [-9.0, 9.0]])).round(decimals=3)
        tensor([0.5000, 1.0000])
    """
    check_shape("logits", logits, "... two", two=2)
    logits = at_least_float32(logits)
    return (logits[..., 1] - logits[..., 0]).sigmoid()


def correctness_loss(
    logits: Float[Tensor, "batch two"],
    labels: Int[Tensor, " batch"],
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Float[Tensor, "*batch"]:
    """Binary cross-entropy of the score against the outcome, as cross-entropy over the two logits (the same number).

    Args:
        logits: [batch, 2].
        labels: 1 where the model was right, else 0, [batch]. A batch may hold one of the two alone.
        reduction: "mean", "sum" or "none".

    Returns:
        A scalar, or [batch] for "none"; float32 or wider.

    Raises:
        ValueError: shapes do not fit, labels outside {0, 1}, unknown reduction.

    Example:
        >>> correctness_loss(torch.zeros(3, 2), torch.tensor([1, 1, 1]))
        tensor(0.6931)
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    batch = check_shape("logits", logits, "batch two", two=2)["batch"]
    check_labels("labels", labels, 2, batch=batch)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(at_least_float32(logits), labels.long(), reduction=reduction)


def correctness_margin_matrix(
    model_embeddings: Float[Tensor, "models dim"],
    question_embeddings: Float[Tensor, "questions dim"],
    weight: Float[Tensor, "two dim"],
    bias: Float[Tensor, " two"],
) -> Float[Tensor, "models questions"]:
    """``logits_1 - logits_0`` of every model on every question by one matrix product.

    With u = C_1 - C_0 and u_0 = c_1 - c_0 it is ``(P * u) V^T + u_0``. Route by this and not by the probabilities: the
    order is the same, but in floating point a sigmoid calls all confident models equal.

    Args:
        model_embeddings: P, [models, dim].
        question_embeddings: projected question embeddings V, [questions, dim].
        weight: C, [2, dim].
        bias: c, [2].

    Returns:
        [models, questions], float32 or wider.

    Raises:
        ValueError: shapes do not fit.
    """
    _check_decoder(model_embeddings, question_embeddings, weight, bias)
    P, V, C, c = (at_least_float32(x) for x in (model_embeddings, question_embeddings, weight, bias))
    with torch.autocast(P.device.type, enabled=False):
        return torch.addmm(c[1] - c[0], P * (C[1] - C[0]), V.T)


def correctness_score_matrix(
    model_embeddings: Float[Tensor, "models dim"],
    question_embeddings: Float[Tensor, "questions dim"],
    weight: Float[Tensor, "two dim"],
    bias: Float[Tensor, " two"],
) -> Float[Tensor, "models questions"]:
    """Probability that each model is right on each question, by one matrix product.

    Args:
        model_embeddings: P, [models, dim].
        question_embeddings: *projected* question embeddings, [questions, dim].
        weight: C, [2, dim].
        bias: c, [2].

    Returns:
        [models, questions], float32 or wider.

    Raises:
        ValueError: shapes do not fit.

    Example:
        >>> decoder = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2)
        >>> correctness_score_matrix(torch.eye(2), 5 * torch.eye(2), *decoder).round(decimals=2)
        tensor([[0.9900, 0.5000],
                [0.5000, 0.9900]])
    """
    return correctness_margin_matrix(model_embeddings, question_embeddings, weight, bias).sigmoid()


# routing


class RoutingBaselines(NamedTuple):
    """What a router is compared with.

    Attributes:
        best_single: accuracy of the model that is right most often on these questions, scalar.
        weighted_random: ``sum_m (counts_m / Q) acc_m``: every model gets as many questions as the router gave it, but
            which ones is left to chance; scalar.
        counts: questions that the router gave each model, int64 [M].
    """

    best_single: Tensor
    weighted_random: Tensor
    counts: Tensor


def route_queries(
    scores: Float[Tensor, "models questions"],
    available: Bool[Tensor, " models"] | Bool[Tensor, "models questions"] | None = None,
) -> Int[Tensor, " questions"]:
    """Send every question to the model with the highest score; of equal scores to the lowest index.

    Args:
        scores: probabilities or anything that grows with them, [models, questions].
        available: which models may be chosen, bool [models] or per question [models, questions]; None: all.

    Returns:
        int64 [questions].

    Raises:
        ValueError: shapes do not fit, or a question has no available model.

    Example:
        >>> scores = torch.tensor([[0.9, 0.2], [0.9, 0.3], [0.1, 0.8]])
        >>> route_queries(scores), route_queries(scores, torch.tensor([False, True, False]))
        (tensor([0, 2]), tensor([1, 1]))
    """
    sizes = check_shape("scores", scores, "models questions")
    models, questions = sizes["models"], sizes["questions"]
    if models == 0:
        raise ValueError(f"scores must have at least one model, got shape {list(scores.shape)}.")
    # Not argmax alone: it does not promise the first of equal entries on every device.
    index = torch.arange(models, device=scores.device)[:, None]
    if available is None:
        return torch.where(scores == scores.amax(dim=0), index, models - 1).amin(dim=0)
    if available.dtype != torch.bool:
        raise ValueError(f"available must be boolean, got dtype {available.dtype}.")
    if available.dim() == 1:
        check_shape("available", available, "models", models=models)
        available = available[:, None].expand(models, questions)
    check_shape("available", available, "models questions", models=models, questions=questions)
    if values_visible(available) and not available.any(dim=0).all():
        lonely = int((~available.any(dim=0)).nonzero()[0])
        raise ValueError(f"every question needs an available model; question {lonely} has none.")
    masked = scores.masked_fill(~available, -torch.inf)
    best = available & (masked == masked.amax(dim=0))
    return torch.where(best, index, models).amin(dim=0).clamp_max(models - 1)


def _check_choice_table(choice: Tensor, correct: Tensor, observed: Tensor | None) -> tuple[int, int]:
    sizes = check_shape("correct", correct, "models questions")
    models, questions = sizes["models"], sizes["questions"]
    check_labels("choice", choice, models, batch=questions)
    _check_outcomes("correct", correct)
    if observed is not None:
        check_shape("observed", observed, "models questions", **sizes)
    return models, questions


def _check_outcomes(name: str, correct: Tensor) -> None:
    if values_visible(correct) and not ((correct == 0) | (correct == 1)).all():
        raise ValueError(f"{name} must hold 0 and 1 only.")


def routing_accuracy(choice: Int[Tensor, " questions"], correct: Tensor) -> Float[Tensor, ""]:
    """Share of the questions that the chosen model answers rightly.

    Args:
        choice: chosen model of every question, [questions].
        correct: outcomes, 0/1 or bool [models, questions].

    Returns:
        A scalar, float32; NaN without questions.

    Raises:
        ValueError: shapes do not fit, a model or an outcome is out of range.

    Example:
        >>> routing_accuracy(torch.tensor([0, 1]), torch.tensor([[1, 0], [0, 0]]))
        tensor(0.5000)
    """
    _check_choice_table(choice, correct, None)
    return correct.gather(0, choice.long()[None]).float().mean()


def routing_baselines(
    choice: Int[Tensor, " questions"],
    correct: Tensor,
    observed: Bool[Tensor, "models questions"] | None = None,
) -> RoutingBaselines:
    """What a router has to beat: the best single model, and its own share of questions per model assigned blindly.

    Args:
        choice: chosen model of every question, [questions].
        correct: outcomes, 0/1 or bool [models, questions].
        observed: which outcomes are known, [models, questions]; a model's accuracy is over those. None: all.

    Returns:
        :class:`RoutingBaselines`, float32.

    Raises:
        ValueError: shapes do not fit, a model or an outcome is out of range.

    Example:
        >>> routing_baselines(torch.tensor([0, 1]), torch.tensor([[1, 0], [1, 1]]))
        RoutingBaselines(best_single=tensor(1.), weighted_random=tensor(0.7500), counts=tensor([1, 1]))
    """
    models, questions = _check_choice_table(choice, correct, observed)
    outcome = correct.double() if correct.device.type != "mps" else correct.float()
    known = torch.ones_like(outcome) if observed is None else observed.to(outcome.dtype)
    accuracy = (outcome * known).sum(dim=1) / known.sum(dim=1)  # 0 / 0: never observed, and never chosen
    counts = torch.zeros(models, dtype=torch.int64, device=choice.device)
    counts = counts.index_add(0, choice.long(), torch.ones_like(choice, dtype=torch.int64))
    accuracy = accuracy.nan_to_num(0.0)
    weighted = (counts * accuracy).sum() / questions
    return RoutingBaselines(accuracy.amax().float(), weighted.float(), counts)


# nearest questions


def _check_neighbors(train: Tensor, correct: Tensor, test: Tensor, observed: Tensor | None, k: int) -> None:
    sizes = check_shape("train_embeddings", train, "train dim")
    check_shape("test_embeddings", test, "test dim", dim=sizes["dim"])
    models = check_shape("train_correct", correct, "models train", train=sizes["train"])["models"]
    if observed is not None:
        check_shape("observed", observed, "models train", models=models, train=sizes["train"])
    check_range("k", k, 1, sizes["train"])
    _check_outcomes("train_correct", correct)


@torch.no_grad()
def knn_votes(
    train_embeddings: Float[Tensor, "train dim"],
    train_correct: Tensor,
    test_embeddings: Float[Tensor, "test dim"],
    ks: tuple[int, ...],
    observed: Bool[Tensor, "models train"] | None = None,
    chunk_size: int = 512,
) -> Int[Tensor, "ks models test"]:
    """Votes of the nearest training questions for several numbers of neighbours at the price of the largest.

    Args:
        train_embeddings: [train, dim].
        train_correct: outcomes, 0/1 or bool [models, train].
        test_embeddings: [test, dim].
        ks: numbers of neighbours.
        observed: which outcomes are known, [models, train]; unknown ones do not vote.
        chunk_size: test questions at a time.

    Returns:
        Votes for "right" minus votes for "wrong", int32 [ks, models, test].

    Raises:
        ValueError: shapes do not fit, a k out of range, an outcome that is not 0 or 1.
    """
    for k in ks:
        _check_neighbors(train_embeddings, train_correct, test_embeddings, observed, k)
    if not ks:
        raise ValueError("ks must name at least one number of neighbours.")
    check_range("chunk_size", chunk_size, 1)
    votes = (2 * train_correct.to(torch.int8) - 1).contiguous()
    if observed is not None:
        votes = votes * observed.to(torch.int8)
    columns = torch.tensor(ks, device=votes.device) - 1
    parts = []
    for rows in test_embeddings.split(chunk_size):
        index = knn(rows, train_embeddings, max(ks), chunk_size=chunk_size)[1]
        # [models, chunk, k]: one gather of labels for all models
        ballots = votes[:, index]
        if len(ks) == 1:
            parts.append(ballots.sum(dim=-1, dtype=torch.int32)[None])
        else:
            parts.append(ballots.cumsum(dim=-1, dtype=torch.int32)[..., columns].movedim(-1, 0))
    return torch.cat(parts, dim=-1) if parts else votes.new_zeros(len(ks), len(votes), 0, dtype=torch.int32)


def knn_correctness(
    train_embeddings: Float[Tensor, "train dim"],
    train_correct: Tensor,
    test_embeddings: Float[Tensor, "test dim"],
    k: int,
    observed: Bool[Tensor, "models train"] | None = None,
    chunk_size: int = 512,
) -> Int[Tensor, "models test"]:
    """Forecast by the majority of the k nearest training questions (Euclidean), for all models from one search.

    Args:
        train_embeddings: embeddings of the training questions, [train, dim].
        train_correct: outcomes, 0/1 or bool [models, train].
        test_embeddings: [test, dim].
        k: number of neighbours, 1 .. train.
        observed: which outcomes are known, [models, train]; unknown ones of the k do not vote. None: all.
        chunk_size: test questions at a time.

    Returns:
        1 where the model is expected to be right, int64 [models, test]; an equal vote gives 0.

    Raises:
        ValueError: shapes do not fit, k out of range, an outcome that is not 0 or 1.

    Example:
        >>> train, correct = torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([[1, 1, 0]])
        >>> knn_correctness(train, correct, torch.tensor([[0.4], [8.0]]), k=1)
        tensor([[1, 0]])
    """
    votes = knn_votes(train_embeddings, train_correct, test_embeddings, (k,), observed, chunk_size)
    return (votes[0] > 0).long()


# what embeddings know


def fit_benchmark_regression(
    model_embeddings: Float[Tensor, "models dim"],
    accuracy: Float[Tensor, " models"],
) -> tuple[Float[Tensor, " dim"], Float[Tensor, ""]]:
    """Ordinary least squares, with intercept, from a model's embedding to its accuracy on a benchmark.

    With fewer models than dimensions the solution of least norm (of the weight; both sides are centred first).

    Args:
        model_embeddings: [models, dim].
        accuracy: [models].

    Returns:
        ``(weight, bias)``, [dim] and scalar: the prediction is ``embedding @ weight + bias``.

    Raises:
        ValueError: shapes do not fit, or there is no model.

    Example:
        >>> weight, bias = fit_benchmark_regression(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0.1, 0.3, 0.5]))
        >>> weight.round(decimals=3), bias.round(decimals=3)
        (tensor([0.2000]), tensor(0.1000))
    """
    models = check_shape("model_embeddings", model_embeddings, "models dim")["models"]
    check_shape("accuracy", accuracy, "models", models=models)
    if models == 0:
        raise ValueError("model_embeddings must have at least one row.")
    dtype = at_least_float32(model_embeddings).dtype
    # double precision: what counts as a singular value of zero decides the solution where dim > models - 1
    x, y = float64_if_possible(model_embeddings), float64_if_possible(accuracy)
    x_mean, y_mean = x.mean(dim=0), y.mean()
    centred = x - x_mean
    if centred.device.type == "cpu":
        weight = torch.linalg.lstsq(centred, (y - y_mean)[:, None], driver="gelsd").solution[:, 0]
    else:  # gelsd is for the CPU alone
        weight = torch.linalg.pinv(centred) @ (y - y_mean)
    return weight.to(dtype), (y_mean - x_mean @ weight).to(dtype)


def community_distances(
    embeddings: Float[Tensor, "models dim"], membership: Bool[Tensor, " models"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean distance within a community of models, and between its members and all others.

    Embeddings know of the community if the first is smaller. Compare embeddings of one training run only.

    Args:
        embeddings: [models, dim].
        membership: which models belong, bool [models].

    Returns:
        ``(intra, inter)``: mean Euclidean distance over pairs of members, and over pairs of a member and a non-member.

    Raises:
        ValueError: shapes do not fit, fewer than two members, or no non-member.

    Example:
        >>> intra, inter = community_distances(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([True, True, False]))
        >>> intra, inter
        (tensor(1.), tensor(4.5000))
    """
    models = check_shape("embeddings", embeddings, "models dim")["models"]
    check_shape("membership", membership, "models", models=models)
    if membership.dtype != torch.bool:
        raise ValueError(f"membership must be boolean, got dtype {membership.dtype}.")
    members = int(membership.sum())
    if members < 2 or members == models:
        raise ValueError(
            f"membership must name at least two members and leave a non-member, got {members} of {models} models."
        )
    own, others = at_least_float32(embeddings[membership]), at_least_float32(embeddings[~membership])
    pairs = torch.cdist(own, own, compute_mode="donot_use_mm_for_euclid_dist")
    intra = pairs.sum() / (members * (members - 1))  # the diagonal is 0
    return intra, torch.cdist(own, others, compute_mode="donot_use_mm_for_euclid_dist").mean()


# a model that was not there in training


@torch.no_grad()
def fit_model_embedding(
    correct: Tensor,
    question_embeddings: Float[Tensor, "questions dim"],
    weight: Float[Tensor, "two dim"],
    bias: Float[Tensor, " two"],
    prior_mean: Float[Tensor, " dim"] | None = None,
    prior_precision: float = 1.0,
    max_iter: int = 50,
    tol: float = 1e-8,
) -> Float[Tensor, " dim"]:
    """Embedding of a new model from its outcomes, with everything else fixed.

    Ours, not the paper's: there a new model needs a new training. With W, b, C and c fixed the logit is linear in the
    embedding, so this is a logistic regression with a Gaussian prior: convex, with one minimum, which Newton's method
    with step halving finds.

    Args:
        correct: outcomes of the new model, 0/1 or bool [questions].
        question_embeddings: projected embeddings of those questions, [questions, dim].
        weight: C, [2, dim].
        bias: c, [2].
        prior_mean: where the embedding is drawn to, e.g. the mean of the known models', [dim]; None: the origin.
        prior_precision: inverse variance of the prior, > 0; 1 fits embeddings that started from N(0, 1).
        max_iter: Newton steps at most.
        tol: stop once no entry of the gradient, per question, is larger.

    Returns:
        [dim].

    Raises:
        ValueError: shapes do not fit, an outcome that is not 0 or 1, no question, a number out of range.

    Example:
        >>> questions = torch.eye(2).repeat(50, 1)
        >>> correct = torch.tensor([1, 0]).repeat(50)  # always right on the first kind, never on the second
        >>> fit_model_embedding(correct, questions, torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2)).sign()
        tensor([ 1., -1.])
    """
    sizes = check_shape("question_embeddings", question_embeddings, "questions dim")
    dim, questions = sizes["dim"], sizes["questions"]
    check_shape("correct", correct, "questions", questions=questions)
    check_shape("weight", weight, "two dim", two=2, dim=dim)
    check_shape("bias", bias, "two", two=2)
    check_range("prior_precision", prior_precision, 0, low_open=True)
    check_range("max_iter", max_iter, 1)
    check_range("tol", tol, 0)
    _check_outcomes("correct", correct)
    if questions == 0:
        raise ValueError("question_embeddings must have at least one row.")
    C, c = float64_if_possible(weight), float64_if_possible(bias)
    rows = float64_if_possible(question_embeddings) * (C[1] - C[0])
    offset = c[1] - c[0]
    y = correct.to(rows.dtype)
    if prior_mean is None:
        mean = rows.new_zeros(dim)
    else:
        check_shape("prior_mean", prior_mean, "dim", dim=dim)
        mean = float64_if_possible(prior_mean)
    identity = prior_precision * torch.eye(dim, dtype=rows.dtype, device=rows.device)

    def objective(p: Tensor) -> Tensor:
        """Negative log posterior."""
        margin = rows @ p + offset
        return (F.softplus(margin) - y * margin).sum() + prior_precision / 2 * (p - mean).square().sum()

    p, value = mean.clone(), objective(mean)
    for _ in range(max_iter):  # a handful of steps; each decides whether another is needed
        score = (rows @ p + offset).sigmoid()
        gradient = rows.T @ (score - y) + prior_precision * (p - mean)
        if gradient.abs().amax() <= tol * questions:
            break
        hessian = (rows.T * (score * (1 - score))) @ rows + identity
        step = torch.linalg.solve(hessian, gradient)
        scale = 1.0
        while (new := objective(p - scale * step)) > value and scale > 1e-6:
            scale /= 2
        p, value = p - scale * step, new
    return p.to(at_least_float32(question_embeddings).dtype)
