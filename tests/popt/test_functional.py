"""PopT's functions: the test vectors, plain forms, gradients, invariances, statistics of the draws, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_methods.popt import (
    attention_rollout,
    corrupt_channels,
    electrode_position_encoding,
    lengths_to_pad_mask,
    popt_pretraining_loss,
    ramp_up_factor,
    sample_ensembles,
    sample_windows,
    sinusoidal_table,
    stft_features,
)
from tests.ddp import assert_two_processes_agree
from tests.vectors import load_cases


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


# vectors ("network" is in test_modules.py)


def test_the_vectors_cover_every_kind():
    assert {case.function for case in load_cases("popt")} == {"position", "network", "loss", "stft", "rollout"}


@pytest.mark.parametrize("case", load_cases("popt", "position"), ids=repr)
def test_position_vectors(case):
    code = electrode_position_encoding(**case.inputs)
    torch.testing.assert_close(code, case.outputs["encoding"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", load_cases("popt", "loss"), ids=repr)
@pytest.mark.parametrize("squeezed", [False, True])
def test_loss_vectors(case, squeezed):
    inputs = {**case.inputs, "replace_label": case.inputs["replace_label"][:, 1:]}
    if squeezed:
        inputs |= {"cls_logit": inputs["cls_logit"][:, 0], "token_logit": inputs["token_logit"][..., 0]}
    total, ensemble, channel = popt_pretraining_loss(**inputs)
    for value, name in ((total, "loss"), (ensemble, "cls_loss"), (channel, "replace_loss")):
        assert value.item() == pytest.approx(case.outputs[name], rel=1e-9, abs=0)


@pytest.mark.parametrize("case", load_cases("popt", "stft"), ids=repr)
def test_stft_vectors(case):
    result = stft_features(case.inputs["signal"])
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.float(), case.outputs["spectrogram"], rtol=0, atol=1e-4)
    single = stft_features(case.inputs["signal"].float())
    torch.testing.assert_close(single, case.outputs["spectrogram"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", load_cases("popt", "rollout"), ids=repr)
def test_rollout_vectors(case):
    result = attention_rollout(list(case.inputs["attention"]))
    torch.testing.assert_close(result, case.outputs["rollout"], rtol=0, atol=1e-9)


# positions


def test_the_table_is_sines_and_cosines_by_the_formula():
    table = sinusoidal_table(7, 6)
    for p in range(7):
        for i in range(3):
            w = 10000 ** (-2 * i / 6)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(p * w), abs=1e-6)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(p * w), abs=1e-6)


def test_a_code_is_four_parts_and_cls_is_at_the_origin():
    coords, seq_id = torch.tensor([[[3, 5, 7], [3, 5, 7]]]), torch.tensor([[0, 1]])
    code, table = electrode_position_encoding(coords, seq_id, 32, max_len=10), sinusoidal_table(10, 8)
    torch.testing.assert_close(code[0, 0], table[0].repeat(4))
    torch.testing.assert_close(code[0, 2], torch.cat([table[3], table[5], table[7], table[1]]))
    torch.testing.assert_close(code[0, 1, :24], code[0, 2, :24])  # they differ by the ensemble alone
    assert not torch.allclose(code[0, 1, 24:], code[0, 2, 24:])


def test_lengths():
    assert lengths_to_pad_mask(torch.tensor([0, 2]), 3).tolist() == [[True] * 3, [False, False, True]]
    assert lengths_to_pad_mask(torch.tensor([1, 2])).shape == (2, 2)


# pretraining samples


def test_windows_follow_or_are_anywhere():
    index = torch.randint(0, 9, (20000,), generator=generator())
    second, third, label = sample_windows(index, 10, generator(1))
    assert torch.equal(second[label == 0], index[label == 0] + 1)
    assert 0.48 < label.float().mean() < 0.52
    for windows in (second[label == 1], third):  # all windows, each as often
        share = windows.bincount(minlength=10) / len(windows)
        assert (share - 0.1).abs().max() < 0.015
    # by chance also the next one and the same one
    assert (second[label == 1] == index[label == 1] + 1).any()
    assert (second[label == 1] == index[label == 1]).any()


@given(channels=st.integers(2, 40), sizes=st.lists(st.integers(2, 60), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_ensembles_are_sorted_disjoint_halves(channels, sizes, seed):
    a, b = sample_ensembles(channels, sizes, generator(seed))
    total = len(a) + len(b)
    assert total in {min(size, channels) for size in sizes}
    assert len(a) == total // 2
    assert torch.equal(a, a.sort().values)
    assert torch.equal(b, b.sort().values)
    both = torch.cat([a, b])
    assert len(both.unique()) == total
    assert both.min() >= 0
    assert both.max() < channels


def test_a_batch_of_ensembles_has_one_size_and_different_channels():
    a, b = sample_ensembles(30, [4, 8], generator(), batch=50)
    assert a.shape == b.shape
    assert len(a.unique(dim=0)) > 40
    assert torch.cat([a, b], 1).sort(dim=1).values.diff(dim=1).min() > 0
    # every channel as often in the first half as in the second
    share = a.flatten().bincount(minlength=30) / a.numel()
    assert share.max() < 0.12


def test_all_sizes_are_drawn():
    assert {len(torch.cat(sample_ensembles(50, [10, 20, 30], generator(s)))) for s in range(30)} == {10, 20, 30}


@pytest.mark.parametrize(("scored", "replaced", "genuine"), [("balanced", 0.1, 0.9 * 0.1), ("all", 0.2, 0.8)])
def test_corruption_happens_as_often_as_it_should(scored, replaced, genuine):
    x, alternative = torch.zeros(40000, 2), torch.ones(40000, 2)
    new, label = corrupt_channels(x, alternative, 0.2, scored, generator())
    share = label.bincount(minlength=3) / len(label)
    assert share[1].item() == pytest.approx(replaced, abs=0.01)
    assert share[2].item() == pytest.approx(genuine, abs=0.01)
    assert torch.equal(new[:, 0] == 1, label == 1)  # replaced rows, whole, and no others
    assert torch.equal(new[:, 0], new[:, 1])
    assert not x.any()


def test_corruption_of_indices_is_corruption_of_what_they_point_at():
    x, alternative = randn(5, 6, 3), randn(5, 6, 3, seed=1)
    rows = torch.arange(30).view(5, 6, 1)
    expected, label = corrupt_channels(x, alternative, 0.9, generator=generator(3))
    where, again = corrupt_channels(rows, rows + 30, 0.9, generator=generator(3))
    pool = torch.cat([x.flatten(0, 1), alternative.flatten(0, 1)])
    assert torch.equal(pool[where[..., 0]], expected)
    assert torch.equal(label, again)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extremes_of_corruption(p):
    _, label = corrupt_channels(torch.zeros(100, 1), torch.ones(100, 1), p, "all", generator())
    assert set(label.tolist()) == {1 if p else 2}


# loss


def plain_loss(cls_logit, token_logit, label, replace_label):
    """Sample by sample and channel by channel."""
    ensemble = sum(
        math.log1p(math.exp(-v if y else v)) for v, y in zip(cls_logit.tolist(), label.tolist(), strict=True)
    )
    scored = [
        math.log1p(math.exp(-v if y == 1 else v))
        for v, y in zip(token_logit.flatten().tolist(), replace_label.flatten().tolist(), strict=True)
        if y
    ]
    return ensemble / len(label), sum(scored) / max(len(scored), 1)


def test_loss_is_one_mean_over_all_scored_channels():
    cls_logit, token_logit, label = randn(3), randn(3, 4, seed=1), torch.tensor([0, 1, 1])
    replace_label = torch.tensor([[1, 2, 0, 0], [2, 2, 2, 1], [0, 0, 0, 1]])
    _, ensemble, channel = popt_pretraining_loss(cls_logit, token_logit, label, replace_label)
    expected = plain_loss(cls_logit, token_logit, label, replace_label)
    assert (ensemble.item(), channel.item()) == pytest.approx(expected)
    rows = [plain_loss(cls_logit, token_logit[i : i + 1], label, replace_label[i : i + 1])[1] for i in range(3)]
    assert channel.item() != pytest.approx(sum(rows) / 3)  # not a mean of the samples' means


def test_nothing_scored_costs_nothing_and_padding_may_hold_anything():
    token_logit = torch.tensor([[torch.inf, torch.nan, 0.5]], requires_grad=True)
    _, _, channel = popt_pretraining_loss(torch.zeros(1), token_logit, torch.ones(1), torch.tensor([[0, 0, 0]]))
    assert channel.item() == 0
    _, _, channel = popt_pretraining_loss(torch.zeros(1), token_logit, torch.ones(1), torch.tensor([[0, 0, 1]]))
    channel.backward()
    assert token_logit.grad[0, 2] < 0
    assert channel.item() == pytest.approx(math.log1p(math.exp(-0.5)))


def test_weights_of_the_two_questions():
    args = randn(2), randn(2, 3, seed=1), torch.tensor([0, 1]), torch.tensor([[1, 2, 0], [2, 0, 1]])
    total, ensemble, channel = popt_pretraining_loss(*args, ensemble_weight=0.5, channel_weight=3.0)
    torch.testing.assert_close(total, 0.5 * ensemble + 3 * channel)


def test_gradient_of_the_loss():
    label, replace_label = torch.tensor([0, 1]), torch.tensor([[1, 2, 0], [2, 0, 1]])
    logits = randn(2).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: popt_pretraining_loss(a, b, label, replace_label)[0], logits)


def test_half_precision_is_computed_in_float32():
    logits = randn(2, dtype=torch.bfloat16), randn(2, 3, dtype=torch.bfloat16)
    total, _, _ = popt_pretraining_loss(*logits, torch.tensor([0, 1]), torch.tensor([[1, 2, 0], [2, 0, 1]]))
    assert total.dtype == torch.float32


class Logits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(randn(5))


def _build():
    module = Logits()
    x, label = randn(6, 4, 5, seed=1), torch.tensor([0, 1, 1, 0, 1, 0])
    # Very different numbers of scored channels in the two halves.
    replace_label = torch.tensor([[1, 2, 1, 2], [2, 2, 2, 1], [1, 1, 2, 2], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])

    def loss_of(module, x, label, replace_label):
        logit = x @ module.weight
        return popt_pretraining_loss(logit[:, 0], logit, label, replace_label)[0]

    return module, loss_of, (x, label, replace_label)


def test_two_processes_average_over_the_scored_channels_of_both():
    assert_two_processes_agree(_build, tolerance=1e-9)
    assert_two_processes_agree(_build, sizes=(2, 4), tolerance=1e-9)


# spectrogram


def test_stft_of_a_tone_is_in_its_bin_and_is_standardised():
    time = torch.arange(4096) / 2048
    envelope = 1 + 0.5 * torch.sin(2 * math.pi * time)
    signal = torch.stack([envelope * torch.sin(2 * math.pi * 51.2 * time), torch.zeros(4096)])
    features = stft_features(signal.double(), trim=0)
    assert features.shape == (2, 4096 // 50 + 2, 40)
    torch.testing.assert_close(features[0].mean(dim=0), torch.zeros(40).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(features[0].std(dim=0, correction=0), torch.ones(40).double(), rtol=0, atol=1e-9)
    assert not features[1].any()  # a silent channel is 0, not nan
    trimmed = stft_features(signal.double(), trim=10)
    assert torch.equal(trimmed, features[:, 10:-10])  # standardised before the ends are dropped
    # scale and offset of the result do not depend on the signal's scale
    torch.testing.assert_close(stft_features(100 * signal[:1].double()), trimmed[:1], rtol=0, atol=1e-9)


def test_stft_has_a_gradient():
    signal = randn(1, 60).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: stft_features(s, n_freq=3, nperseg=16, noverlap=8, trim=1), signal)


# rollout


def test_rollout_by_loops_and_of_padding():
    attention = [randn(2, 3, 4, 4, seed=s).softmax(-1) for s in range(3)]
    flow = attention_rollout(attention)
    torch.testing.assert_close(flow.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    for b in range(2):
        expected = torch.eye(4, dtype=torch.float64)
        for layer in attention:
            mean = sum(layer[b, h] for h in range(3)) / 3 + torch.eye(4)
            expected = (mean / mean.sum(1, keepdim=True)) @ expected
        torch.testing.assert_close(flow[b], expected)
    for layer in attention:
        layer[:, :, :3, 3] = 0  # nobody attends to the last token ...
        layer /= layer.sum(-1, keepdim=True)
    assert not attention_rollout(attention)[:, :3, 3].any()  # ... so nothing of it reaches the others


# schedule


def test_schedule():
    total, warmup, gamma = 400_000, 0.025, 0.99
    w = int(warmup * total)
    stair = int((total - w) / 100)
    for step in (0, 1, w - 1, w, w + stair - 1, w + stair, w + 57 * stair + 3, total):
        expected = step / w if step < w else gamma ** math.floor((step - w) / stair)
        assert ramp_up_factor(step, total, warmup, gamma) == pytest.approx(expected, rel=1e-12)
    assert ramp_up_factor(0, 10, 0.0) == 1.0
    assert ramp_up_factor(9, 10, 0.0, 0.5) == 0.5**9  # runs shorter than a hundred steps: a stair each step


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sinusoidal_table(3, 5), "even"),
        (lambda: sinusoidal_table(0, 4), "max_len"),
        (lambda: electrode_position_encoding(torch.zeros(1, 2, 3).long(), torch.zeros(1, 2).long(), 12), "by 8"),
        (lambda: electrode_position_encoding(torch.zeros(1, 2, 2).long(), torch.zeros(1, 2).long(), 8), "axes=3"),
        (lambda: electrode_position_encoding(torch.zeros(1, 2, 3).long(), torch.zeros(1, 3).long(), 8), "seq_id"),
        (lambda: electrode_position_encoding(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), 8), "integers"),
        (
            lambda: electrode_position_encoding(torch.tensor([[[-7, 0, 12]]]), torch.zeros(1, 1).long(), 8, 10),
            "from -7 to 12",
        ),
        (lambda: lengths_to_pad_mask(torch.tensor([3]), 2), "lengths"),
        (lambda: sample_windows(torch.tensor([0]), 1), "n_windows"),
        (lambda: sample_windows(torch.tensor([4]), 5), "next window"),
        (lambda: sample_ensembles(1, [2]), "n_channels"),
        (lambda: sample_ensembles(4, [1]), "sizes"),
        (lambda: sample_ensembles(4, []), "sizes"),
        (lambda: corrupt_channels(torch.zeros(3, 2), torch.zeros(2, 2)), r"\[3, 2\] and \[2, 2\]"),
        (lambda: corrupt_channels(torch.zeros(3, 2), torch.zeros(3, 2), 1.5), "p must"),
        (lambda: corrupt_channels(torch.zeros(3, 2), torch.zeros(3, 2), scored="some"), "scored"),
        (lambda: stft_features(torch.zeros(2, 399)), "399 samples"),
        (lambda: stft_features(torch.zeros(2, 400)), "trim=10 leaves none"),
        (lambda: stft_features(torch.zeros(400)), "signal"),
        (lambda: attention_rollout([]), "at least one layer"),
        (lambda: attention_rollout([torch.zeros(1, 1, 2, 3)]), "columns=2"),
        (lambda: ramp_up_factor(0, 0), "total_steps"),
        (lambda: ramp_up_factor(0, 5, 1.0), "warmup"),
        (lambda: ramp_up_factor(0, 5, gamma=0.0), "gamma"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replace_label": torch.tensor([[0, 3, 0]] * 2)}, "got 3"),
        ({"replace_label": torch.tensor([[0, -1, 0]] * 2)}, "got -1"),
        ({"label": torch.zeros(3)}, "label"),
        ({"cls_logit": torch.zeros(2, 2)}, "cls_logit"),
        ({"token_logit": torch.zeros(2, 4)}, "token_logit"),
    ],
)
def test_bad_input_of_the_loss(changes, message):
    good = {
        "cls_logit": torch.zeros(2),
        "token_logit": torch.zeros(2, 3),
        "label": torch.zeros(2),
        "replace_label": torch.zeros(2, 3).long(),
    }
    assert torch.isfinite(popt_pretraining_loss(**good)[0])
    with pytest.raises(ValueError, match=message):
        popt_pretraining_loss(**{**good, **changes})


def test_binary_cross_entropy_is_pytorchs():
    cls_logit, label = randn(5), torch.tensor([0, 1, 1, 0, 1])
    _, ensemble, _ = popt_pretraining_loss(cls_logit, randn(5, 2), label, torch.zeros(5, 2).long())
    torch.testing.assert_close(ensemble, F.binary_cross_entropy_with_logits(cls_logit, label.double()))
