"""A language model on a stream of tokens, from the data module to the text that it writes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning import Trainer, seed_everything
from torch.nn import functional as F

from datamodules import TokenStreamDataModule
from datamodules.text import COLORS, PEOPLE, PLACES, THINGS
from lightning_methods.core.schedules import warmup_cosine
from lightning_methods.memory_mosaics import MemoryMosaicLM, MemoryMosaics


def trainer(**options) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", logger=False, gradient_clip_val=1.0, **{**quiet, "max_epochs": 1, **options})


@pytest.fixture(scope="module")
def trained() -> tuple[MemoryMosaics, TokenStreamDataModule, dict[str, float], dict[str, float]]:
    """A small model after 100 steps on the generated stories, and its test before and after."""
    seed_everything(0, verbose=False)
    data = TokenStreamDataModule(block_size=32, batch_size=16, steps_per_epoch=100, num_stories=300, val_size=40)
    module = MemoryMosaics(
        MemoryMosaicLM(data.vocab_size, 32, 4, 2, 64, attn_dropout=0, resid_dropout=0),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-2, betas=(0.9, 0.95)),
        lr_scheduler=lambda optimizer: warmup_cosine(optimizer, warmup=10, min_ratio=0.05),
        curve_length=32,
    )
    before = trainer().test(module, data, verbose=False)[0]
    run = trainer()
    run.fit(module, data)
    after = run.test(module, data, verbose=False)[0]
    return module, data, before, after


def test_it_learns_the_stories(trained):
    _, data, before, after = trained
    # a new model spreads its guesses over the vocabulary
    assert before["test/loss"] == pytest.approx(math.log(data.vocab_size), abs=0.4)
    assert after["test/loss"] < before["test/loss"] - 2
    assert after["test/perplexity"] == pytest.approx(math.exp(after["test/loss"]), rel=1e-4)


def test_the_targets_of_a_stream_are_used_as_they_come(trained):
    module, data, _, _ = trained
    module.eval()
    x, y = next(iter(data.val_dataloader()))
    with torch.no_grad():
        logits = module(x)
        losses, valid = module.token_losses(logits, y)
    assert valid.all()  # the last position has a target too: the token behind the window
    torch.testing.assert_close(losses.mean(), F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    shifted_twice = F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
    assert shifted_twice > losses.mean() + 1


def test_the_loss_falls_along_the_window(trained):
    module, _, _, after = trained
    curve = module.test_curve.compute()
    assert curve.shape == (32,)
    assert float(curve.mean()) == pytest.approx(after["test/loss"], rel=1e-4)  # every window is full
    assert curve[16:].mean() < curve[:4].mean()


def test_it_continues_a_text_in_its_grammar(trained):
    module, data, _, _ = trained
    words = data.tokenizer
    prompt = "ann has a red ball . one day ann takes the"
    start = torch.tensor([words(prompt)["input_ids"]])
    text = module.model.generate(start, max_new_tokens=12, temperature=0)
    assert text.shape == (1, start.shape[1] + 12)
    assert torch.equal(text[:, : start.shape[1]], start)
    new = words.decode(text[0, start.shape[1] :].tolist()).split()
    assert new[0] in THINGS
    assert new[1:3] == ["to", "the"]
    assert new[3] in PLACES
    # what it would say next is what it says next when it is told its own words
    with torch.no_grad():
        again = module.model.eval()(text[:, :-1]).argmax(dim=-1)[:, start.shape[1] - 1 :]
    assert torch.equal(again, text[:, start.shape[1] :])


def test_what_kind_of_word_comes_next_is_known(trained):
    module, data, _, _ = trained
    words = data.tokenizer
    module.eval()
    for prompt, kind in (
        ("[EOS] once there was", PEOPLE),
        ("[EOS] ann lives by the", PLACES),
        ("[EOS] once there was ben who lived by the farm . ben has a", COLORS),
        ("[EOS] once there was ben who lived by the farm . ben has a white", THINGS),
    ):
        with torch.no_grad():
            probs = module(torch.tensor([words(prompt)["input_ids"]]))[0, -1].softmax(dim=0)
        assert float(probs[torch.tensor(words.convert_tokens_to_ids(list(kind)))].sum()) > 0.8, prompt


def test_a_story_ends_where_its_end_is_said(trained):
    module, data, _, _ = trained
    end = data.tokenizer.eos_token_id
    start = torch.full((8, 1), end)
    generator = torch.Generator().manual_seed(0)
    text = module.model.generate(start, 120, temperature=0.7, eos_token_id=end, generator=generator)
    assert ((text[:, 1:] == end).any(dim=1)).sum() >= 6  # stories of 30 to 90 words
    for row in text[:, 1:].tolist():
        if end in row:
            first = row.index(end)
            assert first > 5  # no sentence of the stories is shorter
            assert row[first:] == [end] * (len(row) - first)


def test_a_file_of_tokens_is_trained_on(tmp_path):
    # 0 1 2 ... 12 0 1 ...: the next token follows from the one before
    np.tile(np.arange(13, dtype=np.uint16), 100).tofile(tmp_path / "train.bin")
    seed_everything(0, verbose=False)
    data = TokenStreamDataModule(
        train_bin=str(tmp_path / "train.bin"), block_size=16, batch_size=16, steps_per_epoch=40
    )
    network = MemoryMosaicLM(13, 16, 2, 1, 32, attn_dropout=0, resid_dropout=0)
    module = MemoryMosaics(network, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-2, betas=(0.9, 0.95)))
    run = trainer()
    run.fit(module, data)
    result = run.test(module, data, verbose=False)[0]
    assert result["test/loss"] < 0.3
    text = module.model.generate(torch.tensor([[4, 5, 6]]), 9, temperature=0)
    assert text.tolist() == [[*range(4, 13), 0, 1, 2]]
