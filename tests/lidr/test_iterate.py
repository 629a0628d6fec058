"""The loop: what comes from where, and going on from every stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from datamodules import PreferenceDataModule
from lightning_methods.core import read_jsonl, write_jsonl
from lightning_methods.lidr import CommandLineFit, ResponseGenerator, ToyWorld, read_prompts, run_iterations
from lightning_methods.text import load_model, tiny_causal_lm, word_tokenizer

WORLD = ToyWorld(num_entities=6, num_answers=3)
SETS = [{code: WORLD.prompts(code)[part] for code in WORLD.languages} for part in (slice(0, 3), slice(3, 6))]


class Talker:
    """Answers with a colour, always in the dominant language's words, and translates by the dictionary."""

    asked = 0

    def generate(self, prompts):
        Talker.asked += 1
        answers = []
        for prompt in prompts:
            if "<translated>" in prompt:
                language, text = prompt.removesuffix("<translated>\n").strip().split(" ", 1)
                answers.append(f"{WORLD.translate(text, language)} </translated>")
            else:
                answers.append("red1" if prompt.startswith("thing") else "rot2")
        return answers


def generator(path):
    assert Path(path).is_dir()
    return ResponseGenerator(Talker(), chat_template=False, translation_prompt=WORLD.translation_prompt)


class Copy:
    """A fit that notes what it was given and writes the model as it was."""

    def __init__(self, fail_at=None):
        self.calls = []
        self.fail_at = fail_at

    def __call__(self, model, pairs, folder, save_to):
        self.calls.append((Path(model).name, read_jsonl(pairs), Path(folder), Path(save_to).name))
        if self.fail_at == len(self.calls):
            raise KeyboardInterrupt
        save_to.mkdir(parents=True)


def options(tmp_path, **changes):
    first = tmp_path / "M0"
    first.mkdir(exist_ok=True)
    return {
        "model_name_or_path": str(first),
        "prompt_sets": SETS,
        "output_dir": tmp_path / "out",
        "generator": generator,
        **changes,
    }


def test_every_iteration_takes_the_last_model_and_its_own_prompts(tmp_path):
    fit = Copy()
    last = run_iterations(**options(tmp_path, fit=fit))
    assert last == str(tmp_path / "out" / "M2")
    assert [(model, target) for model, _, _, target in fit.calls] == [("M0", "M1"), ("M1", "M2")]
    for number, (_, pairs, _, _) in enumerate(fit.calls):
        ids = [str(3 * number + k) for k in range(3)]
        assert [(row["language"], row["id"]) for row in pairs] == [(code, i) for code in WORLD.languages for i in ids]
        row = pairs[3]
        assert row["prompt"] == SETS[number]["de"][0]
        assert (row["chosen"], row["rejected"]) == ("rot1", "rot2")
        assert (pairs[0]["chosen"], pairs[0]["rejected"]) == ("red1", "red2")


def test_an_interrupted_run_goes_on_from_every_stage(tmp_path):
    fit = Copy(fail_at=2)
    with pytest.raises(KeyboardInterrupt):
        run_iterations(**options(tmp_path, fit=fit))
    whole = sorted(path.name for path in (tmp_path / "out" / "iteration_1").iterdir())
    assert whole == [
        "pairs.jsonl", "prompts.json", "responses_de.jsonl", "responses_en.jsonl",
        "translations_de-en.jsonl", "translations_en-de.jsonl",
    ]  # fmt: skip
    pairs = (tmp_path / "out" / "iteration_1" / "pairs.jsonl").read_text()
    # All that was generated is there: nothing is asked again.
    before, again = Talker.asked, Copy()
    run_iterations(**options(tmp_path, fit=again))
    assert Talker.asked == before
    assert [(model, target) for model, _, _, target in again.calls] == [("M1", "M2")]
    # Behind a lost stage only that stage is done again.
    for lost, questions in (("translations_en-de.jsonl", 1), ("responses_de.jsonl", 1), ("pairs.jsonl", 0)):
        (tmp_path / "out" / "M2").rmdir()
        (tmp_path / "out" / "iteration_1" / lost).unlink()
        before = Talker.asked
        run_iterations(**options(tmp_path, fit=Copy()))
        assert Talker.asked - before == questions
        assert (tmp_path / "out" / "iteration_1" / "pairs.jsonl").read_text() == pairs
    # Nothing is left to do.
    done = Copy()
    assert run_iterations(**options(tmp_path, fit=done)) == str(tmp_path / "out" / "M2")
    assert done.calls == []


@pytest.mark.bad_input
def test_other_settings_need_another_folder(tmp_path):
    run_iterations(**options(tmp_path, fit=Copy()))
    with pytest.raises(ValueError, match="begun with seed=0, now it is 1"):
        run_iterations(**options(tmp_path, fit=Copy(), seed=1))
    with pytest.raises(ValueError, match="begun with digest"):
        run_iterations(**options(tmp_path, fit=Copy(), prompt_sets=SETS[::-1]))
    with pytest.raises(ValueError, match="give trainer_factory and data_factory"):
        run_iterations(**options(tmp_path))
    with pytest.raises(ValueError, match="one set of prompts for each"):
        run_iterations(**options(tmp_path, fit=Copy(), prompt_sets=[]))
    with pytest.raises(ValueError, match="without writing"):
        run_iterations(**options(tmp_path, fit=lambda *a: None, output_dir=tmp_path / "other"))

    class Silent:
        def generate(self, prompts):
            return ["..." for _ in prompts]

    with pytest.raises(ValueError, match="not one of the 3 prompts"):
        run_iterations(
            **options(
                tmp_path, fit=Copy(), output_dir=tmp_path / "silent",
                generator=lambda path: ResponseGenerator(Silent(), chat_template=False),
            )
        )  # fmt: skip


def tiny_model(folder):
    tokenizer = word_tokenizer(WORLD.words(), chat_template=None)
    tokenizer.save_pretrained(folder)
    tiny_causal_lm(tokenizer, width=16, layers=1, positions=16).save_pretrained(folder)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def test_the_fit_in_this_process_trains_each_model_from_the_last(tmp_path):
    tiny_model(tmp_path / "M0")
    folders = []

    def trainer(folder):
        folders.append(folder)
        return Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip

    last = run_iterations(
        **options(
            tmp_path,
            trainer_factory=trainer,
            data_factory=lambda pairs, model: PreferenceDataModule("jsonl", str(pairs), model, val_fraction=0.2),
            module={"optimizer": adamw, "reference_mode": "precomputed"},
        )
    )
    assert folders == [tmp_path / "out" / f"iteration_{i}" / "fit" for i in range(2)]
    weights = [
        load_model(str(path)).transformer.wte.weight for path in (tmp_path / "M0", tmp_path / "out" / "M1", last)
    ]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_the_command_line_fit_is_train_py_with_the_iterations_own_files(tmp_path):
    tiny_model(tmp_path / "M0")
    pairs = tmp_path / "pairs.jsonl"
    write_jsonl(pairs, [pair._asdict() for pair in WORLD.pairs()])
    root = Path(__file__).parents[2]
    fit = CommandLineFit(
        [root / "configs/lidr/toy.yaml", root / "configs/trainer/cpu.yaml"],
        ["--trainer.max_epochs=1", "--test_after_fit=false", "--trainer.enable_progress_bar=false"],
        apart=False,
    )
    folder = tmp_path / "fit"
    assert "--ckpt_path=last" not in fit.arguments(str(tmp_path / "M0"), pairs, folder, tmp_path / "M1")
    fit(str(tmp_path / "M0"), pairs, folder, tmp_path / "M1")
    first, second = (load_model(str(tmp_path / name)).transformer.wte.weight for name in ("M0", "M1"))
    assert not torch.equal(first, second)
    # A fit that was interrupted before it could write the model takes up its checkpoint.
    assert fit.arguments(str(tmp_path / "M0"), pairs, folder, tmp_path / "M1")[-1] == "--ckpt_path=last"
    with pytest.raises(ValueError, match="number of configs"):
        CommandLineFit([])


def test_prompts_are_aligned_by_id_and_cut_into_disjoint_sets(tmp_path):
    write_jsonl(tmp_path / "en.jsonl", [{"id": f"p-{i}", "instruction": f"en {i}"} for i in range(7)])
    write_jsonl(tmp_path / "de.jsonl", [{"id": f"p-{i}", "instruction": f"de {i}"} for i in (5, 4, 3, 1, 0, 6)])
    files = {code: tmp_path / f"{code}.jsonl" for code in ("en", "de")}
    sets, ids = read_prompts(files, size=3)
    assert ids == [["p-0", "p-1", "p-3"], ["p-4", "p-5", "p-6"]]
    assert sets[1] == {"en": ["en 4", "en 5", "en 6"], "de": ["de 4", "de 5", "de 6"]}
    assert [len(s["en"]) for s in read_prompts(files)[0]] == [6]
    with pytest.raises(ValueError, match="3 sets of 3 prompts were asked, but all languages share 6"):
        read_prompts(files, 3, 3)
    (tmp_path / "en.jsonl").write_text(json.dumps({"id": "p-0", "instruction": "x"}) * 1 + "\n" +
                                       json.dumps({"id": "p-0", "instruction": "y"}))  # fmt: skip
    with pytest.raises(ValueError, match="more than once"):
        read_prompts(files)


def test_the_command_runs_the_whole_loop(tmp_path, monkeypatch):
    """As from the shell: prompts from files, two rounds, models on disk."""
    from lightning_methods.lidr.__main__ import main

    monkeypatch.chdir(Path(__file__).parents[2])
    tiny_model(tmp_path / "M0")
    for code in WORLD.languages:
        rows = [{"id": str(i), "instruction": prompt} for i, prompt in enumerate(WORLD.prompts(code))]
        write_jsonl(tmp_path / "prompts" / f"{code}.jsonl", rows)
    last = main(
        [
            "--model", str(tmp_path / "M0"), "--prompts", str(tmp_path / "prompts"), "--languages", "en", "de",
            "--fit", "configs/lidr/toy.yaml", "configs/trainer/cpu.yaml", "--output", str(tmp_path / "out"),
            "--iterations", "1", "--prompts_per_iteration", "3", "--in_process",
            "--set", "trainer.max_epochs=1", "trainer.enable_progress_bar=false", "test_after_fit=false",
        ],
        generator,
    )  # fmt: skip
    assert last == str(tmp_path / "out" / "M1")
    assert load_model(last).config.n_layer == 1
