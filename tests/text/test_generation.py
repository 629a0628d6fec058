"""Batched generation against one prompt at a time, without a cache."""

from __future__ import annotations

import pytest
import torch

from lightning_methods.text import TextGenerator, chat_prompt, generate_text, tiny_causal_lm, word_tokenizer

WORDS = [f"w{i}" for i in range(30)]
PROMPTS = ["w1 w2 w3 w4 w5", "w6", "w7 w8 w9", "w10 w11", "w1 w2 w3 w4 w5 w6 w7"]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS)


def greedy(model, tokenizer, text, steps):
    """The next token of largest logit, one forward pass over everything at a time."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = []
    for _ in range(steps):
        token = int(model(torch.tensor([ids + answer])).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            break
        answer.append(token)
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_batches_with_padding_and_cache_say_what_single_prompts_say(tokenizer, architecture, batch_size):
    model = tiny_causal_lm(tokenizer, architecture=architecture, initializer_range=0.3)
    expected = [greedy(model, tokenizer, prompt, 6) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    model.train()
    got = generate_text(model, tokenizer, PROMPTS, batch_size=batch_size, max_new_tokens=6)
    assert got == expected
    assert model.training


def test_template_system_line_and_primer(tokenizer):
    model = tiny_causal_lm(tokenizer, initializer_range=0.3)
    got = generate_text(
        model, tokenizer, ["w1"], max_new_tokens=4, chat_template=True, system="w9", primer="w2 ", batch_size=2
    )
    assert got == [greedy(model, tokenizer, chat_prompt(tokenizer, "w1", "w9", "w2 "), 4)]


def test_keywords_reach_generate_and_the_models_own_settings_do_not(tokenizer):
    model = tiny_causal_lm(tokenizer, initializer_range=0.3)
    plain = generate_text(model, tokenizer, PROMPTS, max_new_tokens=12)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 50.0
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=12) == plain
    assert generate_text(model, tokenizer, PROMPTS, max_new_tokens=12, repetition_penalty=5.0) != plain


def test_answers_end_with_the_models_positions(tokenizer):
    model = tiny_causal_lm(tokenizer, positions=10, initializer_range=0.3, eos_token_id=None)
    answers = generate_text(model, tokenizer, PROMPTS[-1:], max_new_tokens=50)
    assert len(answers[0].split()) <= 3
    with pytest.raises(ValueError, match="10 positions"):
        generate_text(model, tokenizer, ["w1 " * 10], max_new_tokens=2)


class Echo:
    def generate(self, prompts):
        return [f"<{prompt}>" for prompt in prompts]


def test_any_object_that_generates_will_do(tokenizer):
    assert isinstance(Echo(), TextGenerator)
    assert generate_text(Echo(), None, ["a", "b"], primer="!") == ["<a!>", "<b!>"]
    got = generate_text(Echo(), tokenizer, ["w1"], chat_template=True)
    assert got == [f"<{chat_prompt(tokenizer, 'w1')}>"]
    assert generate_text(tiny_causal_lm(tokenizer), tokenizer, []) == []


@pytest.mark.bad_input
def test_bad_input(tokenizer):
    class Half:
        def generate(self, prompts):
            return prompts[:-1]

    with pytest.raises(ValueError, match="1 answers to 2 prompts"):
        generate_text(Half(), None, ["a", "b"])
    with pytest.raises(ValueError, match="batch_size"):
        generate_text(tiny_causal_lm(tokenizer), tokenizer, ["w1"], batch_size=0)
    with pytest.raises(ValueError, match="has no token"):
        generate_text(tiny_causal_lm(tokenizer), tokenizer, ["w1", ""])
