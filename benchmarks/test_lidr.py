"""Answers' log-probabilities without logits of the prompt, and batched generation, each against the plain form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_methods.lidr.module import response_log_probs
from lightning_methods.text import generate_text, tiny_causal_lm, word_tokenizer


def plain(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """All logits in float32, then the answers' part of them."""
    log_probs = model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(dim=-1)[:, :-1]
    targets = labels[:, 1:]
    picked = log_probs.gather(2, targets.clamp_min(0)[..., None])[..., 0]
    return (picked * (targets != -100)).sum(dim=1)


def ours(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """The answers' positions picked before the head, the softmax in chunks."""
    return response_log_probs(model, ids, mask, labels, chunk_size=256)[0]


@pytest.mark.shapes(vocabulary_8k={"rows": 8, "tokens": 128, "answer": 48, "vocab": 8000},
                    vocabulary_32k={"rows": 8, "tokens": 128, "answer": 48, "vocab": 32000})  # fmt: skip
@pytest.mark.parametrize("form", [ours, plain])
def test_log_probabilities(measure, shape: dict[str, int], form: Callable, device: torch.device):
    model = tiny_causal_lm(shape["vocab"], width=64, layers=1, positions=shape["tokens"]).to(device)
    ids = torch.randint(7, shape["vocab"], (shape["rows"], shape["tokens"]), device=device)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : -shape["answer"]] = -100
    torch.testing.assert_close(ours(model, ids, mask, labels), plain(model, ids, mask, labels), rtol=1e-4, atol=1e-3)

    def step() -> None:
        model.zero_grad()
        form(model, ids, mask, labels).sum().backward()

    measure(step)


WORDS = [f"w{i}" for i in range(100)]


@pytest.mark.shapes(prompts_32={"prompts": 32, "new": 24})
@pytest.mark.parametrize("form", [32, 1], ids=["ours", "plain"])
def test_generation(measure, shape: dict[str, int], form: int, device: torch.device):
    tokenizer = word_tokenizer(WORDS)
    model = tiny_causal_lm(tokenizer, width=64, positions=96, eos_token_id=None, initializer_range=0.3).to(device)
    prompts = [" ".join(WORDS[i : i + 1 + i % 16]) for i in range(shape["prompts"])]
    measure(lambda: generate_text(model, tokenizer, prompts, batch_size=form, max_new_tokens=shape["new"]))
