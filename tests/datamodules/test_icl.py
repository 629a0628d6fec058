from __future__ import annotations

import pytest
import torch

from datamodules import InContextDFADataModule
from datamodules.icl import sample_automata, sample_strings
from lightning_methods.memory_mosaics.functional import regular_language_accuracy, total_variation

SEPARATOR = 10


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ready(**options) -> InContextDFADataModule:
    data = InContextDFADataModule(**{"num_train": 64, "num_val": 16, **options})
    data.setup("fit")
    return data


# automata


def test_automata_are_of_the_sizes_asked_for():
    table = sample_automata(2000, 10, 4, 8, 4, draw())
    assert table.shape == (2000, 8, 10)
    legal = table >= 0
    degree = legal.sum(dim=2)
    assert degree.unique().tolist() == [1, 2, 3, 4]
    # uniform over 1..4, which no alphabet of 4 or more symbols and no 4 or more states cut
    torch.testing.assert_close(
        torch.bincount(degree.flatten(), minlength=5)[1:] / degree.numel(), torch.full((4,), 0.25), atol=0.02, rtol=0
    )
    targets = table.flatten(1).max(dim=1).values
    assert int(targets.max()) == 7
    assert int(table[:, 0].max(dim=1).values.min()) >= 0  # from the first state it always goes on
    used = legal.any(dim=1).sum(dim=1)
    assert int(used.min()) >= 1
    assert int(used.max()) <= 10
    # targets of one state are different
    for row in table[:50].flatten(0, 1):
        reached = row[row >= 0].tolist()
        assert len(set(reached)) == len(reached)


def test_states_that_do_not_exist_are_not_reached():
    table = sample_automata(300, 10, 5, 5, 4, draw())
    assert int(table.max()) == 4
    small = sample_automata(300, 10, 2, 6, 4, draw())
    degree = (small >= 0).sum(dim=2)
    largest = small.flatten(1).max(dim=1).values
    # an automaton of two states has at most two ways out of each
    assert (degree[largest == 1] <= 2).all()
    assert (largest == 1).any()


def test_the_alphabet_is_part_of_the_symbols_in_all_states():
    table = sample_automata(500, 10, 8, 8, 4, draw())
    used = (table >= 0).any(dim=1).sum(dim=1)
    assert int(used.min()) < 6  # small alphabets occur, though eight states could use every symbol
    assert (used == 10).any()


# strings


def test_every_symbol_is_a_legal_step_of_the_automaton():
    table = sample_automata(40, 10, 4, 8, 4, draw())
    tokens, legal, probs = sample_strings(table, 96, 20, draw(1))
    assert tokens.shape == (40, 96)
    assert legal.shape == probs.shape == (40, 96, 11)
    for row in range(40):
        state, length = 0, 0
        assert tokens[row, 0] != SEPARATOR
        for t, token in enumerate(tokens[row].tolist()):
            if token == SEPARATOR:
                assert 1 <= length <= 20
                state, length = 0, 0
            else:
                assert table[row, state, token] >= 0
                state, length = int(table[row, state, token]), length + 1
            assert torch.equal(legal[row, t, :10], table[row, state] >= 0)
    assert not legal[..., SEPARATOR].any()
    torch.testing.assert_close(probs.sum(dim=2), torch.ones(40, 96))
    assert torch.equal(probs > 0, legal)
    torch.testing.assert_close(probs.max(dim=2).values, 1 / legal.sum(dim=2))


def test_lengths_and_steps_are_uniform():
    table = torch.tensor([0, 0, 0, 0, -1]).expand(500, 1, 5)
    tokens, _, _ = sample_strings(table, 400, 4, draw())
    share = torch.bincount(tokens[tokens < 5].flatten(), minlength=5) / (tokens < 5).sum()
    torch.testing.assert_close(share, torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0]), atol=0.01, rtol=0)
    ends = (tokens == 5).float().mean()
    assert float(ends) == pytest.approx(1 / 3.5, abs=0.01)  # strings of 1 to 4 symbols, 2.5 on average


# batches


def test_a_batch_has_what_a_causal_model_needs():
    data = ready(batch_size=8)
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "legal_mask", "true_probs", "scored_mask"}
    assert batch["input_ids"].shape == batch["scored_mask"].shape == (8, 96)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert int(batch["input_ids"].max()) < data.vocab_size == 11
    one = data.train_set[3]
    assert one["legal_mask"].shape == (96, 11)
    assert torch.equal(one["input_ids"], data.train_set.__getitems__([3])["input_ids"][0])


def test_scored_is_the_second_half_where_a_symbol_comes_next():
    batch = ready(seq_len=21, max_string=3).train_set.__getitems__(range(64))
    tokens, scored = batch["input_ids"], batch["scored_mask"]
    assert not scored[:, :10].any()
    assert not scored[:, -1].any()  # nothing is known to come
    assert torch.equal(scored[:, 10:-1], tokens[:, 11:] != SEPARATOR)
    # a symbol after the separator counts, and the one that did come was legal
    assert scored[tokens == SEPARATOR].any()
    follows = batch["legal_mask"][:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    assert follows[scored[:, :-1]].all()


def test_who_knows_the_automaton_is_perfect_and_who_guesses_is_not():
    batch = ready().val_set.__getitems__(range(16))
    legal, scored = batch["legal_mask"], batch["scored_mask"]
    known = batch["true_probs"].clamp_min(1e-9).log()
    assert regular_language_accuracy(known, legal, scored) == 1
    assert float(total_variation(known, batch["true_probs"], scored)) < 1e-5
    guess = torch.randn(legal.shape, generator=draw())
    assert 0.1 < float(regular_language_accuracy(guess, legal, scored)) < 0.4
    # the answer belongs to its own position: one step late it is wrong
    late = known.roll(1, dims=1)
    assert float(regular_language_accuracy(late, legal, scored)) < 0.8


def test_the_seed_draws_everything_and_splits_have_their_own_automata():
    first, again, other = ready(), ready(), ready(seed=1)
    for split in ("train_set", "val_set", "test_set"):
        assert torch.equal(getattr(first, split).source, getattr(again, split).source)
        assert not torch.equal(getattr(first, split).source, getattr(other, split).source)
    parts = [
        ready(num_train=16, num_val=16, num_test=16).__getattribute__(n) for n in ("train_set", "val_set", "test_set")
    ]
    masks = [part.extras["legal"] for part in parts]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
    # a longer training set does not change validation
    assert torch.equal(ready(num_train=32).val_set.source, first.val_set.source)


def test_the_order_is_new_in_every_epoch():
    loader = ready(batch_size=64).train_dataloader()
    one, two = (next(iter(loader))["input_ids"] for _ in range(2))
    assert not torch.equal(one, two)
    assert sorted(one.tolist()) == sorted(two.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_symbols": 1}, "num_symbols"),
        ({"min_states": 0}, "min_states"),
        ({"min_states": 5, "max_states": 4}, "max_states"),
        ({"max_out_degree": 0}, "max_out_degree"),
        ({"seq_len": 1}, "seq_len"),
        ({"max_string": 0}, "max_string"),
        ({"num_train": 0}, "num_train"),
        ({"num_val": 0}, "num_val"),
        ({"num_test": 0}, "num_test"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        InContextDFADataModule(**options)
