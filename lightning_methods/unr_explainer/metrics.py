"""What explanations are worth: validity, importance, size, and how necessary they are to a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric

from ..core.checks import check_probabilities, check_range, check_shape
from .explainer import Explanation, UNRExplainer
from .functional import knn_indices

__all__ = [
    "ExplanationSize",
    "MeanImportance",
    "ProbabilityOfNecessity",
    "Validity",
    "link_necessity",
    "node_necessity",
    "probability_of_necessity",
]


class _MeanOverNodes(Metric):
    """Mean of one number for each explained node; nan before the first."""

    full_state_update = False
    is_differentiable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, values: Tensor) -> None:
        check_shape("values", values, "m")
        self.total += values.to(self.total).sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        """The mean, a float32 scalar."""
        return (self.total / self.count).float()


def _importance(explanations: Tensor | Sequence[Explanation]) -> Tensor:
    if isinstance(explanations, Tensor):
        return explanations
    return torch.tensor([explanation.importance for explanation in explanations], dtype=torch.float64)


class Validity(_MeanOverNodes):
    """Share of the explanations that are counterfactual: their importance is 1.

    Args:
        **kwargs: arguments of ``torchmetrics.Metric``.

    Example:
        >>> metric = Validity()
        >>> metric.update(torch.tensor([1.0, 0.8, 1.0, 0.0]))
        >>> metric.compute()
        tensor(0.5000)
    """

    higher_is_better = True

    def update(self, explanations: Tensor | Sequence[Explanation]) -> None:
        """Add explanations, or their importance, [m]."""
        self._add(_importance(explanations) >= 1)


class MeanImportance(_MeanOverNodes):
    """Mean share of a node's nearest nodes that are lost without the explanation.

    Args:
        **kwargs: arguments of ``torchmetrics.Metric``.

    Example:
        >>> metric = MeanImportance()
        >>> metric.update(torch.tensor([1.0, 0.8, 1.0, 0.0]))
        >>> metric.compute()
        tensor(0.7000)
    """

    higher_is_better = True

    def update(self, explanations: Tensor | Sequence[Explanation]) -> None:
        """Add explanations, or their importance, [m]."""
        self._add(_importance(explanations))


class ExplanationSize(_MeanOverNodes):
    """Mean number of undirected edges of the explanations.

    Args:
        **kwargs: arguments of ``torchmetrics.Metric``.

    Example:
        >>> metric = ExplanationSize()
        >>> metric.update([torch.tensor([[0, 1], [1, 2]]), torch.tensor([[4, 5]])])
        >>> metric.compute()
        tensor(1.5000)
    """

    higher_is_better = False

    def update(self, explanations: Sequence[Explanation | Tensor]) -> None:
        """Add explanations, or their edges, int64 [S, 2] each with every edge once."""
        edges = [part if isinstance(part, Tensor) else part.edges for part in explanations]
        self._add(torch.tensor([len(part) for part in edges], dtype=torch.float64))


def probability_of_necessity(
    before: Float[Tensor, "m classes"], after: Float[Tensor, "m classes"]
) -> Float[Tensor, " m"]:
    """How much the predicted class loses without the explanation, ``p(c | z_v) - p(c | z'_v)``.

    Args:
        before: class probabilities from the embeddings with all edges, [m, classes]; c is the most probable class.
        after: from those without the explanation of each node, [m, classes].

    Returns:
        [m] in [-1, 1].

    Raises:
        ValueError: shapes do not fit, or rows are no probabilities.

    Example:
        >>> probability_of_necessity(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.4, 0.6]]))
        tensor([0.5000])
    """
    sizes = check_shape("before", before, "m classes")
    check_shape("after", after, "m classes", **sizes)
    check_probabilities("before", before)
    check_probabilities("after", after)
    predicted = before.argmax(dim=1, keepdim=True)
    return (before.gather(1, predicted) - after.gather(1, predicted)).squeeze(1)


class ProbabilityOfNecessity(_MeanOverNodes):
    """Mean of :func:`probability_of_necessity` over the explained nodes.

    Args:
        **kwargs: arguments of ``torchmetrics.Metric``.

    Example:
        >>> metric = ProbabilityOfNecessity()
        >>> metric.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.4, 0.6], [0.1, 0.9]]))
        >>> metric.compute()
        tensor(0.2000)
    """

    higher_is_better = True

    def update(self, before: Tensor, after: Tensor) -> None:
        """Add class probabilities with all edges and without the explanation, [m, classes] each."""
        self._add(probability_of_necessity(before, after))


def node_necessity(
    explainer: UNRExplainer, explanations: Sequence[Explanation], y: Tensor, train_size: float = 0.8, seed: int = 42
) -> float:
    """Probability of necessity for classifying nodes by logistic regression on their embeddings.

    Args:
        explainer: gives the embeddings, with all edges and without each explanation.
        explanations: of the nodes to judge.
        y: class of every node, int64 [n].
        train_size: share of the nodes that the classifier is fitted to, chosen stratified by class.
        seed: of that choice.

    Returns:
        The mean over the explained nodes.

    Raises:
        ValueError: no explanations, shapes do not fit, or train_size is out of range.
    """
    from sklearn.model_selection import train_test_split

    from ..metrics.probes import linear_probe

    check_range("train_size", train_size, 0, 1, low_open=True, high_open=True)
    check_shape("y", y, "n", n=len(explainer.z))
    if not explanations:
        raise ValueError("explanations is empty.")
    z, y = explainer.z.cpu(), y.cpu()
    train, _ = train_test_split(range(len(y)), train_size=train_size, stratify=y.numpy(), random_state=seed)
    nodes = torch.tensor([explanation.node for explanation in explanations])
    without = torch.stack([explainer.embed(part.edges)[part.node].cpu() for part in explanations])
    probed = linear_probe(z[train], y[train], torch.cat([z[nodes], without]), y[nodes].repeat(2))
    before, after = probed["probabilities"].chunk(2)
    metric = ProbabilityOfNecessity()
    metric.update(before, after)
    return float(metric.compute())


def link_necessity(explainer: UNRExplainer, explanations: Sequence[Explanation], pairs: Tensor, label: Tensor) -> float:
    """How much the accuracy of link prediction by nearest nodes changes without the explanations.

    A pair (a, b) is predicted to be linked when b is among the k nearest nodes of a, and once more with the ends
    exchanged: two judgements for each pair. Without the explanations, each is made on the graph without the explanation
    of the end whose nearest nodes are looked at.

    Args:
        explainer: gives the embeddings.
        explanations: one for every node that occurs in the pairs.
        pairs: held-out pairs of nodes, int64 [2, P].
        label: 1 for links and 0 for others, [P].

    Returns:
        ``|accuracy - accuracy'|``.

    Raises:
        ValueError: shapes do not fit, no pairs, or an end without explanation.
    """
    count = check_shape("pairs", pairs, "two pairs", two=2)["pairs"]
    check_shape("label", label, "pairs", pairs=count)
    if count == 0:
        raise ValueError("pairs is empty, [2, 0].")
    device = explainer.z.device
    by_node = {explanation.node: explanation for explanation in explanations}
    nodes = pairs.unique().tolist()
    if missing := [node for node in nodes if node not in by_node]:
        raise ValueError(f"explanations has none for node {missing[0]}, an end of a pair ({len(missing)} missing).")
    row = {node: i for i, node in enumerate(nodes)}
    before = knn_indices(explainer.z, explainer.k, torch.tensor(nodes, device=device))
    after = [
        knn_indices(explainer.embed(by_node[node].edges), explainer.k, torch.tensor([node], device=device))
        for node in nodes
    ]
    ends = torch.cat([pairs, pairs.flip(0)], dim=1).to(device)
    rows = torch.tensor([row[node] for node in ends[0].tolist()], device=device)
    linked = label.to(device).repeat(2) > 0

    def accuracy(neighbors: Tensor) -> float:
        near = (neighbors[rows] == ends[1, :, None]).any(dim=1)
        return float((near == linked).double().mean())

    return abs(accuracy(before) - accuracy(torch.cat(after)))
