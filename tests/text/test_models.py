"""Loading by name or folder, LoRA, dropout, tiny models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.text import (
    add_lora,
    disable_dropout,
    load_model,
    load_tokenizer,
    save_tiny,
    tiny_causal_lm,
    tiny_encoder,
    tiny_seq2seq,
    word_tokenizer,
)


@pytest.mark.parametrize("kind", ["causal", "encoder", "masked", "seq2seq"])
def test_a_saved_tiny_model_is_read_back_by_its_auto_class(kind, tmp_path):
    folder = save_tiny(tmp_path / "model", kind, words=["x", "y"], width=16, layers=1)
    first, again = load_model(folder, kind), load_model(folder, kind)
    assert not first.training
    assert first is not again
    ids = torch.tensor([[7, 8]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "seq2seq" else {})}
    torch.testing.assert_close(first(**inputs)[0], again(**inputs)[0])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_tokens_to_ids(["x", "y"]) == [7, 8]
    assert tokenizer("x")["input_ids"] == ([4, 7, 5] if kind in ("encoder", "masked") else [7])


def test_a_module_and_a_tokenizer_pass_through_and_dtype_is_kept(tmp_path):
    model, tokenizer = tiny_causal_lm(10), word_tokenizer(["x"])
    assert load_model(model) is model
    assert load_tokenizer(tokenizer) is tokenizer
    folder = save_tiny(tmp_path, layers=1, width=8)
    assert load_model(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(folder).dtype == torch.float32


def test_a_tokenizer_without_padding_gets_its_end_token(tmp_path):
    tokenizer = word_tokenizer(["x"])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "[EOS]"


@pytest.mark.bad_input
def test_errors_name_what_is_missing(tmp_path):
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match="no-such-folder"):
            load(str(tmp_path / "no-such-folder"), local_files_only=True)
    with pytest.raises(ValueError, match="kind must be one of"):
        load_model("x", kind="causl")
    with pytest.raises(ValueError, match="dtype must name a torch dtype"):
        load_model("x", dtype="float33")
    with pytest.raises(TypeError, match="a module, a name or a folder"):
        load_model(3)


def test_tiny_models_come_from_their_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one, two = tiny_causal_lm(12, seed=3), tiny_causal_lm(12, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = tiny_causal_lm(12, seed=4)
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


@pytest.mark.parametrize(
    "model",
    [
        tiny_causal_lm(12, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
        tiny_causal_lm(12, architecture="llama", attention_dropout=0.5),
        tiny_encoder(12, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5),
        tiny_seq2seq(12, dropout_rate=0.5),
    ],
    ids=["gpt2", "llama", "bert", "t5"],
)
def test_without_dropout_training_mode_computes_what_eval_mode_does(model):
    ids = torch.arange(7, 12)[None]
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    expected = model.eval()(**inputs)[0]
    assert not torch.equal(model.train()(**inputs)[0], expected)
    assert disable_dropout(model) is model
    torch.testing.assert_close(model.train()(**inputs)[0], expected)


def test_lora_starts_at_the_model_and_trains_nothing_else():
    pytest.importorskip("peft")
    model = tiny_causal_lm(12)
    ids = torch.tensor([[7, 8, 9]])
    expected = model(ids).logits
    adapted = add_lora(model, 2)
    torch.testing.assert_close(adapted(ids).logits, expected)
    trainable = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
    assert not torch.allclose(adapted(ids).logits, expected)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(ids).logits, expected)


@pytest.mark.bad_input
def test_lora_refuses_a_rank_below_one():
    with pytest.raises(ValueError, match="rank"):
        add_lora(tiny_causal_lm(12), 0)
