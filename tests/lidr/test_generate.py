"""Answers, translations, records."""

from __future__ import annotations

import re

import pytest

from lightning_methods.lidr import ResponseGenerator, language_prompt
from lightning_methods.text import save_tiny, tiny_causal_lm, word_tokenizer


class Oracle:
    """Answers every request by its text and remembers what it was asked."""

    def __init__(self, fail=()):
        self.asked = []
        self.fail = fail

    def generate(self, prompts):
        self.asked.append(list(prompts))
        return [self.answer(prompt) for prompt in prompts]

    def answer(self, prompt):
        request = re.search(r"into (\w+)\..*<sentence>\n(.*?)\n</sentence>", prompt, re.DOTALL)
        if request is None:
            return f"re: {prompt}"
        language, text = request.groups()
        return f"[{language}] {text}" + ("" if text in self.fail else "\n</translated> bye")


PROMPTS = {"en": ["a", "b"], "de": ["c", "d"], "fr": ["e", "f"]}


def test_records_have_every_answer_and_both_directions_with_each_other_language():
    records = ResponseGenerator(Oracle()).build_records(PROMPTS, ["1", "2"])
    assert [record.id for record in records] == ["1", "2"]
    first = records[0]
    assert first.prompts == {"en": "a", "de": "c", "fr": "e"}
    assert first.responses == {"en": "re: a", "de": "re: c", "fr": "re: e"}
    assert first.translations == {
        "en->de": "[German] re: a",
        "de->en": "[English] re: c",
        "en->fr": "[French] re: a",
        "fr->en": "[English] re: e",
    }


def test_translations_are_primed_and_failures_are_none():
    oracle = Oracle(fail=["re: c"])
    records = ResponseGenerator(oracle).build_records({"en": ["a"], "de": ["c"]}, ["1"])
    assert records[0].translations == {"en->de": "[German] re: a", "de->en": None}
    assert [batch[0].endswith("<translated>\n") for batch in oracle.asked] == [False, False, True, True]


def test_arithmetic_prompts_are_wrapped_and_kept_as_they_were_asked():
    oracle = Oracle()
    records = ResponseGenerator(oracle).build_records({"en": ["1+1?"], "de": ["1+1?"]}, ["1"], "en", language_prompt)
    assert records[0].prompts == {"en": language_prompt("1+1?", "en"), "de": language_prompt("1+1?", "de")}
    assert oracle.asked[0] == [language_prompt("1+1?", "en")]


def test_a_model_is_loaded_by_folder_and_answers_like_the_injected_one(tmp_path):
    words = [f"w{i}" for i in range(20)]
    folder = save_tiny(tmp_path, words=words, initializer_range=0.3)
    options = {"chat_template": False, "max_new_tokens": 5, "repetition_penalty": 1.5, "batch_size": 2}
    by_name = ResponseGenerator(folder, **options)
    injected = ResponseGenerator(
        tiny_causal_lm(len(words) + 11, initializer_range=0.3), word_tokenizer(words), **options
    )
    prompts = ["w1 w2", "w3", "w4 w5 w6"]
    assert by_name.respond(prompts) == injected.respond(prompts)
    free = ResponseGenerator(folder, **{**options, "repetition_penalty": 1.0})
    assert free.respond(prompts) != by_name.respond(prompts)
    # Translations have no repetition penalty: they repeat what is in the text.
    requests = {}
    for name, generator in (("free", free), ("penalised", by_name)):
        generator.translation_prompt = lambda text, language: text
        requests[name] = generator._generate(prompts, max_new_tokens=5, primer="<translated>\n")
    assert requests["free"] == requests["penalised"]


@pytest.mark.bad_input
def test_bad_input():
    generator = ResponseGenerator(Oracle())
    with pytest.raises(ValueError, match="no prompts in the dominant language 'en'"):
        generator.build_records({"de": ["a"]}, ["1"])
    with pytest.raises(ValueError, match=r"each of the 1 ids, got \{'de': 2\}"):
        generator.build_records({"en": ["a"], "de": ["a", "b"]}, ["1"])
    with pytest.raises(ValueError, match="needs its tokenizer"):
        ResponseGenerator(tiny_causal_lm(9))
    with pytest.raises(ValueError, match="max_new_tokens"):
        ResponseGenerator(Oracle(), max_new_tokens=0)
