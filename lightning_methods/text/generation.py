"""Text from a language model, in batches with the key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..core.checks import check_range
from ..core.modes import evaluating
from .prompts import chat_prompt, pad_batch

__all__ = ["TextGenerator", "generate_text"]


@runtime_checkable
class TextGenerator(Protocol):
    """Anything that answers texts with texts, e.g. a wrapper around an inference server."""

    def generate(self, prompts: list[str]) -> list[str]:
        """One continuation for each prompt, without the prompt."""


def generate_text(
    model: nn.Module | TextGenerator,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    batch_size: int = 8,
    max_new_tokens: int = 256,
    chat_template: bool = False,
    system: str | None = None,
    primer: str = "",
    **kwargs: Any,
) -> list[str]:
    """Continue prompts with a language model; greedy unless the keywords say otherwise.

    Prompts are sorted by length, longest first, so that a batch has little padding and one that does not fit into
    memory fails at once; they are padded on the left, and the answers come in the order of the prompts.

    Args:
        model: a causal transformers model, or an object with ``generate(list[str]) -> list[str]``; the latter gets the
            texts below and none of the keywords.
        tokenizer: its tokenizer; for an object without one, None (then the prompts, with the primer, are handed on).
        prompts: texts; what the user says where ``chat_template`` is True.
        batch_size: prompts at a time.
        max_new_tokens: longest answer; less where the model's positions end before.
        chat_template: put each prompt into the tokenizer's conversation template.
        system: the system line of the conversation.
        primer: beginning of the answer; it is not part of what is returned.
        **kwargs: handed on to ``model.generate``, e.g. ``repetition_penalty=1.1`` or ``do_sample=True``.

    Returns:
        The continuations without special tokens, one for each prompt. An answer ends at the end-of-sequence token.

    Raises:
        ValueError: a number below 1, a prompt that leaves the model no position for an answer, or no chat template.
    """
    check_range("batch_size", batch_size, 1)
    check_range("max_new_tokens", max_new_tokens, 1)
    if chat_template and tokenizer is not None:
        texts = [chat_prompt(tokenizer, prompt, system, primer) for prompt in prompts]
    else:
        texts = [prompt + primer for prompt in prompts]
    if not isinstance(model, nn.Module):
        answers = list(model.generate(texts))
        if len(answers) != len(texts):
            raise ValueError(f"the generator gave {len(answers)} answers to {len(texts)} prompts.")
        return answers
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=not chat_template, return_attention_mask=False)["input_ids"]
    encoded = [_open(tokenizer, ids, chat_template) for ids in encoded]
    if not all(encoded):
        raise ValueError(f"prompt {next(i for i, ids in enumerate(encoded) if not ids)} has no token.")
    order = sorted(range(len(texts)), key=lambda i: -len(encoded[i]))
    answers = [""] * len(texts)
    with evaluating(model):
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            new = _generate(model, tokenizer, [encoded[i] for i in rows], max_new_tokens, kwargs)
            for i, text in zip(rows, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
                answers[i] = text
    return answers


def _open(tokenizer: Any, ids: list[int], chat_template: bool) -> list[int]:
    """Without the end-of-sequence token that some tokenizers put after every text: the answer goes there."""
    end = tokenizer.eos_token_id
    if not chat_template and len(ids) > 1 and end is not None and ids[-1] == end:
        return ids[:-1]
    return ids


def _generate(
    model: nn.Module, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, kwargs: dict[str, Any]
) -> torch.Tensor:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    device = next(model.parameters()).device
    ids = pad_batch(rows, "left", pad).to(device)
    mask = pad_batch([[1] * len(row) for row in rows], "left", 0).to(device)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and ids.shape[1] >= positions:
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens leaves no room for an answer: the model has {positions} positions."
        )
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - ids.shape[1])
    # The model's own generation settings would add sampling or another length; the caller's keywords decide alone.
    options = {"do_sample": False, "use_cache": True, "pad_token_id": pad, "max_new_tokens": room, **kwargs}
    if not options["do_sample"]:
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    out = model.generate(input_ids=ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :]
