from __future__ import annotations

import pytest
import torch

from datamodules import SensitiveToyDataModule, ToyDependenceDataModule
from lightning_methods.core.batches import GroupBatch


def parts(data):
    data.setup()
    return [
        next(iter(loader)) for loader in (data.train_eval_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]


@pytest.mark.parametrize("kind", ["sin3", "product", "xor"])
def test_targets_are_the_stated_function(kind):
    data = ToyDependenceDataModule(kind, n=50, p=5, noise=0.0, n_val=20, n_test=30, standardize=False)
    for (x, y), n in zip(parts(data), (50, 20, 30), strict=True):
        a, b, c = x[:, 0], x[:, 1], x[:, 2]
        expected = {
            "sin3": a.sin() + b.sin() + c.sin(),
            "product": a * b + (a * c).sin(),
            "xor": a.sign() * b.sign() * c.abs(),
        }
        assert x.shape == (n, 5)
        torch.testing.assert_close(y, expected[kind])


def test_sines_share_one_hidden_variable():
    data = ToyDependenceDataModule("sines", n=100, noise=0.0, standardize=False)
    assert data.num_features == 240
    x, y = parts(data)[0]
    # columns with b = 2 and c = 1: a sin(2 u + 1) for all a, so that they are multiples of each other
    torch.testing.assert_close(x[:, 59] * 20, x[:, 239])
    assert 1.5 < x[:, 239].abs().max() <= 2
    assert y.abs().max() <= 1


def test_inputs_are_standardised_by_the_training_rows():
    train, val, _ = parts(ToyDependenceDataModule("sin3", n=200))
    torch.testing.assert_close(train[0].mean(0), torch.zeros(10), rtol=0, atol=1e-5)
    torch.testing.assert_close(train[0].std(0), torch.ones(10), rtol=0, atol=1e-5)
    assert (val[0].mean(0).abs() > 1e-4).all()


def test_seed_draws_the_data_and_the_parts_are_different():
    first, again, other = (parts(ToyDependenceDataModule("xor", n=40, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[2][1], again[2][1])
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[1][0][:40], first[2][0][:40])


def test_full_batch_by_default_and_minibatches_on_request():
    data = ToyDependenceDataModule(n=100)
    data.setup()
    assert [len(y) for _, y in data.train_dataloader()] == [100]
    data = ToyDependenceDataModule(n=100, batch_size=32, eval_batch_size=200)
    data.setup()
    assert [len(y) for _, y in data.train_dataloader()] == [32, 32, 32, 4]
    assert [len(y) for _, y in data.val_dataloader()] == [200, 100]


def test_sensitive_attribute_and_its_proxies():
    data = SensitiveToyDataModule(n=4000, noise=0.0, standardize=False)
    batch = parts(data)[0]
    assert isinstance(batch, GroupBatch)
    assert batch.group.dtype == torch.int64
    s = batch.group.float()
    torch.testing.assert_close(batch.y, 1.5 * s + torch.sin(1.5 * batch.x[:, 0]))
    assert s.mean().item() == pytest.approx(0.5, abs=0.03)
    for proxy in (1, 2):
        assert (batch.x[:, proxy] - s).std().item() == pytest.approx(0.3, abs=0.02)
    assert (batch.x[:, 1] - s).dot(batch.x[:, 2] - s).abs().item() / 4000 < 0.01
    assert abs(torch.corrcoef(torch.stack([batch.x[:, 0], s]))[0, 1].item()) < 0.05


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ToyDependenceDataModule("sin"), "kind must be one of.*Did you mean 'sin3'"),
        (lambda: ToyDependenceDataModule(p=2), "p must be"),
        (lambda: ToyDependenceDataModule("sines", p=10), "has 240 variables, got p=10"),
        (lambda: ToyDependenceDataModule(n=1), "n must be"),
        (lambda: ToyDependenceDataModule(noise=-1.0), "noise must be"),
        (lambda: SensitiveToyDataModule(p=2), "p must be"),
        (lambda: SensitiveToyDataModule(proxy_noise=-1.0), "proxy_noise must be"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
