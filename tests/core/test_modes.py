from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.core.modes import evaluating
from lightning_methods.text import generate_text, tiny_causal_lm, word_tokenizer


def test_every_part_gets_its_own_mode_back():
    first, second = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval()), nn.Dropout().eval()

    def interrupted() -> None:
        with evaluating(first, second):
            assert not any(part.training for part in (*first.modules(), *second.modules()))
            assert not torch.is_grad_enabled()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert [part.training for part in (*first.modules(), *second.modules())] == [True, True, False, False]
    assert torch.is_grad_enabled()


def test_gradients_stay_as_they_are_on_request():
    with evaluating(nn.Dropout(), grad=True):
        assert torch.is_grad_enabled()
    with torch.no_grad(), evaluating(nn.Dropout(), grad=True):
        assert not torch.is_grad_enabled()


def test_generation_does_not_wake_frozen_parts():
    tokenizer = word_tokenizer(["a", "b"])
    model = tiny_causal_lm(tokenizer).train()
    model.transformer.h[0].eval()
    generate_text(model, tokenizer, ["a b"], max_new_tokens=2)
    assert model.training
    assert not model.transformer.h[0].training
