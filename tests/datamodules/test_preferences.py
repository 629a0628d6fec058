"""Preference pairs: files, encoding, truncation, languages, splits."""

from __future__ import annotations

import json

import pytest
import torch

from datamodules import PreferenceDataModule
from lightning_methods.text import chat_prompt, word_tokenizer

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture
def path(tmp_path):
    rows = []
    for i in range(20):
        language = "en" if i < 15 else "de"
        rows.append({"id": str(i), "language": language, "prompt": f"w{i} w1", "chosen": f"w{i + 20} w2 w3",
                     "rejected": f"w{i + 40}"})  # fmt: skip
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return file


def module(path, **options):
    return PreferenceDataModule("jsonl", str(path), options.pop("tokenizer", word_tokenizer(WORDS)), **options)


def answers(data, batch, which):
    labels = getattr(batch, f"{which}_labels")
    return [data.tokenizer.decode(row[row != -100]) for row in labels]


def test_batches_hold_prompt_and_answer_in_the_template_with_labels_on_the_answer(path):
    data = module(path, batch_size=4, system="w9")
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.chosen_ids.shape == batch.chosen_mask.shape == batch.chosen_labels.shape
    assert batch.rejected_ids.shape[1] < batch.chosen_ids.shape[1]
    assert batch.reference_chosen is None
    for row, text in enumerate(answers(data, batch, "chosen")):
        number = int(text.split()[0][1:]) - 20
        assert text == f"w{number + 20} w2 w3 [EOS]"
        assert answers(data, batch, "rejected")[row] == f"w{number + 40} [EOS]"
        ids = batch.chosen_ids[row][batch.chosen_mask[row] == 1]
        prompt = data.tokenizer(chat_prompt(data.tokenizer, f"w{number} w1", "w9"), add_special_tokens=False)[
            "input_ids"
        ]
        assert ids[: len(prompt)].tolist() == prompt
        assert (batch.chosen_labels[row, : len(prompt)] == -100).all()
        assert batch.language_ids[row] == (0 if number < 15 else 1)
    assert (batch.rejected_labels[batch.rejected_mask == 0] == -100).all()


def test_splits_keep_the_languages_in_proportion_and_have_their_names(path):
    data = module(path, val_fraction=0.2)
    assert data.languages == []
    data.setup()
    assert data.languages == ["en", "de"]
    assert torch.bincount(data.val_set.targets).tolist() == [3, 1]
    assert len(data.train_set) == 16
    assert set(data.pair_sets()) == {"train", "val", "test"}
    only = module(path, languages=["de"], val_fraction=0.2)
    only.setup()
    assert (len(only.train_set) + len(only.val_set), only.languages) == (5, ["de"])


def test_without_a_template_the_answer_ends_with_the_end_token(path):
    data = module(path, tokenizer=word_tokenizer(WORDS, chat_template=None), batch_size=None, splits="train+test")
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch.chosen_ids[0].tolist() == data.tokenizer("w0 w1 w20 w2 w3 [EOS]")["input_ids"]
    assert batch.chosen_labels[0, :2].tolist() == [-100, -100]


def test_long_pairs_lose_the_beginning_of_the_prompt_and_the_end_of_the_answer(tmp_path):
    long = {"id": "0", "prompt": " ".join(WORDS[:30]), "chosen": " ".join(WORDS[30:50]), "rejected": "w55"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join([json.dumps(long)] * 4))
    plain = word_tokenizer(WORDS, chat_template=None)
    data = module(file, tokenizer=plain, max_length=16, val_fraction=0.25)
    data.setup()
    batch = data.train_set[0]
    tokens = plain.convert_ids_to_tokens(batch.chosen_ids[0])
    assert tokens == WORDS[22:30] + WORDS[30:38]
    # Both answers have the same prompt, although the short one would leave room for more of it.
    assert plain.convert_ids_to_tokens(batch.rejected_ids[0]) == [*WORDS[22:30], "w55", "[EOS]"]
    short = module(file, tokenizer=plain, max_length=16, max_prompt_length=3, val_fraction=0.25)
    short.setup()
    assert plain.convert_ids_to_tokens(short.train_set[0].chosen_ids[0]) == WORDS[27:30] + WORDS[30:43]
    assert data.languages == []


def test_swapping_prefers_the_other_answer(path):
    data, swapped = (module(path, swap=swap) for swap in (False, True))
    for part in (data, swapped):
        part.setup()
    one, two = data.train_set[0], swapped.train_set[0]
    assert torch.equal(one.chosen_ids, two.rejected_ids)
    assert torch.equal(one.rejected_labels, two.chosen_labels)


def test_reference_values_travel_with_their_pairs(path):
    data = module(path, batch_size=5, num_workers=0)
    data.setup()
    train = data.train_set
    train.set_reference(torch.arange(len(train)).float(), -torch.arange(len(train)).float())
    for batch in data.train_dataloader():
        for row in range(len(batch.chosen_ids)):
            number = int(batch.reference_chosen[row])
            assert batch.reference_rejected[row] == -number
            assert torch.equal(batch.rejected_ids[row][batch.rejected_mask[row] == 1], train[number].rejected_ids[0])
    with pytest.raises(ValueError, match="reference_chosen must have shape"):
        train.set_reference(torch.zeros(3), torch.zeros(3))


def test_generated_pairs_need_nothing_and_depend_on_the_seed():
    one, again, other = (PreferenceDataModule(seed=seed) for seed in (0, 0, 1))
    for data in (one, again, other):
        data.setup()
    assert not one.downloads
    assert one.languages == ["en", "de"]
    assert one.train_set.source == again.train_set.source
    assert one.train_set.source != other.train_set.source
    assert len(one.tokenizer) == 227  # what configs/lidr/toy.yaml says


@pytest.mark.bad_input
def test_bad_input(path, tmp_path):
    with pytest.raises(ValueError, match="needs a path"):
        PreferenceDataModule("jsonl")
    with pytest.raises(ValueError, match="source must be one of"):
        PreferenceDataModule("json")
    with pytest.raises(ValueError, match="max_prompt_length"):
        PreferenceDataModule(max_length=10, max_prompt_length=10)
    with pytest.raises(ValueError, match="short for val_size"):
        PreferenceDataModule(val_fraction=0.1, val_size=0.1)
    with pytest.raises(ValueError, match="no pair"):
        module(path, languages=["fr"]).setup()
    with pytest.raises(FileNotFoundError):
        module(tmp_path / "none.jsonl").setup()
    (tmp_path / "bad.jsonl").write_text('{"id": 1, "prompt": "w1", "chosen": "w2"}\n')
    with pytest.raises(ValueError, match="line 1: rejected missing"):
        module(tmp_path / "bad.jsonl").setup()
