"""PopT's maps: connectivity channel by channel, rollout, regions, and what they refuse."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F

from lightning_methods.popt import (
    PopTBatch,
    PopTFinetuning,
    PopTPretraining,
    PopulationMaps,
    attention_rollout,
    channel_connectivity,
    channel_correlation,
    channel_importance,
    channel_task_batch,
    region_importance,
)
from tests.popt.test_module import QUIET, data, small


def population(n: int = 6, channels: int = 4, seed: int = 0) -> PopTBatch:
    generator = torch.Generator().manual_seed(seed)
    coords = torch.randint(200, (channels, 3), generator=generator).expand(n, -1, -1)
    zeros = torch.zeros(n, channels, dtype=torch.long)
    return PopTBatch(torch.randn(n, channels, 6, generator=generator), coords, zeros, zeros.bool(), torch.zeros(n))


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_connectivity_by_removing_one_channel_after_the_other(chunk_size):
    model, batch = small(), channel_task_batch(population(), 0.5, torch.Generator().manual_seed(1))
    result = channel_connectivity(model, batch, chunk_size)
    assert model.training  # as before
    model.eval()

    def losses(keep: list[int]) -> dict[int, torch.Tensor]:
        logit = model(batch.x[:, keep], batch.coords[:, keep], batch.seq_id[:, keep]).token_logit[..., 0]
        target = (batch.replace_label[:, keep] == 1).float()
        each = F.binary_cross_entropy_with_logits(logit, target, reduction="none").mean(0)
        return dict(zip(keep, each, strict=True))

    whole = losses([0, 1, 2, 3])
    for a in range(4):
        without = losses([c for c in range(4) if c != a])
        for b in range(4):
            expected = 0.0 if a == b else (without[b] - whole[b]).item()
            assert result[a, b].item() == pytest.approx(expected, abs=1e-5)
    assert not torch.allclose(result, result.T)
    assert not result.requires_grad


def test_connectivity_of_what_is_scored():
    batch = population()
    label = torch.full((6, 4), 2)
    label[:, 1] = 0
    label[::2, 2] = 0
    result = channel_connectivity(small(), batch._replace(replace_label=label))
    assert result[[0, 2, 3], 1].isnan().all()
    assert result[1, 1] == 0
    part = PopTBatch(*(None if v is None else v[1::2] for v in batch))
    torch.testing.assert_close(result[:, 2], channel_connectivity(small(), part)[:, 2])  # None scores all as genuine


def test_posing_the_channel_wise_task():
    batch = population(50, 7)
    posed = channel_task_batch(batch, 0.3, torch.Generator().manual_seed(0))
    replaced = posed.replace_label == 1
    assert set(posed.replace_label.unique().tolist()) == {1, 2}
    assert 0.2 < replaced.float().mean() < 0.4
    assert torch.equal(posed.x[~replaced], batch.x[~replaced])
    rows = {tuple(row): (i, c) for i, sample in enumerate(batch.x.tolist()) for c, row in enumerate(sample)}
    for i, c in replaced.nonzero().tolist():
        other, channel = rows[tuple(posed.x[i, c].tolist())]
        assert other != i
        assert channel != c


def test_importance_is_the_rollout_to_cls():
    module, batch = PopTFinetuning(small()), population()
    padded = batch._replace(pad_mask=torch.arange(4).expand(6, -1) >= 3)
    result = channel_importance(module, padded)
    model = module.model.eval()
    attention = model(*padded[:4], return_attention=True).attention
    torch.testing.assert_close(result, attention_rollout(attention)[:, 0, 1:])
    assert not result[:, 3].any()
    assert (result[:, :3] > 0).all()
    assert (result.sum(1) < 1).all()


def test_regions():
    importance = torch.tensor([[0.2, 0.4, 0.1], [0.2, 0.0, 0.3]])
    result = region_importance(importance, ["b", "a", "b"])
    assert result == pytest.approx({"a": 1.0, "b": 1.0})
    assert list(region_importance(torch.tensor([1.0, 4.0, 2.0]), ["x", "y", "x"])) == ["y", "x"]


def test_correlation_of_channels():
    x = torch.randn(500, 3, 1, generator=torch.Generator().manual_seed(0))
    x[:, 2] = 0.6 * x[:, 0] + 0.8 * x[:, 2] + 5
    torch.testing.assert_close(channel_correlation(x), torch.corrcoef(x[..., 0].T).square())
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1))).Q
    y = torch.randn(100, 1, 4, generator=torch.Generator().manual_seed(2))
    both = torch.cat([y, -3 * y @ rotation, torch.zeros_like(y)], dim=1)
    expected = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0]])
    torch.testing.assert_close(channel_correlation(both), expected)  # blind to rotation and scale, 0 for silence


def test_maps_are_written_for_the_tested_subject(tmp_path):
    source = data()
    module = PopTPretraining(small())
    trainer = Trainer(logger=CSVLogger(tmp_path), callbacks=[PopulationMaps(num_windows=10)], **QUIET)
    trainer.test(module, source, verbose=False)
    (path,) = tmp_path.rglob("maps.pt")
    ((subject, maps),) = torch.load(path, weights_only=True).items()
    (recording,) = source.test_set.recordings
    assert subject == recording.subject
    assert torch.equal(maps["coords"], recording.coords)
    assert maps["connectivity"].shape == (8, 8)
    assert maps["connectivity"].isfinite().all()
    windows = recording.embeddings[torch.linspace(0, recording.n_windows - 1, 10).long()]
    torch.testing.assert_close(maps["correlation"], channel_correlation(windows))
    batch = population(10, 8)._replace(x=windows, coords=recording.coords.expand(10, -1, -1))
    torch.testing.assert_close(maps["importance"], channel_importance(module, batch).mean(0))


@pytest.mark.bad_input
def test_bad_input():
    batch = population()
    padding = batch.pad_mask.clone()
    padding[0, 3] = True
    coords = batch.coords.clone()
    coords[0, 0, 0] += 1
    one = PopTBatch(*(None if v is None else v[:, :1] if v.dim() > 1 else v for v in batch))
    cases = [
        (lambda: channel_connectivity(small(), batch._replace(pad_mask=padding)), "padding"),
        (lambda: channel_connectivity(small(), batch._replace(coords=coords)), "same channels"),
        (lambda: channel_connectivity(small(), one), "two channels"),
        (lambda: channel_connectivity(small(), batch, 0), "chunk_size"),
        (lambda: channel_connectivity(torch.nn.Linear(1, 1), batch), "PopulationTransformer"),
        (lambda: channel_task_batch(batch._replace(pad_mask=padding)), "padding"),
        (lambda: channel_task_batch(one), "two channels"),
        (lambda: region_importance(torch.ones(2, 3), ["a"]), "3 channels"),
        (lambda: region_importance(torch.zeros(2, 1), ["a"]), "positive"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
