"""Pairs, translations, numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_methods.lidr import (
    TRANSLATION_PRIMER,
    ParallelRecord,
    build_preference_pairs,
    extract_translation,
    final_number,
    has_repetition,
    language_prompt,
    translation_prompt,
)

LANGUAGES = ["de", "fr", "ja"]


def record(number, failed=(), **changes):
    codes = ["en", *LANGUAGES]
    translations = {}
    for code in LANGUAGES:
        for key in (f"en->{code}", f"{code}->en"):
            translations[key] = None if key in failed else f"{key} {number}"
    values = {
        "id": str(number),
        "prompts": {code: f"{code}? {number}" for code in codes},
        "responses": {code: f"{code}! {number}" for code in codes},
        "translations": translations,
    }
    return ParallelRecord(**{**values, **changes})


def rows(pairs, language):
    return [tuple(pair)[2:] for pair in pairs if pair.language == language]


def test_the_dominant_answer_wins_in_both_languages():
    pairs = build_preference_pairs([record(1)], languages=["de"])
    assert rows(pairs, "en") == [("en? 1", "en! 1", "de->en 1")]
    assert rows(pairs, "de") == [("de? 1", "en->de 1", "de! 1")]


@pytest.mark.parametrize("key", ["en->de", "de->en"])
def test_a_failed_translation_drops_both_pairs_of_that_language_alone(key):
    pairs = build_preference_pairs([record(1, failed=[key]), record(2)], dominant_pairs="all")
    assert [pair.id for pair in pairs if pair.language == "de"] == ["2"]
    assert [pair.id for pair in pairs if pair.language == "fr"] == ["1", "2"]
    assert [pair.rejected for pair in pairs if pair.language == "en" and pair.id == "1"] == ["fr->en 1", "ja->en 1"]


def test_order_is_dominant_first_then_by_language_then_by_record():
    pairs = build_preference_pairs([record(i) for i in range(3)], dominant_pairs="one")
    assert [(pair.language, pair.id) for pair in pairs] == [
        (code, str(i)) for code in ["en", *LANGUAGES] for i in range(3)
    ]


def test_one_dominant_pair_per_prompt_is_drawn_uniformly_and_by_seed():
    records = [record(i) for i in range(600)]
    one = [p for p in build_preference_pairs(records, seed=3) if p.language == "en"]
    assert [p.id for p in one] == [str(i) for i in range(600)]
    counts = {code: sum(p.rejected.startswith(code) for p in one) for code in LANGUAGES}
    assert all(150 < n < 250 for n in counts.values()), counts
    assert one == [p for p in build_preference_pairs(records, seed=3) if p.language == "en"]
    assert one != [p for p in build_preference_pairs(records, seed=4) if p.language == "en"]
    # The draw for a prompt does not depend on the others.
    assert one[::2] == [p for p in build_preference_pairs(records[::2], seed=3) if p.language == "en"]


def test_one_takes_a_language_that_did_not_fail_and_last_takes_the_last_or_none():
    failed = record(1, failed=["en->de", "ja->en"])
    assert rows(build_preference_pairs([failed]), "en") == [("en? 1", "en! 1", "fr->en 1")]
    assert rows(build_preference_pairs([failed], dominant_pairs="last"), "en") == []
    both = build_preference_pairs([failed, record(2)], dominant_pairs="last")
    assert rows(both, "en") == [("en? 2", "en! 2", "ja->en 2")]
    assert len(rows(build_preference_pairs([record(1)], dominant_pairs="all"), "en")) == 3


def test_prompts_about_translation_keep_the_dominant_answer():
    pairs = build_preference_pairs([record(1), record(2)], languages=["de"], translation_instruction_ids=["1"])
    assert rows(pairs, "de") == [("de? 1", "en! 1", "de! 1"), ("de? 2", "en->de 2", "de! 2")]
    assert rows(pairs, "en")[0][2] == "de->en 1"


def test_repetitive_texts_are_dropped_on_request():
    circle = record(1, responses={"en": "a\n" * 5, "de": "x", "fr": "y", "ja": "z"})
    assert len(build_preference_pairs([circle, record(2)], languages=["de"])) == 4
    kept = build_preference_pairs([circle, record(2)], languages=["de"], drop_repetitive=True)
    assert {pair.id for pair in kept} == {"2"}


def test_equal_answers_are_kept_and_counted():
    same = record(1, responses=dict.fromkeys(["en", *LANGUAGES], "42"))
    same.translations = dict.fromkeys(same.translations, "42")
    with pytest.warns(UserWarning, match="2 of 2 pairs have equal answers"):
        assert len(build_preference_pairs([same], languages=["de"])) == 2


def test_another_dominant_language():
    values = record(1)
    values.translations = {"de->fr": "a", "fr->de": "b"}
    pairs = build_preference_pairs([values], dominant="de", languages=["fr"])
    assert [tuple(p) for p in pairs] == [("1", "de", "de? 1", "de! 1", "b"), ("1", "fr", "fr? 1", "a", "fr! 1")]


def test_records_go_to_dictionaries_and_back():
    assert ParallelRecord.from_dict(record(1).to_dict()) == record(1)
    values = record(1).to_dict()
    values["reponses"] = values.pop("responses")  # as in the authors' files
    assert ParallelRecord.from_dict(values) == record(1)


@pytest.mark.bad_input
def test_errors_name_the_record_and_the_key():
    for kind, key in (("prompts", "de"), ("responses", "en"), ("translations", "en->de"), ("translations", "de->en")):
        broken = record(7)
        del getattr(broken, kind)[key]
        with pytest.raises(ValueError, match=f"record '7' has no '{key}' among its {kind}"):
            build_preference_pairs([broken], languages=["de"])
    with pytest.raises(ValueError, match="lacks prompts, responses"):
        ParallelRecord.from_dict({"id": "1"})
    with pytest.raises(ValueError, match="dominant_pairs must be one of"):
        build_preference_pairs([], dominant_pairs="two")
    with pytest.raises(ValueError, match="must not contain the dominant"):
        build_preference_pairs([record(1)], languages=["en", "de"])
    with pytest.raises(ValueError, match="threshold"):
        has_repetition("a", 0)


def test_translations_are_what_stands_between_the_tags():
    assert extract_translation("\n Hallo\nWelt \n</translated> and more</translated>") == "Hallo\nWelt"
    assert extract_translation("cut off in the mid") is None
    assert extract_translation("</translated>") == ""
    assert extract_translation("<translated>x</translated>", primer="") == "x"
    assert extract_translation("x</translated>", primer="") is None
    request = translation_prompt("How are you?", "de")
    assert "<sentence>\nHow are you?\n</sentence>" in request
    assert "German" in request
    assert TRANSLATION_PRIMER == "<translated>\n"
    assert "Klingon" in translation_prompt("x", "Klingon")
    assert language_prompt("1+1?", "th").count("Thai") == 2


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7, so 7 apples", "7"),
        ("$1,234.50.", "1234.5"),
        ("1.234,50 €", "1234.5"),
        ("1.234.567", "1234567"),
        ("12,345,678", "12345678"),
        ("1,000", "1000"),
        ("18,00", "18"),
        ("3,5 kg", "3.5"),
        ("0.50", "0.5"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("10-3", "3"),
        ("-0", "0"),
        ("10\u202f000 m", "10000"),
        ("\u0663\u0664\u0665", "345"),
        ("007", "7"),
        ("答案是42。", "42"),
        ("none at all", None),
        ("", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


def test_it_is_pure_python():
    code = "import lightning_methods.lidr.preference, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
