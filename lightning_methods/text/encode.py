"""Texts to vectors, once: any Hugging Face encoder, pooled, with a cache on disk."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.checks import check_choice, check_range
from ..core.io import cached_tensors
from ..core.modes import evaluating
from .pooling import POOLINGS, pool_hidden

__all__ = ["encode_texts"]


def _digest(texts: Sequence[str], options: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]


@torch.no_grad()
def encode_texts(
    texts: Sequence[str],
    model: str | Path | nn.Module,
    *,
    tokenizer: Any = None,
    pooling: Literal["first", "last", "mean"] = "mean",
    normalize: bool = True,
    batch_size: int = 64,
    max_length: int | None = None,
    device: torch.device | str | None = None,
    cache: str | Path | None = None,
) -> Tensor:
    """Embed texts with a frozen encoder: last hidden state, pooled over the real tokens.

    ``sentence-transformers/all-mpnet-base-v2`` and its kin are ``pooling="mean"``, ``normalize=True``; its published
    maximum is 384 tokens.

    Args:
        texts: N strings.
        model: a name or a folder for ``transformers.AutoModel``, or a module that is called with ``input_ids`` and
            ``attention_mask`` and returns an object with ``last_hidden_state`` [B, T, D]. A module is put into eval
            mode and back.
        tokenizer: a Hugging Face tokenizer; None takes that of ``model``'s name.
        pooling: "mean", "first" or "last" real token.
        normalize: scale to norm 1.
        batch_size: texts at a time; texts of similar length go together.
        max_length: tokens at most; None takes the tokenizer's own maximum.
        device: where to compute; None is the module's own, and for a name a GPU if there is one.
        cache: folder for the result. The file's name holds a digest of the texts, the encoder's name and the options,
            so another input is another file; weights that change under one name are not noticed.

    Returns:
        float32 [N, D] on the CPU, in the order of the texts.

    Raises:
        ValueError: an option is out of range, no text, a module without a tokenizer, or a cache for a module that has
            no name.
    """
    check_choice("pooling", pooling, [name for name in POOLINGS if name != "source_token"])
    check_range("batch_size", batch_size, 1)
    if max_length is not None:
        check_range("max_length", max_length, 1)
    if isinstance(texts, str) or not texts:
        raise ValueError("texts must be a list of at least one string.")
    if isinstance(model, nn.Module):
        if tokenizer is None:
            raise ValueError("a model that is given as a module needs its tokenizer.")
        if cache is not None:
            raise ValueError("cache needs the model by name or folder: a module does not say what it is.")
        return _encode(texts, model, tokenizer, pooling, normalize, batch_size, max_length, device)

    name = str(model)

    def compute() -> dict[str, Tensor]:
        from .models import load_model, load_tokenizer

        network = load_model(name, kind="encoder")
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        words = load_tokenizer(name) if tokenizer is None else tokenizer
        return {"embeddings": _encode(texts, network, words, pooling, normalize, batch_size, max_length, place)}

    if cache is None:
        return compute()["embeddings"]
    options = {"model": name, "pooling": pooling, "normalize": normalize, "max_length": max_length}
    readable = re.sub(r"[^\w.-]+", "_", name.rstrip("/").rsplit("/", 1)[-1])
    return cached_tensors(Path(cache) / f"{readable}-{_digest(texts, options)}.safetensors", compute)["embeddings"]


def _encode(
    texts: Sequence[str],
    model: nn.Module,
    tokenizer: Any,
    pooling: str,
    normalize: bool,
    batch_size: int,
    max_length: int | None,
    device: torch.device | str | None,
) -> Tensor:
    limit = max_length or tokenizer.model_max_length
    truncate = {"truncation": True, "max_length": limit} if limit < 10**6 else {}  # no maximum is a huge number
    if device is not None:
        model.to(device)
    place = next(iter(model.parameters())).device
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    parts = []
    with evaluating(model):
        for start in range(0, len(texts), batch_size):
            chunk = [texts[i] for i in longest_first[start : start + batch_size]]
            tokens = tokenizer(chunk, padding=True, return_tensors="pt", **truncate)
            ids, mask = tokens["input_ids"].to(place), tokens["attention_mask"].to(place)
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            pooled = pool_hidden(hidden, mask, pooling).float()
            parts.append((F.normalize(pooled, dim=-1) if normalize else pooled).cpu())
    embeddings = torch.cat(parts)
    result = torch.empty_like(embeddings)
    result[torch.tensor(longest_first)] = embeddings
    return result
