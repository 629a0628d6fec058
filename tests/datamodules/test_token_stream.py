from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

from datamodules import TokenStreamDataModule
from datamodules.text import (
    PEOPLE,
    THINGS,
    TokenWindows,
    character_tokenizer,
    read_documents,
    synthetic_stories,
    write_token_bin,
)
from lightning_methods.text import word_tokenizer

WORDS = ("a", "b", "c", "d", "e")


def ready(**options) -> TokenStreamDataModule:
    data = TokenStreamDataModule(**options)
    data.prepare_data()
    data.setup("fit")
    return data


def numbered(path, count: int, dtype: str = "uint16") -> str:
    """A file of the plain numbers 0, 1, 2, ..., as nanoGPT writes them."""
    np.arange(count, dtype=dtype).tofile(path)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer(WORDS, chat_template=None).save_pretrained(folder)
    return str(folder)


# generated stories


def test_the_default_needs_nothing_and_tells_stories(tmp_path):
    data = ready(root=str(tmp_path / "data"))
    x, y = next(iter(data.train_dataloader()))
    assert x.shape == y.shape == (32, 64)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert not data.downloads
    assert not (tmp_path / "data").exists()
    assert int(x.max()) < data.vocab_size == len(data.tokenizer)
    assert data.tokenizer.unk_token_id not in x
    stories = data.tokenizer.decode(data.val_set[0][0].tolist()).split("[EOS]")
    # the first window of validation begins with a story, which keeps its people and its thing
    words = stories[0].split()
    assert len(set(words) & set(PEOPLE)) == 2
    assert len(set(words) & set(THINGS)) == 1


def test_stories_of_validation_are_others_and_the_seed_draws_them():
    first, other = ready(num_stories=50, block_size=8), ready(num_stories=50, block_size=8, seed=1)
    assert synthetic_stories(50, 0) == synthetic_stories(50, 0)
    held_out = first.tokenizer(" [EOS] ".join(synthetic_stories(50, 0)[-5:]))["input_ids"]
    assert first.val_set.stream.tokens[:-1].tolist() == held_out
    assert len(first.train_set.stream) > 5 * len(held_out)
    assert not torch.equal(first.val_set.stream.tokens[:30], other.val_set.stream.tokens[:30])


# windows


def test_training_windows_are_anywhere_and_anew_in_every_epoch(tmp_path):
    path = numbered(tmp_path / "train.bin", 1000)
    data = ready(train_bin=path, val_bin=path, block_size=10, batch_size=50, steps_per_epoch=4)
    loader = data.train_dataloader()
    assert len(loader) == 4
    epochs = [torch.cat([x for x, _ in loader]) for _ in range(2)]
    for x in epochs:
        assert torch.equal(x - x[:, :1], torch.arange(10).expand(200, 10))  # tokens in a row
        assert (x[:, 0] % 10).unique().numel() == 10  # begins anywhere, not at tiles
        assert x[:, 0].unique().numel() > 100
    assert not torch.equal(epochs[0].sort(dim=0).values, epochs[1].sort(dim=0).values)
    again = ready(train_bin=path, val_bin=path, block_size=10, batch_size=50, steps_per_epoch=4)
    assert torch.equal(torch.cat([x for x, _ in again.train_dataloader()]), epochs[0])
    other = ready(train_bin=path, val_bin=path, block_size=10, batch_size=50, steps_per_epoch=4, seed=1)
    assert not torch.equal(torch.cat([x for x, _ in other.train_dataloader()]), epochs[0])


def test_every_place_of_the_stream_can_be_drawn(tmp_path):
    path = numbered(tmp_path / "train.bin", 14)
    data = ready(train_bin=path, val_bin=path, block_size=10, batch_size=100, steps_per_epoch=1)
    x, y = next(iter(data.train_dataloader()))
    assert x[:, 0].unique().tolist() == [0, 1, 2, 3]
    assert int(y.max()) == 13


def test_workers_change_nothing(tmp_path):
    path = numbered(tmp_path / "train.bin", 500)
    options = {"train_bin": path, "block_size": 7, "batch_size": 5, "steps_per_epoch": 3}
    here, there = (ready(num_workers=n, **options).train_dataloader() for n in (0, 1))
    for (x, _), (z, _) in zip(here, there, strict=True):
        assert torch.equal(x, z)


def test_evaluation_tiles_the_stream_in_order(tmp_path):
    train, val = numbered(tmp_path / "train.bin", 500), numbered(tmp_path / "val.bin", 95)
    data = ready(train_bin=train, val_bin=val, block_size=10, batch_size=4)
    for loader in (data.val_dataloader(), data.test_dataloader(), data.val_dataloader()):
        x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(x.flatten(), torch.arange(90))
        assert torch.equal(y.flatten(), torch.arange(1, 91))
    assert len(ready(train_bin=train, val_bin=val, block_size=10, val_size=3).val_set) == 3


def test_without_validation_tokens_the_end_is_held_out(tmp_path):
    data = ready(train_bin=numbered(tmp_path / "train.bin", 1000), block_size=10, steps_per_epoch=20, val_fraction=0.2)
    x = torch.cat([x for x, _ in data.train_dataloader()])
    assert int(x.max()) < 800
    assert data.val_set[0][0][0] == 800
    assert data.val_set[-1][1][-1] <= 999


def test_without_a_number_of_steps_an_epoch_is_as_long_as_the_stream(tmp_path):
    path = numbered(tmp_path / "train.bin", 1001)
    assert len(ready(train_bin=path, val_bin=path, block_size=10).train_set) == 100


def test_a_pickle_does_not_carry_the_file(tmp_path):
    path = numbered(tmp_path / "train.bin", 60_000)
    data = ready(train_bin=path, val_bin=path, block_size=10, steps_per_epoch=1)
    data.val_set[0]
    packed = pickle.dumps(data.train_set.stream)
    assert len(packed) < 2000
    assert torch.equal(pickle.loads(packed).windows(torch.tensor([5]), 3), torch.tensor([[5, 6, 7]]))


def test_bins_of_wider_numbers(tmp_path):
    path = tmp_path / "train.bin"
    np.asarray([70_000, 1, 2, 70_003] * 5, dtype="uint32").tofile(path)
    data = ready(train_bin=str(path), val_bin=str(path), block_size=3, bin_dtype="uint32")
    assert data.val_set[0][0].tolist() == [70_000, 1, 2]
    with pytest.raises(RuntimeError, match="vocabulary"):
        _ = data.vocab_size


# texts


def test_a_bin_holds_the_tokens_and_an_end_after_each_document(tmp_path):
    tokenizer = word_tokenizer(WORDS, chat_template=None)
    assert write_token_bin(tmp_path / "x" / "train.bin", ["a b", "", "c"], tokenizer) == 6
    end = tokenizer.eos_token_id
    found = np.fromfile(tmp_path / "x" / "train.bin", dtype=np.uint16).tolist()
    assert found == [*tokenizer("a b")["input_ids"], end, end, *tokenizer("c")["input_ids"], end]


def test_a_token_that_does_not_fit_is_no_wrong_token(tmp_path):
    class Wide:
        eos_token_id = 70_000

        def __call__(self, texts, **options):
            return {"input_ids": [[1] for _ in texts]}

    with pytest.raises(ValueError, match="70000 does not fit into uint16"):
        write_token_bin(tmp_path / "train.bin", ["a"], Wide())
    assert not list(tmp_path.iterdir())
    write_token_bin(tmp_path / "train.bin", ["a"], Wide(), dtype="uint32")
    assert np.fromfile(tmp_path / "train.bin", dtype=np.uint32).tolist() == [1, 70_000]


@pytest.mark.parametrize("held_out", ["valdataset.txt", "testdataset.txt"])
def test_babistories(held_out, tmp_path, tokenizer_folder):
    folder = tmp_path / "babistories"
    folder.mkdir()
    stories = ["a b\nc", "d e é", "a a a"]
    (folder / "traindataset.txt").write_text("".join(json.dumps(story) + "\n" for story in stories))
    (folder / held_out).write_text(json.dumps("e d c b a") + "\n")
    options = {"source": str(folder), "documents": "json", "tokenizer": tokenizer_folder, "root": str(tmp_path / "r")}
    data = ready(block_size=3, **options)
    assert data.downloads
    tokenizer = data.tokenizer
    expected = [token for story in stories for token in (*tokenizer(story)["input_ids"], tokenizer.eos_token_id)]
    assert np.fromfile(data.folder / "train.bin", dtype=np.uint16).tolist() == expected
    for part in (data.val_set, data.test_set):
        assert tokenizer.decode(part[0][0].tolist()) == "e d c"
    # a second run reads what the first one wrote; other text is another bin
    written = (data.folder / "train.bin").stat().st_mtime_ns
    assert ready(block_size=3, **options).folder == data.folder
    assert (data.folder / "train.bin").stat().st_mtime_ns == written
    before = data.folder
    (folder / "traindataset.txt").write_text(json.dumps("b b b b b b") + "\n")
    changed = ready(block_size=3, **options)
    assert changed.folder != before
    assert tokenizer.decode(changed.train_set[0][0].tolist()) in ("b b b", "b b b [EOS]")


def test_tinystories_as_text_files(tmp_path, tokenizer_folder):
    (tmp_path / "TinyStoriesV2-GPT4-train.txt").write_text("\na b\n\nc\n<|endoftext|>\nd e\n<|endoftext|>\n")
    (tmp_path / "TinyStoriesV2-GPT4-valid.txt").write_text("e d c<|endoftext|>b a\n")
    assert list(read_documents(tmp_path / "TinyStoriesV2-GPT4-train.txt")) == ["a b\n\nc", "d e"]
    data = ready(source=str(tmp_path), tokenizer=tokenizer_folder, block_size=3, root=str(tmp_path / "r"))
    text = data.tokenizer.decode(np.fromfile(data.folder / "train.bin", dtype=np.uint16).tolist())
    assert text == "a b c [EOS] d e [EOS]"
    assert data.tokenizer.decode(data.val_set[0][0].tolist()) == "e d c"


def test_a_set_of_hugging_face(tmp_path, tokenizer_folder, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, split=None, cache_dir=None):
        asked.append((name, config, split))
        parts = {"train": ["a b c", "d"], "validation": ["e e e e e"]}
        return datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in parts.items()})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = ready(source="roneneldan/TinyStories", tokenizer=tokenizer_folder, block_size=3, root=str(tmp_path))
    assert asked == [("roneneldan/TinyStories", None, None)]
    assert data.tokenizer.decode(np.fromfile(data.folder / "train.bin", np.uint16).tolist()) == "a b c [EOS] d [EOS]"
    assert data.tokenizer.decode(data.val_set[0][0].tolist()) == "e e e"


def test_characters_of_one_text(tmp_path):
    text = "To be,\n\nor not  to be: " * 20
    path = tmp_path / "input.txt"
    path.write_text(text)
    data = ready(source=str(path), tokenizer="characters", block_size=8, root=str(tmp_path / "r"))
    assert data.vocab_size == len(set(text))
    stream = np.fromfile(data.folder / "train.bin", dtype=np.uint16)
    assert data.tokenizer.decode(stream.tolist()) == text
    assert [sorted(set(text)).index(character) for character in text] == stream.tolist()
    assert data.tokenizer.decode(data.val_set[0][0].tolist()) == text[round(0.9 * len(text)) :][:8]
    again = ready(source=str(path), tokenizer="characters", block_size=8, root=str(tmp_path / "r"))
    assert again.tokenizer.decode(again.val_set[0][0].tolist()) == data.tokenizer.decode(data.val_set[0][0].tolist())


def test_own_validation_file_and_documents_by_line(tmp_path, tokenizer_folder):
    (tmp_path / "one.txt").write_text("a b\n\n c \n")
    (tmp_path / "two.txt").write_text("d d d d\n")
    data = ready(
        source=[str(tmp_path / "one.txt")],
        val_source=str(tmp_path / "two.txt"),
        documents="lines",
        tokenizer=tokenizer_folder,
        block_size=4,
        root=str(tmp_path / "r"),
    )
    assert data.tokenizer.decode(np.fromfile(data.folder / "train.bin", np.uint16).tolist()) == "a b [EOS] c [EOS]"
    assert data.tokenizer.decode(data.val_set[0][0].tolist()) == "d d d d"


def test_names_of_files_that_only_look_like_splits(tmp_path, tokenizer_folder):
    for name in ("valley.txt", "contest.txt", "my-train.txt", "validation.jsonl"):
        (tmp_path / name).write_text("a b c")
    data = TokenStreamDataModule(source=str(tmp_path), tokenizer=tokenizer_folder)
    found = {split: sorted(path.name for path in paths) for split, paths in data._sources().items()}
    assert found == {"train": ["contest.txt", "my-train.txt", "valley.txt"], "val": ["validation.jsonl"]}


def test_objects_as_json_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"story": "a b"}\n\n"c"\n')
    assert list(read_documents(path, "json", "story")) == ["a b", "c"]


def test_character_tokenizer_keeps_every_character():
    tokenizer = character_tokenizer("\n\t ab.é")
    text = "a  b\t\n\n. é"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"documents": "words"}, "documents"),
        ({"bin_dtype": "int8"}, "bin_dtype"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"num_stories": 1}, "num_stories"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"steps_per_epoch": 1, "batch_size": None}, "batch_size"),
        ({"val_bin": "val.bin"}, "val_bin goes with train_bin"),
        ({"train_bin": "train.bin", "source": "x.txt", "tokenizer": "gpt2"}, "not both"),
        ({"source": "x.txt"}, "tokenizer must be given"),
        ({"tokenizer": "gpt2"}, "bring their own"),
        ({"val_source": "x.txt"}, "val_source"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TokenStreamDataModule(**options)


def test_missing_files_are_named(tmp_path, tokenizer_folder):
    with pytest.raises(FileNotFoundError, match=r"nothing\.bin"):
        ready(train_bin=str(tmp_path / "nothing.bin"))
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        ready(source=str(tmp_path / "nothing.txt"), tokenizer=tokenizer_folder)
    (tmp_path / "some.txt").write_text("a")
    with pytest.raises(FileNotFoundError, match="prepare_data"):
        TokenStreamDataModule(source=str(tmp_path / "some.txt"), tokenizer=tokenizer_folder).setup("fit")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "val.txt").write_text("a")
    with pytest.raises(FileNotFoundError, match="training"):
        ready(source=str(tmp_path / "only"), tokenizer=tokenizer_folder)


def test_a_stream_shorter_than_a_window(tmp_path):
    path = numbered(tmp_path / "train.bin", 10)
    with pytest.raises(ValueError, match="has 10 tokens"):
        ready(train_bin=path, val_bin=path, block_size=10)
    assert len(TokenWindows(range(11), 10)) == 1


@pytest.mark.parametrize("line", ["a b", "[1, 2]", '{"other": "a"}'])
def test_lines_that_are_no_texts_are_named(line, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2"):
        list(read_documents(path, "json"))
