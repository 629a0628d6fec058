"""The span of the response, truncation, padding."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lightning_methods.text import (
    chat_prompt,
    chat_response,
    encode_pair,
    pad_batch,
    response_tokens,
    truncate_pair,
    word_tokenizer,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def bpe():
    """A byte-level BPE with merges over word borders' spaces, as in GPT-2 and Llama 3."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["the answer is the answer of answers"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_the_response_span_of_a_chat_template_is_what_the_model_has_to_say(bpe):
    prompt, response = chat_response(bpe, "what is it?", "the answer", system="You help.")
    assert prompt == chat_prompt(bpe, "what is it?", "You help.")
    assert response == "the answer<|end|>"  # the end of the turn belongs to it, the newline after it does not
    ids, labels = encode_pair(bpe, prompt, response, mode="joint", add_special_tokens=False)
    said = [i for i, label in zip(ids, labels, strict=True) if label != -100]
    assert labels == [-100] * (len(ids) - len(said)) + said
    assert bpe.decode(said) == "the answer<|end|>"
    assert ids.count(bpe.bos_token_id) == 1


def test_joint_encoding_keeps_the_tokens_at_the_border(bpe):
    ids, start = response_tokens(bpe, "it is", " the answer")
    assert ids[:-1] == bpe("it is the answer")["input_ids"]
    assert bpe.decode(ids[start:]) == " the answer<|end|>"
    # The border inside a token: "ans" + "wer" is the one token "answer", which is the response's.
    ids, start = response_tokens(bpe, "the ans", "wer", append_eos=False)
    assert ids == bpe("the answer")["input_ids"]
    assert bpe.decode(ids[start:]) == " answer"
    apart, labels = encode_pair(bpe, "the ans", "wer", mode="concat", append_eos=False)
    assert apart != ids
    assert bpe.decode([i for i in labels if i != -100]) == "wer"


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def __call__(self, text, **options):
        assert "return_offsets_mapping" not in options
        return self.fast(text, **options)


def test_without_offsets_the_common_beginning_is_the_prompt(bpe):
    for prompt, response in (("it is", " the answer"), ("the ans", "wer")):
        assert response_tokens(Slow(bpe), prompt, response) == response_tokens(bpe, prompt, response)


def test_added_special_tokens_are_the_prompts_before_and_the_responses_after(bpe):
    core = Tokenizer.from_str(bpe.backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 0), ("<|end|>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")
    for mode in ("joint", "concat"):
        ids, labels = encode_pair(tokenizer, "it is", " the answer", mode=mode)
        assert ids[0] == 0
        assert ids.count(1) == 1
        assert tokenizer.decode([i for i in labels if i != -100]) == " the answer<|end|>"
    ids, start = response_tokens(tokenizer, "it is", "")
    assert ids[start:] == [1]


def test_an_unknown_word_at_the_end_does_not_stand_for_the_end():
    tokenizer = word_tokenizer(["a"])
    ids, labels = encode_pair(tokenizer, "a ", "a unknown", mode="joint")
    assert ids == [7, 7, tokenizer.unk_token_id, tokenizer.eos_token_id]
    assert labels[0] == -100


def test_a_template_that_rewrites_the_answer_still_ends_the_turn(bpe):
    tokenizer = word_tokenizer(["a"], chat_template="{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
                               "{% if add_generation_prompt %}think: {% endif %}")  # fmt: skip
    assert chat_response(tokenizer, "q", "a") == ("<q>think: ", "a[EOS]")


@pytest.mark.parametrize("prompt", range(0, 14, 3))
@pytest.mark.parametrize("response", range(1, 14, 3))
@pytest.mark.parametrize("limit", [None, 3, 20])
def test_truncation_keeps_what_fits_and_never_loses_the_response(prompt, response, limit):
    p, r = truncate_pair(prompt, response, 10, limit)
    assert p + r <= 10
    assert r >= 1
    assert p <= prompt
    assert r <= response
    assert limit is None or p <= limit
    if prompt + response <= 10 and (limit is None or prompt <= limit):
        assert (p, r) == (prompt, response)


def test_the_prompt_loses_its_beginning_and_the_response_its_end(bpe):
    _, start = response_tokens(bpe, "<s>0123456789", "abcdefghij", add_special_tokens=False)
    assert start == 11
    cut, labels = encode_pair(bpe, "<s>0123456789", "abcdefghij", mode="joint", max_length=8, add_special_tokens=False)
    assert bpe.decode(cut) == "<s>789abcd"  # the beginning-of-sequence token stays
    assert labels[4:] == cut[4:]
    other, _ = encode_pair(
        bpe, "0123456789", "abcdefghij", mode="concat", max_length=8, max_prompt_length=2, truncate=("right", "left")
    )
    assert bpe.decode(other) == "01fghij<|end|>"


def test_padding_on_both_sides():
    assert pad_batch([[1], [2, 3]], "right", 9).tolist() == [[1, 9], [2, 3]]
    assert pad_batch([[1], [2, 3]], "left", -100).tolist() == [[-100, 1], [2, 3]]
    assert pad_batch([[]]).shape == torch.Size([1, 0])


@pytest.mark.bad_input
def test_bad_input(bpe):
    with pytest.raises(ValueError, match="no chat template"):
        chat_prompt(word_tokenizer(["a"], chat_template=None), "a")
    with pytest.raises(ValueError, match="mode must be one of"):
        encode_pair(bpe, "a", "b", mode="both")
    with pytest.raises(ValueError, match="truncate must be one of"):
        encode_pair(bpe, "a", "b", truncate=("left", "middle"))
    with pytest.raises(ValueError, match="max_length"):
        encode_pair(bpe, "a", "b", max_length=0)
    with pytest.raises(ValueError, match="at least one row"):
        pad_batch([])
    with pytest.raises(ValueError, match="side must be one of"):
        pad_batch([[1]], "top")
