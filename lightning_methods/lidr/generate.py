"""The model's own answers in all languages and its own translations of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..core.checks import check_range
from ..core.distributed import rank, world_size
from ..text.generation import TextGenerator, generate_text
from ..text.models import load_model, load_tokenizer
from .preference import TRANSLATION_PRIMER, ParallelRecord, extract_translation, translation_prompt

__all__ = ["ResponseGenerator", "sharded"]

SYSTEM = "You are a helpful assistant."


def sharded(answer: Callable[[list[str]], list[str]], texts: Sequence[str]) -> list[str]:
    """Answer texts with all processes of ``torch.distributed``, each its share; all of them get all answers.

    Args:
        answer: gives one answer for each text.
        texts: the texts, the same on all ranks.
    """
    ranks = world_size()
    if ranks == 1:
        return answer(list(texts))
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, answer(list(texts[rank() :: ranks])))
    answers = [""] * len(texts)
    for r, part in enumerate(parts):
        answers[r::ranks] = part
    return answers


class ResponseGenerator:
    """Answers prompts and translates texts with one and the same model, greedily.

    With several processes of ``torch.distributed`` each takes its share of the texts, and all get all answers.

    Args:
        model: a causal transformers model, its name or folder, or any object with
            ``generate(list[str]) -> list[str]``, e.g. a wrapper around an inference server. The latter gets the texts
            in the tokenizer's template, or as they are without a tokenizer, and has settings of its own.
        tokenizer: the model's, or its name or folder; None takes that of the model's name.
        chat_template: put prompts into the tokenizer's conversation template.
        max_new_tokens: longest answer.
        repetition_penalty: of answers; translations have none.
        batch_size: prompts at a time.
        max_translation_tokens: longest translation: one that is cut off lacks its closing tag and is dropped.
        system: system line of the conversation; None for no such line.
        translation_prompt: the request, ``(text, language) -> str``; the answer begins with ``<translated>`` and ends
            with ``</translated>``.
        dtype: of the weights of a model that is given by name.
        device: where a model that is given by name goes; None for a GPU if there is one.
        **options: handed on to ``model.generate``.

    Example:
        >>> class Parrot:
        ...     def generate(self, prompts):
        ...         return ["Hallo</translated>" if "<sentence>" in prompt else "Hello" for prompt in prompts]
        >>> generator = ResponseGenerator(Parrot(), None)
        >>> generator.respond(["Say hello."]), generator.translate(["Hello"], "de")
        (['Hello'], ['Hallo'])
    """

    def __init__(
        self,
        model: nn.Module | TextGenerator | str,
        tokenizer: Any = None,
        chat_template: bool = True,
        max_new_tokens: int = 2400,
        repetition_penalty: float = 1.1,
        batch_size: int = 16,
        max_translation_tokens: int = 4096,
        system: str | None = SYSTEM,
        translation_prompt: Callable[[str, str], str] = translation_prompt,
        dtype: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        check_range("repetition_penalty", repetition_penalty, 0, low_open=True)
        for name, value in (("max_new_tokens", max_new_tokens), ("max_translation_tokens", max_translation_tokens)):
            check_range(name, value, 1)
        check_range("batch_size", batch_size, 1)
        if tokenizer is None and isinstance(model, str):
            tokenizer = model
        self.tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None
        self.model = load_model(model, dtype=dtype).to(device or _device()) if isinstance(model, str) else model
        if isinstance(self.model, nn.Module) and self.tokenizer is None:
            raise ValueError("a model needs its tokenizer: give one.")
        self.chat_template = chat_template
        self.max_new_tokens = max_new_tokens
        self.repetition_penalty = repetition_penalty
        self.batch_size = batch_size
        self.max_translation_tokens = max_translation_tokens
        self.system = system
        self.translation_prompt = translation_prompt
        self.options = options

    def _generate(self, prompts: Sequence[str], **options: Any) -> list[str]:
        shared = {"batch_size": self.batch_size, "chat_template": self.chat_template, "system": self.system}
        return sharded(
            lambda mine: generate_text(self.model, self.tokenizer, mine, **shared, **self.options, **options), prompts
        )

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """:meth:`respond`, under the name that every generator has."""
        return self.respond(prompts)

    def respond(self, prompts: Sequence[str]) -> list[str]:
        """One answer to each prompt.

        Args:
            prompts: what the user says.
        """
        return self._generate(prompts, max_new_tokens=self.max_new_tokens, repetition_penalty=self.repetition_penalty)

    def translate(self, texts: Sequence[str], language: str) -> list[str | None]:
        """The model's own translations; None where the answer is none, which only its closing tag tells.

        Args:
            texts: what to translate.
            language: code or name of the target language.
        """
        requests = [self.translation_prompt(text, language) for text in texts]
        answers = self._generate(requests, max_new_tokens=self.max_translation_tokens, primer=TRANSLATION_PRIMER)
        return [extract_translation(answer) for answer in answers]

    def build_records(
        self,
        prompts: Mapping[str, Sequence[str]],
        ids: Sequence[str],
        dominant: str = "en",
        prompt_wrapper: Callable[[str, str], str] | None = None,
    ) -> list[ParallelRecord]:
        """Answer every prompt in every language and translate between the dominant language and each of the others.

        Args:
            prompts: parallel prompts by language.
            ids: of the prompts.
            dominant: code of the dominant language.
            prompt_wrapper: what is made of a prompt before it is asked, ``(prompt, language) -> str``; pairs keep the
                wrapped prompt, as it is what was answered. See :func:`~lightning_methods.lidr.language_prompt`.

        Returns:
            One record for each id.

        Raises:
            ValueError: the languages have different numbers of prompts, or the dominant language has none.
        """
        asked = check_parallel(prompts, ids, dominant)
        if prompt_wrapper is not None:
            asked = {code: [prompt_wrapper(text, code) for text in texts] for code, texts in asked.items()}
        responses = {code: self.respond(texts) for code, texts in asked.items()}
        translations: dict[str, list[str | None]] = {}
        for code in asked:
            if code != dominant:
                translations[f"{dominant}->{code}"] = self.translate(responses[dominant], code)
                translations[f"{code}->{dominant}"] = self.translate(responses[code], dominant)
        return assemble(asked, ids, responses, translations)


def _device() -> str:
    import os

    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"


def check_parallel(prompts: Mapping[str, Sequence[str]], ids: Sequence[str], dominant: str) -> dict[str, list[str]]:
    """The prompts as lists, once it is clear that they are parallel.

    Raises:
        ValueError: they are not.
    """
    if dominant not in prompts:
        raise ValueError(f"there are no prompts in the dominant language {dominant!r}; there are {', '.join(prompts)}.")
    wrong = {code: len(texts) for code, texts in prompts.items() if len(texts) != len(ids)}
    if wrong:
        raise ValueError(f"every language needs one prompt for each of the {len(ids)} ids, got {wrong}.")
    return {code: list(texts) for code, texts in prompts.items()}


def assemble(
    prompts: Mapping[str, Sequence[str]],
    ids: Sequence[str],
    responses: Mapping[str, Sequence[str]],
    translations: Mapping[str, Sequence[str | None]],
) -> list[ParallelRecord]:
    """Columns by language to records by prompt."""
    return [
        ParallelRecord(
            str(number),
            {code: texts[i] for code, texts in prompts.items()},
            {code: texts[i] for code, texts in responses.items()},
            {key: texts[i] for key, texts in translations.items()},
        )
        for i, number in enumerate(ids)
    ]
