from __future__ import annotations

import os

import pytest
import torch

from lightning_methods.text import encode_texts, load_model, load_tokenizer, save_tiny
from lightning_methods.text import models as text_models

TEXTS = ["a b c d", "e", "f g", "a a a a a a h", "b"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("encoder"), "encoder", width=16)


def alone(folder, text, pooling):
    """One text without padding, by hand."""
    model, tokenizer = load_model(folder, "encoder"), load_tokenizer(folder)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        hidden = model(input_ids=ids).last_hidden_state[0]
    return {"mean": hidden.mean(dim=0), "first": hidden[0], "last": hidden[-1]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_batches_are_the_texts_one_by_one(folder, pooling):
    found = encode_texts(TEXTS, folder, pooling=pooling, normalize=False, batch_size=2)
    expected = torch.stack([alone(folder, text, pooling) for text in TEXTS])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    unit = encode_texts(TEXTS, folder, pooling=pooling, batch_size=5)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(expected), rtol=1e-4, atol=1e-5)


def test_a_module_keeps_its_mode_and_takes_no_gradient(folder):
    model = load_model(folder, "encoder").train()
    found = encode_texts(TEXTS, model, tokenizer=load_tokenizer(folder))
    assert model.training
    assert not found.requires_grad
    torch.testing.assert_close(found, encode_texts(TEXTS, folder))


def test_long_texts_are_cut(folder):
    cut = encode_texts(["a b c d e"], folder, max_length=4)  # [CLS] a b [SEP]
    torch.testing.assert_close(cut, encode_texts(["a b"], folder))


def test_the_cache_is_used_and_knows_what_it_depends_on(folder, tmp_path, monkeypatch):
    first = encode_texts(TEXTS, folder, cache=tmp_path)
    (file,) = os.listdir(tmp_path)
    assert file.endswith(".safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(text_models, "load_model", lambda *args, **kwargs: pytest.fail("computed again"))
        assert torch.equal(encode_texts(TEXTS, folder, cache=tmp_path), first)
    for texts, options in (
        (TEXTS[::-1], {}),
        (TEXTS, {"normalize": False}),
        (TEXTS, {"pooling": "first"}),
        (TEXTS, {"max_length": 4}),
    ):
        before = len(os.listdir(tmp_path))
        found = encode_texts(texts, folder, cache=tmp_path, **options)
        assert len(os.listdir(tmp_path)) == before + 1
        torch.testing.assert_close(found, encode_texts(texts, folder, **options))


@pytest.mark.bad_input
def test_bad_input(folder):
    model = load_model(folder, "encoder")
    for call, match in (
        (lambda: encode_texts([], folder), "at least one string"),
        (lambda: encode_texts("a b", folder), "at least one string"),
        (lambda: encode_texts(TEXTS, model), "needs its tokenizer"),
        (lambda: encode_texts(TEXTS, model, tokenizer=load_tokenizer(folder), cache="x"), "cache needs the model by"),
        (lambda: encode_texts(TEXTS, folder, pooling="source_token"), "pooling must be one of"),
        (lambda: encode_texts(TEXTS, folder, batch_size=0), "batch_size"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
