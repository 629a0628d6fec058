from __future__ import annotations

import numpy as np
import pytest
import torch

from datamodules import MaskedLMDataModule, mask_tokens
from lightning_methods.text import load_tokenizer, save_tiny, word_tokenizer

SMALL = {"max_length": 16, "num_sentences": 200, "batch_size": 8}


def ready(**options) -> MaskedLMDataModule:
    data = MaskedLMDataModule(**{**SMALL, **options})
    data.prepare_data()
    data.setup()
    return data


def test_masks_are_those_of_bert():
    ids = torch.randint(10, 1000, (400, 128), generator=torch.Generator().manual_seed(0))
    special = torch.zeros_like(ids, dtype=torch.bool)
    special[:, 0] = True
    seen, labels = mask_tokens(ids, special, 3, 1000, 0.15, torch.Generator().manual_seed(1))
    chosen = labels != -100
    assert chosen[:, 1:].double().mean() == pytest.approx(0.15, abs=0.01)
    assert not chosen[:, 0].any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(seen[~chosen], ids[~chosen])
    hidden, kept = (seen[chosen] == 3).double().mean(), (seen[chosen] == ids[chosen]).double().mean()
    assert hidden == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    again = mask_tokens(ids, special, 3, 1000, 0.15, torch.Generator().manual_seed(1))
    assert torch.equal(again[0], seen)


def test_blocks_of_generated_sentences():
    data = ready()
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert all(value.shape == (8, 16) and value.dtype == torch.int64 for value in batch.values())
    tokenizer = data.tokenizer
    assert (batch["input_ids"][:, 0] == tokenizer.cls_token_id).all()
    assert (batch["input_ids"][:, -1] == tokenizer.sep_token_id).all()
    assert tokenizer.unk_token_id not in data.train_set.source
    special = torch.isin(batch["labels"], torch.tensor(tokenizer.all_special_ids))
    assert not special.any()
    assert not data.downloads


def test_masks_are_new_in_every_epoch_and_fixed_in_evaluation():
    data = ready()
    loader = data.train_dataloader()
    loader.sampler.set_epoch(0)
    first = [batch["labels"] for batch in loader]
    loader.sampler.set_epoch(1)
    second = [batch["labels"] for batch in loader]
    loader.sampler.set_epoch(0)
    again = [batch["labels"] for batch in loader]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, second))
    assert all(
        torch.equal(a["labels"], b["labels"]) for a, b in zip(data.val_dataloader(), data.val_dataloader(), strict=True)
    )
    sample = data.train_set[0]
    assert sample["input_ids"].shape == (16,)


def test_files_are_read_once_and_nothing_is_lost(tmp_path):
    words = [f"w{k}" for k in range(300)]
    folder = tmp_path / "tokenizer"
    word_tokenizer(words, style="encoder").save_pretrained(folder)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(" ".join(words[:70]) + "\n\n" + " ".join(words[70:150]) + "\n")
    (texts / "b.txt").write_text(" ".join(words[150:]))
    options = {"source": str(texts), "tokenizer": str(folder), "root": str(tmp_path / "data"), "splits": "train"}
    data = ready(**options, val_size=2, test_size=2)
    file = data.tokens_file
    rows = np.load(file)
    assert rows.shape == (-(-303 // 14), 14)  # 300 words and a separator behind each of three documents
    tokenizer = load_tokenizer(str(folder))
    text = [token for token in tokenizer.convert_ids_to_tokens(rows.flatten().tolist()) if token.startswith("w")]
    assert text == words
    padded = data.train_set.source[-1] == tokenizer.pad_token_id
    assert padded.sum() == rows.size - 303
    last = int((data.train_set.indices == len(rows) - 1).nonzero()) if len(rows) - 1 in data.train_set.indices else None
    if last is not None:
        assert data.train_set[last]["attention_mask"].sum() == 16 - padded.sum()
    written = file.stat().st_mtime_ns
    ready(**options)
    assert file.stat().st_mtime_ns == written
    (texts / "c.txt").write_text("w1 w2")
    assert MaskedLMDataModule(**{**SMALL, **options}).tokens_file != file
    assert data.downloads


@pytest.mark.bad_input
def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="tokenizer"):
        MaskedLMDataModule(source="text.txt")
    with pytest.raises(ValueError, match="mask_rate"):
        MaskedLMDataModule(mask_rate=0.0)
    with pytest.raises(ValueError, match="max_length"):
        MaskedLMDataModule(max_length=2)
    folder = save_tiny(tmp_path / "tiny", kind="masked")
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        ready(source=str(tmp_path / "nothing.txt"), tokenizer=folder, root=str(tmp_path))
    (tmp_path / "there.txt").write_text("a b c")
    data = MaskedLMDataModule(source=str(tmp_path / "there.txt"), tokenizer=folder, root=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"prepare_data\(\)"):
        data.setup()
    with pytest.raises(ValueError, match="special"):
        mask_tokens(torch.ones(2, 3).long(), torch.zeros(2, 2).bool(), 0, 10)
