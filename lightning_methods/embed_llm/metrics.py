"""Routing over an evaluation whose pairs of model and question come in any order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..core.checks import check_labels, check_range, check_same_rows, check_shape
from .functional import route_queries, routing_accuracy, routing_baselines

__all__ = ["RoutingAccuracy"]


class RoutingAccuracy(Metric):
    """How often the model with the highest score is right, beside the best single model and blind assignment.

    Pairs are collected over the evaluation (and over ranks) and put into a table of models and questions at the end. A
    question for which some model is missing is routed among the models that are there; a pair that comes twice counts
    once.

    ``compute`` gives a dictionary: ``routing_acc``, ``best_single_acc``, ``weighted_random_acc`` (see
    :func:`routing_baselines`), scalars, and ``counts``, the number of questions sent to each model, int64 [M].

    Args:
        num_models: M.

    Example:
        >>> metric = RoutingAccuracy(num_models=2)
        >>> questions, models = torch.tensor([7, 7, 3, 3]), torch.tensor([0, 1, 0, 1])
        >>> metric.update(questions, models, torch.tensor([0.9, 0.2, 0.1, 0.8]), torch.tensor([1, 0, 1, 1]))
        >>> {name: value.tolist() for name, value in metric.compute().items()}
        {'routing_acc': 1.0, 'best_single_acc': 1.0, 'weighted_random_acc': 0.75, 'counts': [1, 1]}
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    question_ids: list[Tensor]
    model_ids: list[Tensor]
    scores: list[Tensor]
    labels: list[Tensor]

    def __init__(self, num_models: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_range("num_models", num_models, 1)
        self.num_models = num_models
        for name in ("question_ids", "model_ids", "scores", "labels"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, question_ids: Tensor, model_ids: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Add pairs.

        Args:
            question_ids: int [B]; any numbers.
            model_ids: int [B] in 0..M-1.
            scores: probabilities or anything that grows with them, float [B].
            labels: 1 where the model was right, else 0, int [B].

        Raises:
            ValueError: shapes do not fit, a model or a label is out of range.
        """
        rows = check_same_rows(question_ids=question_ids, model_ids=model_ids, scores=scores, labels=labels)
        check_shape("question_ids", question_ids, "batch")
        check_shape("scores", scores, "batch")
        check_labels("model_ids", model_ids, self.num_models, batch=rows)
        check_labels("labels", labels, 2, batch=rows)
        self.question_ids.append(question_ids)
        self.model_ids.append(model_ids)
        self.scores.append(scores.detach())
        self.labels.append(labels)

    def table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pairs as tables over models and questions.

        Returns:
            ``(questions, scores, correct, observed)``: the questions' numbers in ascending order [Q], and [M, Q] each.
        """
        models, scores, labels = (dim_zero_cat(x) for x in (self.model_ids, self.scores, self.labels))
        questions, column = dim_zero_cat(self.question_ids).unique(return_inverse=True)
        shape = (self.num_models, len(questions))
        position = models, column
        table = torch.full(shape, -torch.inf, dtype=scores.dtype, device=scores.device).index_put(position, scores)
        correct = torch.zeros(shape, dtype=torch.int64, device=scores.device).index_put(position, labels.long())
        observed = torch.zeros(shape, dtype=torch.bool, device=scores.device)
        return questions, table, correct, observed.index_put(position, torch.ones_like(models, dtype=torch.bool))

    def compute(self) -> dict[str, Tensor]:
        """The accuracies and the counts."""
        _, scores, correct, observed = self.table()
        choice = route_queries(scores, observed)
        best_single, weighted_random, counts = routing_baselines(choice, correct, observed)
        return {
            "routing_acc": routing_accuracy(choice, correct),
            "best_single_acc": best_single,
            "weighted_random_acc": weighted_random,
            "counts": counts,
        }
