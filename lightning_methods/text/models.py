"""Language models and tokenizers by Hugging Face name or local folder, LoRA adapters, and dropout switched off."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..core.checks import check_choice, check_range

__all__ = ["add_lora", "disable_dropout", "load_model", "load_tokenizer"]

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModel",
    "masked": "AutoModelForMaskedLM",
    "image_text": "AutoModelForImageTextToText",
}


def _missing(what: str, name: str, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"no {what} {name!r}: it is neither a local folder with its files nor on the Hugging Face hub or in its cache "
        f"({str(error).splitlines()[0]})"
    )


def load_model(
    module_or_name: nn.Module | str,
    kind: Literal["causal", "seq2seq", "encoder", "masked", "image_text"] = "causal",
    dtype: torch.dtype | str | None = None,
    local_files_only: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """A transformers model by name or folder; a module that is already there passes through.

    Args:
        module_or_name: a Hugging Face name, a local folder of ``save_pretrained``, or the module itself.
        kind: which Auto class reads it: "causal" and "masked" have a language-model head, "encoder" has none.
        dtype: of the weights, e.g. "bfloat16"; None for float32, "auto" for that of the files.
        local_files_only: never ask the hub.
        **kwargs: handed on to ``from_pretrained``, e.g. ``attn_implementation="sdpa"``.

    Returns:
        The model, in eval mode if it was loaded here.

    Raises:
        ValueError: an unknown kind or dtype.
        TypeError: neither a module nor a string.
        FileNotFoundError: there is no such model; the message names it.
    """
    check_choice("kind", kind, tuple(AUTO_CLASSES))
    if isinstance(module_or_name, nn.Module):
        return module_or_name
    if not isinstance(module_or_name, str):
        raise TypeError(f"expected a module, a name or a folder, got {type(module_or_name).__name__}.")
    import transformers

    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype must name a torch dtype, e.g. 'bfloat16'; got {dtype!r}.")
        dtype = found
    loader = getattr(transformers, AUTO_CLASSES[kind])
    try:
        return loader.from_pretrained(
            module_or_name, dtype=dtype or torch.float32, local_files_only=local_files_only, **kwargs
        )
    except OSError as error:
        raise _missing("model", module_or_name, error) from error


def load_tokenizer(name: Any, local_files_only: bool = False, **kwargs: Any) -> Any:
    """A tokenizer by name or folder, with a padding token; a tokenizer that is already there passes through.

    Args:
        name: a Hugging Face name, a local folder, or a tokenizer.
        local_files_only: never ask the hub.
        **kwargs: handed on to ``from_pretrained``.

    Returns:
        The tokenizer. One without a padding token (GPT-2, Llama) gets its end-of-sequence token for it: padding is
        masked wherever this library pads.

    Raises:
        FileNotFoundError: there is no such tokenizer; the message names it.
    """
    tokenizer = name
    if isinstance(name, str):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local_files_only, **kwargs)
        except OSError as error:
            raise _missing("tokenizer", name, error) from error
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target_modules: str | list[str] = "all-linear",
) -> nn.Module:
    """Wrap a transformers model with low-rank adapters; only they take a gradient.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; from the package ``peft``.

    Args:
        model: a transformers model.
        rank: of the adapters, at least 1.
        alpha: scale; the update is multiplied by alpha / rank. None for 2 * rank.
        dropout: on the adapters' inputs.
        target_modules: names of the linear layers; "all-linear" for all but the output head.

    Returns:
        The ``peft.PeftModel``; right after the call it computes what ``model`` did.

    Raises:
        ModuleNotFoundError: ``peft`` is not installed.
        ValueError: rank below 1.
    """
    check_range("rank", rank, 1)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "LoRA needs the package peft: pip install 'lightning-methods[text]'.", name="peft"
        ) from error
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank if alpha is None else alpha, lora_dropout=dropout, target_modules=target_modules
    )
    return get_peft_model(model, config)


def disable_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability of a model to zero, in place: of dropout modules and of those that keep a number.

    Attention layers of many transformers models apply a functional dropout with a rate that they hold as a plain
    attribute (``attention_dropout``); these are set as well, and so are layer drop and stochastic depth.

    Args:
        model: any module.

    Returns:
        The same module.

    Example:
        >>> layer = disable_dropout(torch.nn.TransformerEncoderLayer(8, 2, dropout=0.5))
        >>> layer.dropout.p, layer.self_attn.dropout
        (0.0, 0.0)
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
