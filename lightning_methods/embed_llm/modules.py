"""The factorisation of the table of outcomes."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..core.checks import check_labels, check_range, check_shape
from .functional import correctness_logits, correctness_margin_matrix, fit_model_embedding

__all__ = ["CorrectnessMF"]

# The authors' names; theirs also holds the frozen question embeddings as `Q.weight`.
_PUBLISHED = {"P.": "model_embedding.", "text_proj.": "question_proj."}


class CorrectnessMF(nn.Module):
    """Whether a model is right on a question, from a learned vector per model and the question's text embedding.

    The encoders of the paper are nothing more than this: a table of vectors for the models, a linear map for the
    questions. There is no bias per model or question, no normalisation and no non-linearity. ``load_state_dict`` also
    takes the weights that the authors' code saves.

    Args:
        num_models: M, number of models.
        embedding_dim: d, size of a model's vector.
        question_dim: D, size of the question embeddings.
        noise_std: deviation alpha of the Gaussian noise that training adds to the question embeddings, before the
            projection. 0.05 is for embeddings of norm 1 in 768 dimensions (where the noise is longer than the
            embedding: its norm is 1.39); for others scale it like the norm over the root of D.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> network = CorrectnessMF(num_models=3, embedding_dim=4, question_dim=8).eval()
        >>> network(torch.tensor([0, 2]), torch.randn(2, 8)).shape, network.score_matrix(torch.randn(5, 8)).shape
        (torch.Size([2, 2]), torch.Size([3, 5]))
    """

    def __init__(
        self, num_models: int, embedding_dim: int = 232, question_dim: int = 768, noise_std: float = 0.05
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_models", num_models),
            ("embedding_dim", embedding_dim),
            ("question_dim", question_dim),
        ):
            check_range(name, value, 1)
        check_range("noise_std", noise_std, 0)
        self.num_models = num_models
        self.embedding_dim = embedding_dim
        self.question_dim = question_dim
        self.noise_std = noise_std
        self.model_embedding = nn.Embedding(num_models, embedding_dim)
        self.question_proj = nn.Linear(question_dim, embedding_dim)
        self.classifier = nn.Linear(embedding_dim, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights under our names or under those of the authors' code.

        Args:
            state_dict: the weights; the authors' table of question embeddings (``Q.weight``) is left out.
            strict: whether the names have to fit exactly.
            assign: as in torch.
        """
        if "P.weight" in state_dict:
            renamed = {}
            for name, value in state_dict.items():
                old = next((old for old in _PUBLISHED if name.startswith(old)), None)
                if name != "Q.weight":
                    renamed[name if old is None else _PUBLISHED[old] + name.removeprefix(old)] = value
            state_dict = renamed
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _check_questions(self, question_embeddings: Tensor, rows: str) -> None:
        check_shape("question_embeddings", question_embeddings, f"{rows} question_dim", question_dim=self.question_dim)

    def project(self, question_embeddings: Float[Tensor, "questions dim"]) -> Float[Tensor, "questions d"]:
        """Questions in the space of the models, ``W x + b`` without noise, [Q, D] -> [Q, d]."""
        self._check_questions(question_embeddings, "questions")
        return self.question_proj(question_embeddings.to(self.question_proj.weight.dtype))

    def forward(
        self, model_ids: Int[Tensor, " batch"], question_embeddings: Float[Tensor, "batch dim"]
    ) -> Float[Tensor, "batch two"]:
        """Logits of "wrong" and "right"; with noise on the questions in training mode only.

        Args:
            model_ids: int [B] in 0..M-1.
            question_embeddings: float [B, D].

        Returns:
            [B, 2].

        Raises:
            ValueError: shapes do not fit, or a model is out of range.
        """
        self._check_questions(question_embeddings, "batch")
        check_labels("model_ids", model_ids, self.num_models, batch=len(question_embeddings))
        x = question_embeddings.to(self.question_proj.weight.dtype)
        if self.training and self.noise_std > 0:
            x = x + self.noise_std * torch.randn_like(x)  # never in place: x is the data
        return correctness_logits(
            self.model_embedding(model_ids), self.question_proj(x), self.classifier.weight, self.classifier.bias
        )

    def margin_matrix(self, question_embeddings: Float[Tensor, "questions dim"]) -> Float[Tensor, "models questions"]:
        """``logits_1 - logits_0`` of every model on every question, without noise in any mode, [Q, D] -> [M, Q]."""
        return correctness_margin_matrix(
            self.model_embedding.weight,
            self.project(question_embeddings),
            self.classifier.weight,
            self.classifier.bias,
        )

    def score_matrix(self, question_embeddings: Float[Tensor, "questions dim"]) -> Float[Tensor, "models questions"]:
        """Probability that each model is right on each question, without noise in any mode, [Q, D] -> [M, Q]."""
        return self.margin_matrix(question_embeddings).sigmoid()

    def score_directions(self) -> Float[Tensor, "models dim"]:
        """What each model's logit is linear in, ``(P * (C_1 - C_0)) W``, [M, D].

        Ours: the vectors themselves are known up to what the decoder undoes, and dimensions that no score depends on
        keep the noise they started from. These directions hold what the outcomes tell and nothing else, so they are
        the better picture of who resembles whom, and may be compared between runs on the same question embeddings.
        """
        u = self.classifier.weight[1] - self.classifier.weight[0]
        return (self.model_embedding.weight * u) @ self.question_proj.weight

    @torch.no_grad()
    def fit_model(
        self,
        correct: Tensor,
        question_embeddings: Float[Tensor, "questions dim"],
        prior_precision: float | None = None,
    ) -> Float[Tensor, " d"]:
        """The vector of a model that was not there in training, with everything else fixed.

        Ours, not the paper's, which trains anew. A convex problem with one solution (:func:`fit_model_embedding`); the
        known models' mean and variance are the prior.

        Args:
            correct: its outcomes, 0/1 [Q].
            question_embeddings: of the same questions, [Q, D].
            prior_precision: how strongly it is drawn to the mean of the known models; None: one over their variance.

        Returns:
            [d].

        Raises:
            ValueError: shapes do not fit, or an outcome that is not 0 or 1.
        """
        known = self.model_embedding.weight.detach()
        if prior_precision is None:
            spread = float(known.float().var(dim=0).mean()) if len(known) > 1 else 1.0
            prior_precision = 1 / max(spread, 1e-6)
        questions = self.project(question_embeddings)
        decoder = self.classifier.weight, self.classifier.bias
        return fit_model_embedding(correct, questions, *decoder, known.mean(dim=0), prior_precision)
