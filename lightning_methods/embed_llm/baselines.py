"""What EmbedLLM is compared with: the vote of the nearest training questions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_range
from .functional import knn_votes
from .module import CorrectnessModule

__all__ = ["KNNCorrectness"]


class KNNCorrectness(CorrectnessModule):
    """Forecasts outcomes by the k nearest training questions, with the metrics of :class:`EmbedLLM`.

    There is nothing to train: the training questions come from the data module's ``table("train")`` whenever a run is
    set up, and one epoch suffices (``trainer.max_epochs=1``). Nothing of them is in the checkpoint.

    Routing follows the votes, ``test/loss`` is of the vote's share with one vote added to each side.

    Args:
        num_models: M.
        ks: numbers of neighbours; of several the best on the data module's ``table("val")`` is taken. More than there
            are training questions means all of them: the majority of each model.

    Attributes:
        k: the number of neighbours that is used; after ``setup``.
    """

    def __init__(self, num_models: int, ks: list[int] | int = 131) -> None:
        super().__init__(num_models, torch.optim.SGD)  # never asked: there is nothing to optimise
        self.automatic_optimization = False
        self.ks = [ks] if isinstance(ks, int) else sorted(set(ks))
        for k in self.ks:
            check_range("ks", k, 1)
        self.k: int | None = None
        self._table: tuple[Tensor, Tensor, Tensor] | None = None

    def setup(self, stage: str) -> None:
        """Take the training questions, and choose the number of neighbours.

        Raises:
            ValueError: the data module has no table of outcomes.
        """
        super().setup(stage)
        table = getattr(self.trainer.datamodule, "table", None)
        if table is None:
            raise ValueError("KNNCorrectness needs a data module with table(split): CorrectnessMatrixDataModule.")
        train = table("train")
        self._table = tuple(x.to(self.device) for x in (train.question_embeddings, train.correct, train.observed))
        ks = sorted({min(k, len(train.question_embeddings)) for k in self.ks})
        if len(ks) == 1:
            self.k = ks[0]
            return
        val = table("val")
        votes = knn_votes(
            self._table[0], self._table[1], val.question_embeddings.to(self.device), tuple(ks), self._table[2]
        )
        right = ((votes > 0) == (val.correct > 0).to(self.device)) & val.observed.to(self.device)
        self.k = ks[int(right.sum(dim=(1, 2)).argmax())]

    def votes(self, question_ids: Tensor, model_ids: Tensor, question_embeddings: Tensor) -> Tensor:
        """Votes for "right" minus votes for "wrong" of each pair, [B].

        Raises:
            RuntimeError: there are no training questions yet.
        """
        if self._table is None or self.k is None:
            raise RuntimeError("KNNCorrectness has no training questions: run it by a trainer with its data module.")
        embeddings, correct, observed = (x.to(self.device) for x in self._table)
        # a batch holds each question once for every model
        distinct, column = question_ids.unique(return_inverse=True)
        row = torch.zeros_like(distinct).index_put((column,), torch.arange(len(column), device=column.device))
        votes = knn_votes(embeddings, correct, question_embeddings[row].to(embeddings), (self.k,), observed)[0]
        return votes[model_ids, column]

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Log loss of a batch, scalar, and the votes of its pairs as numbers whose sign is the forecast, [B]."""
        votes = self.votes(batch.question_ids, batch.model_ids, batch.question_embeddings).float()
        share = (votes + self.k + 2) / (2 * self.k + 4)
        loss = torch.nn.functional.binary_cross_entropy(share, batch.labels.to(share.dtype))
        return loss, votes

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Share of the votes for "right" of each pair, [B]."""
        return self.outputs(batch)[1] / (2 * self.k) + 0.5

    def configure_optimizers(self) -> None:
        """None: nothing is trained by gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to do."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave the training questions out of pickles."""
        return {**super().__getstate__(), "_table": None}
