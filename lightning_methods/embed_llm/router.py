"""Questions to model names, outside of Lightning: a small object that pickles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checks import check_shape, nearest
from .functional import route_queries
from .modules import CorrectnessMF

__all__ = ["Router"]

# texts, or embeddings [Q, D] as anything that torch.as_tensor takes
Questions = Any


class Router:
    """Sends questions to the language model that is most likely to be right.

    Needs torch alone, and transformers where questions are given as text. Pickles to the size of its weights: a text
    encoder that was loaded by name is loaded again where it is needed.

    Args:
        network: the trained factorisation; copied, and kept in eval mode on its device.
        model_names: the models' names; None numbers them.
        encoder: makes embeddings of texts: a function from a list of strings to [Q, D], or a dictionary with the
            ``name`` of a Hugging Face encoder and the options of :func:`~lightning_methods.text.encode.encode_texts`.
            None: questions have to come as embeddings.

    Raises:
        ValueError: the number of names is another, or a name occurs twice.

    Example:
        >>> router = Router(CorrectnessMF(3, embedding_dim=4, question_dim=8), ["small", "coder", "large"])
        >>> questions = torch.randn(5, 8)
        >>> len(router.route(questions)), router.route(questions, available=["coder"])[0]
        (5, 'coder')
    """

    def __init__(
        self,
        network: CorrectnessMF,
        model_names: Sequence[str] | None = None,
        encoder: Callable[[list[str]], Tensor] | dict[str, Any] | None = None,
    ) -> None:
        names = [f"model{m}" for m in range(network.num_models)] if not model_names else list(model_names)
        if len(names) != network.num_models:
            raise ValueError(f"model_names must have {network.num_models} names, got {len(names)}.")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"model_names must differ; {twice!r} occurs twice.")
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        self.model_names = names
        self.encoder = encoder
        self._loaded: tuple[nn.Module, Any] | None = None

    @classmethod
    def from_module(cls, module: Any, encoder: Callable[[list[str]], Tensor] | dict[str, Any] | None = None) -> Router:
        """Make a router of a trained :class:`EmbedLLM`.

        Args:
            module: the module; names of models and text encoder are those it was trained with.
            encoder: instead of that encoder.
        """
        return cls(module.network, module.model_names, encoder or module.question_encoder or None)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, encoder: Callable[[list[str]], Tensor] | dict[str, Any] | None = None
    ) -> Router:
        """Make a router of a checkpoint of :class:`EmbedLLM`, or of weights that the authors' code saved.

        Args:
            path: the file; nothing in it is run.
            encoder: instead of the encoder that the checkpoint names.

        Raises:
            ValueError: the file is neither.
        """
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        state = checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, dict) else {}
        state = {name.removeprefix("network."): value for name, value in state.items() if isinstance(value, Tensor)}
        P = state.get("model_embedding.weight", state.get("P.weight"))
        W = state.get("question_proj.weight", state.get("text_proj.weight"))
        if P is None or W is None:
            raise ValueError(f"{path} is no checkpoint of EmbedLLM: it has no model embeddings.")
        network = CorrectnessMF(len(P), P.shape[1], W.shape[1]).to(P.dtype)
        network.load_state_dict(state)
        return cls(network, checkpoint.get("model_names"), encoder or checkpoint.get("question_encoder") or None)

    # questions

    @property
    def question_dim(self) -> int:
        """Size of the question embeddings, D."""
        return self.network.question_dim

    def to(self, device: torch.device | str) -> Router:
        """Move to a device, and return the router."""
        self.network.to(device)
        return self

    def embed(self, questions: Questions) -> Tensor:
        """Embeddings of questions, [Q, D]: of texts by the encoder, of a tensor or an array itself.

        Raises:
            ValueError: texts without an encoder, or embeddings of another size.
        """
        weight = self.network.classifier.weight
        if isinstance(questions, str):
            questions = [questions]
        if isinstance(questions, Sequence) and len(questions) and isinstance(questions[0], str):
            if self.encoder is None:
                raise ValueError("questions as text need an encoder: Router(..., encoder=...).")
            questions = self._encode(list(questions))
        embeddings = torch.as_tensor(questions).to(weight)
        check_shape("questions", embeddings, "questions question_dim", question_dim=self.question_dim)
        return embeddings

    def _encode(self, texts: list[str]) -> Tensor:
        if not isinstance(self.encoder, dict):
            return self.encoder(texts)
        from ..text.encode import encode_texts

        options = dict(self.encoder)
        name = options.pop("name")
        if self._loaded is None:
            from ..text.models import load_model, load_tokenizer

            self._loaded = load_model(name, kind="encoder"), load_tokenizer(name)
        model, tokenizer = self._loaded
        return encode_texts(texts, model, tokenizer=tokenizer, **options)

    def _mask(self, available: Sequence[str] | Tensor | None) -> Tensor | None:
        if available is None:
            return None
        device = self.network.classifier.weight.device
        if isinstance(available, Tensor):
            return available.to(device)
        if isinstance(available, str):
            available = [available]
        for name in available:
            if name not in self.model_names:
                raise ValueError(f"available: there is no model {name!r}.{nearest(name, self.model_names)}")
        return torch.tensor([name in available for name in self.model_names], device=device)

    # answers

    @torch.no_grad()
    def scores(self, questions: Questions) -> Tensor:
        """Probability that each model is right on each question.

        Args:
            questions: texts, or embeddings [Q, D].

        Returns:
            [M, Q], in the order of ``model_names``.
        """
        return self.network.score_matrix(self.embed(questions))

    @torch.no_grad()
    def route(self, questions: Questions, available: Sequence[str] | Tensor | None = None) -> list[str]:
        """The model for each question.

        Args:
            questions: texts, or embeddings [Q, D].
            available: names of the models that may be chosen, or bool [M] or [M, Q]; None: all.

        Returns:
            Q names; of equally likely models the first.

        Raises:
            ValueError: an unknown name, a question without an available model, texts without an encoder, or embeddings
                of another size.
        """
        margins = self.network.margin_matrix(self.embed(questions))
        return [self.model_names[m] for m in route_queries(margins, self._mask(available)).tolist()]

    __call__ = route

    def with_model(self, name: str, correct: Sequence[int] | Tensor, questions: Questions) -> Router:
        """A router that knows one more model, from its outcomes on some questions.

        See :meth:`CorrectnessMF.fit_model`.

        Args:
            name: its name.
            correct: 1 where it was right, else 0, [Q].
            questions: texts, or embeddings [Q, D].

        Returns:
            A new router; the known models' scores do not change.

        Raises:
            ValueError: the name is taken, or shapes do not fit.
        """
        network = self.network
        known = network.model_embedding.weight
        embedding = network.fit_model(torch.as_tensor(correct, device=known.device), self.embed(questions))
        larger = CorrectnessMF(len(known) + 1, network.embedding_dim, network.question_dim, network.noise_std).to(known)
        state = network.state_dict()
        state["model_embedding.weight"] = torch.cat([known, embedding[None].to(known)])
        larger.load_state_dict(state)
        return type(self)(larger, [*self.model_names, name], self.encoder)

    def __getstate__(self) -> dict[str, Any]:
        """Leave a loaded text encoder out."""
        return {**self.__dict__, "_loaded": None}

    def __repr__(self) -> str:
        return f"Router({len(self.model_names)} models, questions of size {self.question_dim})"
