"""EmbedLLM: routing by one matrix product against one pass per question; nearest questions by one search for all models
against one per model; a training batch gathered from one table against samples that are collated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_methods.embed_llm import CorrectnessMF, knn_correctness, route_queries

PAPER = {"models": 112, "questions": 3000, "dim": 768, "embedding": 232}
SMALL = {"models": 20, "questions": 300, "dim": 64, "embedding": 32}


def network_of(shape: dict, device: torch.device) -> CorrectnessMF:
    return CorrectnessMF(shape["models"], shape["embedding"], shape["dim"]).to(device)


def matrix(network: CorrectnessMF, questions: Tensor) -> Tensor:
    return route_queries(network.margin_matrix(questions))


def per_question(network: CorrectnessMF, questions: Tensor) -> Tensor:
    """All models on one question at a time."""
    ids = torch.arange(network.num_models, device=questions.device)
    choice = []
    for question in questions:
        logits = network(ids, question.expand(len(ids), -1))
        choice.append((logits[:, 1] - logits[:, 0]).argmax())
    return torch.stack(choice)


@pytest.mark.shapes(small=SMALL, tenth={**PAPER, "questions": 300}, paper=PAPER)
@pytest.mark.parametrize("form", [matrix, per_question], ids=["matrix", "per_question"])
def test_routing(measure, shape, form, device):
    if form is per_question and shape["questions"] > 1000:
        pytest.skip("ten times the smaller one's time")
    network = network_of(shape, device).eval()
    questions = torch.randn(shape["questions"], shape["dim"], device=device)
    with torch.no_grad():
        assert (matrix(network, questions[:50]) == per_question(network, questions[:50])).float().mean() > 0.95
        measure(lambda: form(network, questions))


def one_search(train: Tensor, correct: Tensor, test: Tensor, k: int) -> Tensor:
    return knn_correctness(train, correct, test, k)


def per_model(train: Tensor, correct: Tensor, test: Tensor, k: int) -> Tensor:
    """A search of its own for every model."""
    forecasts = []
    for row in correct:
        nearest = torch.cdist(test, train).topk(k, largest=False).indices
        forecasts.append((2 * row[nearest].sum(dim=1) > k).long())
    return torch.stack(forecasts)


@pytest.mark.shapes(
    small={"models": 10, "train": 2000, "test": 200, "dim": 64, "k": 31},
    large={"models": 8, "train": 10000, "test": 200, "dim": 768, "k": 131},
)
@pytest.mark.parametrize("form", [one_search, per_model], ids=["one_search", "per_model"])
def test_nearest_questions(measure, shape, form, device):
    train = torch.randn(shape["train"], shape["dim"], device=device)
    test = torch.randn(shape["test"], shape["dim"], device=device)
    correct = torch.randint(2, (shape["models"], shape["train"]), device=device)
    if shape["train"] <= 2000:
        same = one_search(train, correct, test, shape["k"]) == per_model(train, correct, test, shape["k"])
        assert same.float().mean() > 0.99
    measure(lambda: form(train, correct, test, shape["k"]))


@pytest.mark.shapes(paper={"batch": 2048, "table": 4096, **PAPER})
@pytest.mark.parametrize("form", ["gathered", "collated"])
def test_batch(measure, shape, form, device):
    table = torch.randn(shape["table"], shape["dim"], device=device)
    rows = torch.randint(shape["table"], (shape["batch"],), device=device)

    def gathered() -> Tensor:
        return table[rows]

    def collated() -> Tensor:
        return default_collate([table[row] for row in rows])

    assert torch.equal(gathered(), collated())
    measure(gathered if form == "gathered" else collated)
