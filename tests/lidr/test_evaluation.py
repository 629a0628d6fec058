"""Arithmetic, languages, judges, and the files that judges read."""

from __future__ import annotations

import json

import pytest
from lightning.pytorch import Trainer

from datamodules import MGSMDataModule, XAlpacaEvalDataModule
from lightning_methods.lidr import (
    ModelOutputs,
    MultilingualEvaluation,
    head_to_head,
    identify_language,
    judge_prompt,
    language_prompt,
    mgsm_correct,
    off_target_rate,
    read_preferences,
    weighted_preference,
    win_rates,
    write_model_outputs,
)

SENTENCES = {
    "en": "She sells the rest of the eggs at the market and it is enough.",
    "de": "Sie verkauft den Rest der Eier auf dem Markt und das ist genug.",
    "es": "Ella vende el resto de los huevos en el mercado y es suficiente.",
    "fr": "Elle vend le reste des œufs au marché et cela est suffisant pour elle.",
    "it": "Lei vende il resto delle uova al mercato e questo non è un problema.",
    "sw": "Anauza mayai yake kwa kila siku katika soko la mji wa jirani.",
    "ru": "Она продаёт остальные яйца на рынке.",
    "ja": "彼女は残りの卵を市場で売ります。",
    "zh": "她在市场上卖掉剩下的鸡蛋。",
    "ko": "그녀는 남은 달걀을 시장에서 판다.",
    "th": "เธอขายไข่ที่เหลือที่ตลาด",
    "bn": "তিনি বাকি ডিম বাজারে বিক্রি করেন।",
    "te": "ఆమె మిగిలిన గుడ్లను మార్కెట్లో అమ్ముతుంది.",
    "ar": "تبيع بقية البيض في السوق.",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_languages_are_told_apart(language):
    assert identify_language(SENTENCES[language]) == language


def test_off_target_counts_what_is_surely_another_language():
    answers = [SENTENCES["de"], SENTENCES["en"], "42", SENTENCES["ja"]]
    assert off_target_rate(answers, "de") == 0.5
    assert off_target_rate(answers, "de", identify=lambda text: "de") == 0.0
    with pytest.raises(ValueError, match="no answer"):
        off_target_rate([], "de")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("Therefore 18.", "18", True), ("18 - 2 = 16", "18", False), ("1,000", "1000", True), ("two", "2", False),
     ("It is 3.0", "3", True)],
)  # fmt: skip
def test_the_last_number_counts(answer, gold, right):
    assert mgsm_correct(answer, gold) is right


def test_a_judge_that_favours_a_position_ends_in_ties_when_asked_both_ways():
    texts = ["a", "bb", "ccc", "d"]
    biased = lambda instruction, first, second, language: 1.0  # noqa: E731
    assert head_to_head(biased, texts, texts, texts) == (0.0, 1.0, 0.0)
    assert head_to_head(biased, texts, texts, texts, order="given") == (1.0, 0.0, 0.0)
    win, tie, _ = head_to_head(biased, texts * 50, texts * 50, texts * 50, order="random", seed=1)
    assert tie == 0
    assert 0.3 < win < 0.7


def test_wins_are_those_of_the_first_outputs_and_the_judge_knows_the_language():
    class Longer:
        def compare(self, instruction, first, second, language):
            assert language == "th"
            return 0.5 if len(first) == len(second) else float(len(second) > len(first))

    result = head_to_head(Longer(), ["?"] * 4, ["aaa", "a", "aa", "aaa"], ["b", "bb", "bb", "b"], "th")
    assert result == (0.5, 0.25, 0.25)
    assert result._fields == ("win", "tie", "lose")


@pytest.mark.bad_input
def test_bad_comparisons():
    with pytest.raises(ValueError, match="2 instructions, 1 and 2 answers"):
        head_to_head(lambda *a: 1, ["a", "b"], ["a"], ["a", "b"])
    with pytest.raises(ValueError, match="verdict must be in"):
        head_to_head(lambda *a: 2, ["a"], ["a"], ["b"])


def test_weighted_preference_and_the_judges_prompt():
    assert weighted_preference({"m": -1.0, "M": -1.0}) == 0.5
    assert weighted_preference({"M": -700.0, "x": 0.0}) == 1.0
    assert weighted_preference({"m": -0.2}) == 0.0
    assert weighted_preference({"x": -0.2}) is None
    text = judge_prompt("Warum?", "eins", "zwei", "de")
    assert "German" in text
    assert text.index("eins") < text.index("zwei")


def test_preferences_and_outputs_have_the_format_of_alpaca_eval(tmp_path):
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps([{"preference": value} for value in (1, 2, 1.5, 1.25, 0, None)]))
    assert read_preferences(path) == [0, 1, 0.5, 0.25, 0.5, None]
    assert win_rates(read_preferences(path)) == pytest.approx(0.45)
    rows = [{"id": 3, "dataset": "helpful_base", "instruction": "Hola"}, {"id": 4, "instruction": "Adiós"}]
    write_model_outputs(tmp_path / "new" / "model_outputs.json", "M1", rows, ["x", "y"])
    first, second = json.loads((tmp_path / "new" / "model_outputs.json").read_text(encoding="utf-8"))
    assert first == {"generator": "M1", "dataset": "helpful_base", "id": 3, "instruction": "Hola", "output": "x"}
    assert (second["dataset"], second["output"]) == ("", "y")


@pytest.mark.bad_input
def test_bad_files(tmp_path):
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps([{"preference": 3}]))
    with pytest.raises(ValueError, match=r"entry 0: preference 3 is outside"):
        read_preferences(path)
    path.write_text(json.dumps([{"verdict": 1}]))
    with pytest.raises(ValueError, match="no 'preference'; it has verdict"):
        read_preferences(path)
    with pytest.raises(ValueError, match="no verdict"):
        win_rates([None])
    with pytest.raises(ValueError, match="one output for each"):
        write_model_outputs(path, "x", [], ["a"])


# the sets, and the command line's module on them


@pytest.fixture
def mgsm(tmp_path):
    problems = [("Wie viel?", "1"), ("Und nun?", "12")]
    for language, suffix in (("de", ""), ("en", " en")):
        lines = [json.dumps({"query": q + suffix, "response": a}) for q, a in problems]
        (tmp_path / f"{language}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


class Solver:
    def generate(self, prompts):
        return ["Das ist die 12." if "nun" in prompt else "The answer is the 12." for prompt in prompts]


def test_mgsm_is_read_wrapped_and_scored_by_language(mgsm):
    data = MGSMDataModule(["en", "de"], root=str(mgsm), batch_size=3)
    data.setup("test")
    batches = list(data.test_dataloader())
    assert [len(batch["id"]) for batch in batches] == [3, 1]
    assert batches[0]["prompt"][0] == language_prompt("Wie viel? en", "en")
    assert batches[0]["language"] == ["en", "en", "de"]
    assert batches[0]["answer"] == ["1", "12", "1"]
    loop = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    loop.test(MultilingualEvaluation(Solver()), datamodule=data, verbose=False)
    expected = {"acc": 0.5, "acc_en": 0.5, "acc_de": 0.5, "off_target": 0.5, "off_target_en": 0.5, "off_target_de": 0.5}
    measured = {name.removeprefix("test/"): value.item() for name, value in loop.callback_metrics.items()}
    assert measured == expected
    plain = MGSMDataModule(["de"], root=str(mgsm), wrap=False, limit=1)
    plain.setup()
    assert [row["prompt"] for row in plain.rows] == ["Wie viel?"]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_x_alpaca_eval_is_read_and_its_answers_are_written_for_the_judge(tmp_path, suffix):
    rows = [{"id": i, "dataset": "koala", "instruction": f"Haz {i}"} for i in range(3)]
    text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
    (tmp_path / f"es.{suffix}").write_text(text)
    data = XAlpacaEvalDataModule(["es"], root=str(tmp_path), batch_size=2)
    callbacks = [ModelOutputs(str(tmp_path / "out"), "M1")]
    loop = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks)
    answers = loop.predict(MultilingualEvaluation(Solver()), datamodule=data)
    assert [len(batch) for batch in answers] == [2, 1]
    written = json.loads((tmp_path / "out" / "es.json").read_text())
    assert [row["instruction"] for row in written] == ["Haz 0", "Haz 1", "Haz 2"]
    assert {(row["generator"], row["dataset"], row["output"]) for row in written} == {
        ("M1", "koala", "The answer is the 12.")
    }


@pytest.mark.bad_input
def test_missing_files_and_bad_options(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no fr.jsonl in .*'query', 'response'"):
        MGSMDataModule(["fr"], root=str(tmp_path)).setup()
    with pytest.raises(FileNotFoundError, match=r"ZNLP/Language-Imbalance"):
        XAlpacaEvalDataModule(["fr"], root=str(tmp_path)).setup()
    with pytest.raises(ValueError, match="languages must be one of"):
        MGSMDataModule(["xx"])
    with pytest.raises(ValueError, match="at least one language"):
        XAlpacaEvalDataModule([])
    (tmp_path / "es.json").write_text(json.dumps([{"id": 1}]))
    with pytest.raises(ValueError, match="entry 0: expected id, dataset, instruction"):
        XAlpacaEvalDataModule(["es"], root=str(tmp_path)).setup()
