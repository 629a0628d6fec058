"""EmbedLLM as a LightningModule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy

from ..core.checks import check_range
from ..core.module import MethodModule
from .functional import correctness_loss, correctness_score, route_queries
from .metrics import RoutingAccuracy
from .modules import CorrectnessMF

__all__ = ["CorrectnessModule", "EmbedLLM"]

ROUTING = ("routing_acc", "best_single_acc", "weighted_random_acc")


class CorrectnessModule(MethodModule):
    """What a model of outcomes and its baseline share: evaluation, routing metrics, the names of the models.

    Subclasses implement :meth:`outputs`. Batches have the fields of
    :class:`~lightning_methods.core.CorrectnessBatch`. Logs ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc``,
    ``test/routing_acc``, ``test/best_single_acc`` and ``test/weighted_random_acc``.

    Args:
        num_models: M.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Attributes:
        model_names: the names of the models, from the data module; part of the checkpoint. Empty if unknown.
        question_encoder: how the data module made text into embeddings (name, pooling, normalize, max_length); part of
            the checkpoint. Empty if unknown.
    """

    def __init__(
        self,
        num_models: int,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("num_models", num_models, 1)
        self.num_models = num_models
        self.model_names: tuple[str, ...] = ()
        self.question_encoder: dict[str, Any] = {}
        self.val_acc = BinaryAccuracy()
        self.test_acc = BinaryAccuracy()
        self.test_routing = RoutingAccuracy(num_models)

    # what the data module knows

    def setup(self, stage: str) -> None:
        """Check the data module's number of models and take their names and the text encoder from it.

        Raises:
            ValueError: the data have another number of models.
        """
        datamodule = getattr(self.trainer, "datamodule", None)
        found = getattr(datamodule, "num_models", self.num_models)
        if found != self.num_models:
            raise ValueError(f"the data have {found} models, but num_models={self.num_models}.")
        self.model_names = tuple(getattr(datamodule, "model_names", self.model_names))
        self.question_encoder = dict(getattr(datamodule, "question_encoder", self.question_encoder))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the names of the models and the text encoder."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["model_names"] = list(self.model_names)
        checkpoint["question_encoder"] = self.question_encoder

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the names of the models and the text encoder back."""
        self.model_names = tuple(checkpoint.get("model_names", ()))
        self.question_encoder = dict(checkpoint.get("question_encoder", {}))

    # evaluation

    @abstractmethod
    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Loss of a batch, scalar, and a number for each of its pairs whose sign is the forecast, [B]."""

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        loss, margins = self.outputs(batch)
        accuracy = getattr(self, f"{stage}_acc")
        accuracy((margins > 0).long(), batch.labels)  # equal logits are a forecast of "wrong"
        options = {"batch_size": len(batch.labels), "on_step": False, "on_epoch": True}
        self.log(f"{stage}/loss", loss, sync_dist=True, **options)
        self.log(f"{stage}/acc", accuracy, prog_bar=True, **options)
        return margins

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy, and collect the pairs for routing."""
        margins = self._evaluate(batch, "test")
        self.test_routing.update(batch.question_ids, batch.model_ids, margins, batch.labels)

    def on_test_epoch_end(self) -> None:
        """Log the routing metrics."""
        result = self.test_routing.compute()
        self.test_routing.reset()
        self.log_dict({f"test/{name}": result[name] for name in ROUTING})


class EmbedLLM(CorrectnessModule):
    """Learns one vector per language model from which questions it answers rightly (EmbedLLM).

    The vectors then serve without running a language model again: to forecast whether a model will be right on a new
    question (``predict_step``), to send a question to the model most likely to be right (:meth:`route`, or
    :class:`Router` outside of Lightning), to predict accuracies on a benchmark that was left out
    (:class:`BenchmarkProbe`), and to see which models are alike (:class:`CommunityProbe`, :func:`plot_embeddings`).

    Batches are :class:`~lightning_methods.core.CorrectnessBatch`, e.g. of ``CorrectnessMatrixDataModule``. Logs
    ``train/loss``, ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc``, ``test/routing_acc``,
    ``test/best_single_acc`` and ``test/weighted_random_acc``. Evaluation is without noise.

    Compare embeddings of one run only: they are known up to a scaling that the decoder undoes.

    Args:
        num_models: M.
        question_dim: D, size of the text embeddings.
        embedding_dim: d, size of a model's vector.
        noise_std: deviation of the noise on the question embeddings in training, see :class:`CorrectnessMF`.
        optimizer: makes the optimiser from parameters. The default is Adam with L2 in the gradient, not AdamW.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps every "epoch" or every "step".

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from lightning_methods.embed_llm import EmbedLLM
        >>> model = EmbedLLM(num_models=3, question_dim=8, embedding_dim=4)
        >>> model.model_embeddings.shape, model.route(torch.randn(5, 8)).shape
        (torch.Size([3, 4]), torch.Size([5]))
    """

    def __init__(
        self,
        num_models: int,
        question_dim: int = 768,
        embedding_dim: int = 232,
        noise_std: float = 0.05,
        optimizer: OptimizerCallable = lambda params: torch.optim.Adam(params, lr=1e-4, weight_decay=1e-5),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(num_models, optimizer, lr_scheduler, lr_interval)
        self.network = CorrectnessMF(num_models, embedding_dim, question_dim, noise_std)

    @property
    def model_embeddings(self) -> Tensor:
        """The vectors of the models, [M, d], without gradient."""
        return self.network.model_embedding.weight.detach()

    def forward(self, model_ids: Tensor, question_embeddings: Tensor) -> Tensor:
        """Logits of "wrong" and "right", [B] and [B, D] -> [B, 2]."""
        return self.network(model_ids, question_embeddings)

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Loss of a batch, scalar, and ``logits_1 - logits_0`` of its pairs, [B]."""
        logits = self(batch.model_ids, batch.question_embeddings)
        return correctness_loss(logits, batch.labels), logits[:, 1] - logits[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of the batch."""
        loss, _ = self.outputs(batch)
        options = {"batch_size": len(batch.labels), "on_step": False, "on_epoch": True}
        self.log("train/loss", loss, prog_bar=True, **options)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Probability that the model of each pair is right, [B]."""
        return correctness_score(self(batch.model_ids, batch.question_embeddings))

    @torch.no_grad()
    def route(self, question_embeddings: Tensor, available: Tensor | None = None) -> Tensor:
        """The model most likely to be right on each question.

        Args:
            question_embeddings: [Q, D].
            available: which models may be chosen, bool [M] or [M, Q]; None: all.

        Returns:
            int64 [Q]; of equally likely models the first.

        Raises:
            ValueError: shapes do not fit, or a question has no available model.
        """
        device = self.network.classifier.weight.device
        available = None if available is None else available.to(device)
        return route_queries(self.network.margin_matrix(question_embeddings.to(device)), available)

    @torch.no_grad()
    def fit_new_model(
        self,
        correct: Tensor | Sequence[int],
        question_embeddings: Tensor,
        prior_precision: float | None = None,
    ) -> Tensor:
        """The vector of a model that was not there in training, with everything else fixed.

        Ours, not the paper's (which retrains); see :meth:`CorrectnessMF.fit_model`.

        Args:
            correct: its outcomes, 0/1 [Q].
            question_embeddings: of the same questions, [Q, D].
            prior_precision: how strongly it is drawn to the mean of the known models; None: by their variance.

        Returns:
            [d].

        Raises:
            ValueError: shapes do not fit, or an outcome that is not 0 or 1.
        """
        device = self.network.classifier.weight.device
        correct = torch.as_tensor(correct, device=device)
        return self.network.fit_model(correct, question_embeddings.to(device), prior_precision)
