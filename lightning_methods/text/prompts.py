"""Prompts and responses as token ids: chat templates, the span of the response, truncation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.checks import check_choice, check_range

__all__ = ["chat_prompt", "chat_response", "cut_pair", "encode_pair", "pad_batch", "response_tokens", "truncate_pair"]

IGNORE_INDEX = -100


def _messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def chat_prompt(tokenizer: Any, prompt: str, system: str | None = None, primer: str = "") -> str:
    """The text that a chat model continues with its answer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        prompt: what the user says.
        system: the system line, if there is one.
        primer: beginning of the answer, put into the model's mouth.

    Returns:
        The conversation up to the answer, special tokens included: encode it with ``add_special_tokens=False``.

    Raises:
        ValueError: the tokenizer has no chat template.

    Example:
        >>> from lightning_methods.text import word_tokenizer
        >>> chat_prompt(word_tokenizer(["hello"]), "hello")
        '[BOS] user : hello [EOS] [BOS] assistant : '
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the tokenizer has no chat template: take that of an instruction-tuned model, or chat_template=False."
        )
    text = tokenizer.apply_chat_template(_messages(prompt, system), tokenize=False, add_generation_prompt=True)
    return text + primer


def chat_response(tokenizer: Any, prompt: str, response: str, system: str | None = None) -> tuple[str, str]:
    """A prompt and its response as the chat template writes them; the end-of-turn token belongs to the response.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        prompt: what the user says.
        response: the answer.
        system: the system line, if there is one.

    Returns:
        ``(prompt, response)``: the text of :func:`chat_prompt`, and what follows it up to the end of the turn.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    start = chat_prompt(tokenizer, prompt, system)
    conversation = [*_messages(prompt, system), {"role": "assistant", "content": response}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    if text.startswith(start):
        return start, text[len(start) :].rstrip()
    # A template that writes finished answers in another way (thinking blocks): the answer and the end of the turn.
    return start, response + (tokenizer.eos_token or "")


def truncate_pair(
    prompt: int, response: int, max_length: int | None, max_prompt_length: int | None = None
) -> tuple[int, int]:
    """How many tokens of a prompt (its last ones) and of a response (its first ones) are kept.

    A pair that fits is kept whole. Otherwise the prompt gives way first, down to ``max_prompt_length``, then the
    response.

    Args:
        prompt: tokens of the prompt.
        response: tokens of the response; of several that share the prompt, the longest.
        max_length: of both together; None for no limit.
        max_prompt_length: of the prompt, whatever the response's length. None: half of ``max_length`` are always left
            to the prompt.

    Returns:
        ``(prompt, response)``.

    Example:
        >>> truncate_pair(30, 10, max_length=32)
        (22, 10)
        >>> truncate_pair(30, 30, max_length=32)
        (16, 16)
        >>> truncate_pair(30, 30, max_length=32, max_prompt_length=8)
        (8, 24)
    """
    if max_prompt_length is not None:
        prompt = min(prompt, max_prompt_length)
    if max_length is None or prompt + response <= max_length:
        return prompt, response
    least = max_length // 2 if max_prompt_length is None else max_prompt_length
    prompt = min(prompt, max(least, max_length - response), max_length - 1)
    return prompt, min(response, max_length - prompt)


def response_tokens(
    tokenizer: Any, prompt: str, response: str, *, add_special_tokens: bool = True, append_eos: bool = True
) -> tuple[list[int], int]:
    """Token ids of prompt and response encoded as one string, and where the response begins.

    Encoded apart, the tokens at the border would not be those that the model sees when it answers. A token that holds
    the end of the prompt and the beginning of the response counts as response.

    Args:
        tokenizer: a transformers tokenizer; a fast one, which knows offsets, or else a slow one.
        prompt: the prompt as the model sees it.
        response: what follows.
        add_special_tokens: let the tokenizer add its own; False for the text of a chat template.
        append_eos: end with the end-of-sequence token if the last token is no special token.

    Returns:
        ``(ids, start)``: the response is ``ids[start:]``.
    """
    options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "return_attention_mask": False}
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(prompt + response, return_offsets_mapping=True, **options)
        ids = list(encoded["input_ids"])
        # Added special tokens have the empty span (0, 0): those before the first token of the text are the prompt's.
        ends = [end for _, end in encoded["offset_mapping"]]
        start = next((i for i, end in enumerate(ends) if end > len(prompt)), len(ids))
        while start and ends[start - 1] == 0 and any(ends[:start]):  # empty response with an added end token
            start -= 1
    else:
        ids = list(tokenizer(prompt + response, **options)["input_ids"])
        alone = list(tokenizer(prompt, **options)["input_ids"])
        start = next((i for i, (a, b) in enumerate(zip(ids, alone, strict=False)) if a != b), min(len(ids), len(alone)))
    if append_eos and tokenizer.eos_token_id is not None and (start == len(ids) or ids[-1] not in _endings(tokenizer)):
        ids.append(tokenizer.eos_token_id)
    return ids, start


def _endings(tokenizer: Any) -> set[int]:
    """The special tokens that end a text or a turn."""
    others = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.mask_token_id)
    return {*(set(tokenizer.all_special_ids) - set(others)), tokenizer.eos_token_id}


def cut_pair(tokenizer: Any, ids: Sequence[int], start: int, keep: tuple[int, int]) -> tuple[list[int], list[int]]:
    """The last tokens of a prompt, with its beginning-of-sequence token, and the first of its response, with labels.

    Args:
        tokenizer: tells the beginning-of-sequence token.
        ids: prompt and response.
        start: where the response begins.
        keep: number of tokens of both that are kept, see :func:`truncate_pair`.

    Returns:
        ``(input_ids, labels)``: labels are -100 on the prompt.
    """
    kept = list(ids[start - keep[0] : start])
    if kept and len(kept) < start and ids[0] == tokenizer.bos_token_id:
        kept[0] = ids[0]
    response = list(ids[start : start + keep[1]])
    return kept + response, [IGNORE_INDEX] * len(kept) + response


def encode_pair(
    tokenizer: Any,
    prompt: str,
    response: str,
    *,
    mode: Literal["concat", "joint"] = "concat",
    max_length: int | None = None,
    max_prompt_length: int | None = None,
    truncate: tuple[Literal["left", "right"], Literal["left", "right"]] = ("left", "right"),
    add_special_tokens: bool = True,
    append_eos: bool = True,
) -> tuple[list[int], list[int]]:
    """A prompt and its response as token ids with labels: -100 on the prompt, the token on the response.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: the prompt as the model sees it.
        response: what follows.
        mode: "joint" encodes one string and finds the response in it (chat templates, see :func:`response_tokens`);
            "concat" encodes both apart and joins the ids (templates without special structure).
        max_length: longest result, see :func:`truncate_pair`.
        max_prompt_length: longest prompt.
        truncate: the side on which a long prompt and a long response lose tokens.
        add_special_tokens: let the tokenizer add its own, before the prompt and after the response.
        append_eos: end with the end-of-sequence token (before truncation).

    Returns:
        ``(input_ids, labels)``, of equal length.

    Raises:
        ValueError: an unknown mode or side, or a limit below 1.

    Example:
        >>> from lightning_methods.text import word_tokenizer
        >>> encode_pair(word_tokenizer(["what", "this"]), "what ", "this")
        ([7, 8, 3], [-100, 8, 3])
    """
    check_choice("mode", mode, ("concat", "joint"))
    for side in truncate:
        check_choice("truncate", side, ("left", "right"))
    for name, limit in (("max_length", max_length), ("max_prompt_length", max_prompt_length)):
        if limit is not None:
            check_range(name, limit, 1)
    options = {"add_special_tokens": add_special_tokens, "append_eos": append_eos}
    if mode == "joint":
        ids, start = response_tokens(tokenizer, prompt, response, **options)
        before, after = ids[:start], ids[start:]
    else:
        before = _without_end(tokenizer, tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"])
        after = list(tokenizer(response, add_special_tokens=False)["input_ids"])
        if append_eos and tokenizer.eos_token_id is not None and after[-1:] != [tokenizer.eos_token_id]:
            after.append(tokenizer.eos_token_id)
    keep = truncate_pair(len(before), len(after), max_length, max_prompt_length)
    if truncate == ("left", "right"):
        return cut_pair(tokenizer, before + after, len(before), keep)
    cut = {"left": lambda x, n: x[len(x) - n :], "right": lambda x, n: x[:n]}
    ids = cut[truncate[0]](before, keep[0]) + cut[truncate[1]](after, keep[1])
    return ids, [IGNORE_INDEX] * keep[0] + ids[keep[0] :]


def _without_end(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Drop the end tokens that a tokenizer puts after every text: the response goes there."""
    ids = list(ids)
    while ids and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        ids.pop()
    return ids


def pad_batch(rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "right", pad_id: int = 0) -> Tensor:
    """Rows of different lengths as one tensor.

    Args:
        rows: token ids, labels (``pad_id=-100``) or ones for an attention mask (``pad_id=0``).
        side: where the padding goes; generation needs "left".
        pad_id: what it is filled with.

    Returns:
        int64 [B, longest].

    Raises:
        ValueError: there is no row, or an unknown side.

    Example:
        >>> pad_batch([[1, 2, 3], [4]], side="left")
        tensor([[1, 2, 3],
                [0, 0, 4]])
    """
    check_choice("side", side, ("left", "right"))
    if not len(rows):
        raise ValueError("there must be at least one row to pad.")
    longest = max(map(len, rows))
    fill = [[pad_id] * (longest - len(row)) for row in rows]
    joined = [[*f, *r] if side == "left" else [*r, *f] for f, r in zip(fill, rows, strict=True)]
    return torch.tensor(joined, dtype=torch.long)
