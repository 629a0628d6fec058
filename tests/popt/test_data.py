"""PopT's samples: what they are made of, that they are the same when they should be, padding, recordings on disk."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_methods.popt import (
    PopTBatch,
    PopulationPairs,
    PopulationWindows,
    Recording,
    collate_population,
    embed_recording,
    pack_recordings,
)
from lightning_methods.popt.data import WindowFiles, merge_populations, window_rows


def recording(windows: int = 20, channels: int = 12, number: int = 0, labels: bool = False) -> Recording:
    """An embedding that says where it is from: recording, window, channel."""
    w, c = torch.meshgrid(torch.arange(windows), torch.arange(channels), indexing="ij")
    x = torch.stack([torch.full_like(w, number), w, c], dim=-1).float()
    coords = 10 * torch.arange(channels)[:, None] + torch.arange(3) + 100 * number
    return Recording(x, coords, torch.arange(windows) % 2.0 if labels else None, f"s{number}")


def pairs(**options) -> PopulationPairs:
    recordings = [recording(number=0), recording(30, 7, number=1)]
    return PopulationPairs(recordings, **{"ensemble_sizes": [4, 6, 10], "replace_probability": 0.3, **options})


def test_samples_are_two_ensembles_at_two_times():
    data = pairs()
    assert len(data) == 19 + 29
    seen = {"labels": set(), "replace": set(), "sizes": set()}
    for epoch in range(12):
        data.set_epoch(epoch)
        batch = data.__getitems__(list(range(0, 48, 3)))
        for i, row in enumerate(range(0, 48, 3)):
            number, first = data.rows[row].tolist()
            real = ~batch.pad_mask[i]
            x, ids, replaced = batch.x[i][real], batch.seq_id[i][real], batch.replace_label[i][real]
            kept = replaced != 1
            assert (x[:, 0] == number).all()
            channel = (batch.coords[i][real][:, 0] - 100 * number) // 10  # the place of the channel it stands for
            assert torch.equal(x[kept, 2].long(), channel[kept])
            assert (x[kept & (ids == 0), 1] == first).all()
            times = x[kept & (ids == 1), 1].unique()
            assert len(times) <= 1
            if batch.label[i] == 0 and len(times):
                assert times.item() == first + 1
            a, b = channel[ids == 0], channel[ids == 1]
            assert torch.equal(a, a.sort().values)
            assert torch.equal(b, b.sort().values)
            assert not set(a.tolist()) & set(b.tolist())
            assert len(a) == len(channel) // 2
            assert (x[~kept, 1].unique().numel()) <= 1  # all replacements of a sample come from one window
            seen["labels"].add(batch.label[i].item())
            seen["replace"] |= set(replaced.tolist())
            seen["sizes"].add((number, len(channel)))
    assert seen["labels"] == {0.0, 1.0}
    assert seen["replace"] == {0, 1, 2}
    assert {(0, 4), (0, 10), (1, 4), (1, 7)} <= seen["sizes"]


def test_a_training_batch_has_one_size():
    data = pairs(ensemble_sizes=[4, 6])
    for epoch in range(5):
        data.set_epoch(epoch)
        batch = data.__getitems__(list(range(48)))
        assert not batch.pad_mask.any()
        assert batch.x.shape[1] in (4, 6)


def same(a: PopTBatch, b: PopTBatch) -> bool:
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_training_samples_change_with_the_epoch_and_with_nothing_else():
    data, rows = pairs(), [3, 40, 8]
    first = data.__getitems__(rows)
    torch.rand(7)
    assert same(data.__getitems__(rows), first)
    data.set_epoch(1)
    assert not same(data.__getitems__(rows), first)
    assert not same(pairs(seed=1).__getitems__(rows), first)


def test_evaluation_samples_belong_to_their_row():
    data = pairs(training=False)
    together = data.__getitems__([5, 30, 6])
    data.set_epoch(4)
    for i, row in enumerate([5, 30, 6]):
        alone = data[row]
        real = ~together.pad_mask[i]
        for name in ("x", "coords", "seq_id", "replace_label"):
            assert torch.equal(getattr(together, name)[i][real], getattr(alone, name))
        assert together.label[i] == alone.label


def test_noise_on_the_positions_stays_inside():
    data = pairs(blur_std=50.0, max_position=120)
    batch, plain = data.__getitems__(list(range(19))), pairs().__getitems__(list(range(19)))
    assert batch.coords.dtype == torch.int64
    assert batch.coords.min() >= 0
    assert batch.coords.max() == 119
    assert (batch.coords != plain.coords).float().mean() > 0.9


def test_fixed_pairs_are_kept():
    rows = torch.tensor([[0, 2], [1, 4]])
    fixed = torch.tensor([[9, 15, 1], [5, 20, 0]])
    data = pairs(rows=rows, pairs=fixed, replace_probability=1.0)
    for epoch in range(5):
        data.set_epoch(epoch)
        batch = data.__getitems__([0, 1])
        assert batch.label.tolist() == [1.0, 0.0]
        for i in range(2):
            real, replaced = ~batch.pad_mask[i], batch.replace_label[i] == 1
            second = batch.x[i][real & ~replaced & (batch.seq_id[i] == 1), 1]
            assert (second == fixed[i, 0]).all()
            assert (batch.x[i][replaced, 1] == fixed[i, 1]).all()


def test_windows_have_all_channels_and_labels_in_order():
    recordings = [recording(6, 3, 0, labels=True), recording(4, 5, 1, labels=True)]
    data = PopulationWindows(recordings)
    rows = [9, 0, 7, 3]
    batch = data.__getitems__(rows)
    assert batch.replace_label is None
    assert batch.label.tolist() == data.labels[rows].tolist()
    assert not batch.seq_id.any()
    for i, row in enumerate(rows):
        number, window = data.rows[row].tolist()
        size = recordings[number].n_channels
        assert batch.pad_mask[i].tolist() == [False] * size + [True] * (5 - size)
        assert torch.equal(batch.x[i, :size], recordings[number].embeddings[window])
        assert not batch.x[i, size:].any()
        assert torch.equal(batch.coords[i, :size], recordings[number].coords)
    with pytest.raises(ValueError, match="label for every window"):
        PopulationWindows([recording()])


def test_chosen_channels():
    chosen = torch.tensor([7, 2, 5])
    whole = recording(6, 12)
    part = Recording(whole.embeddings, whole.coords[chosen], torch.zeros(6), "s0", chosen)
    batch = PopulationWindows([part]).__getitems__([1, 4])
    assert batch.x[0, :, 2].tolist() == [7, 2, 5]
    assert batch.coords[0, :, 0].tolist() == [70, 20, 50]


def test_collate_pads_as_merging_does():
    data = pairs(training=False)
    samples = [data[row] for row in (1, 20, 33, 4)]
    for multiple in (1, 16):
        one = collate_population(samples, multiple)
        singles = [PopTBatch(*(torch.as_tensor(v)[None] for v in sample)) for sample in samples]
        assert same(one, merge_populations(singles, multiple))
        assert one.x.shape[1] % multiple == 0
        assert one.pad_mask.sum(1).tolist() == [one.x.shape[1] - len(s.x) for s in samples]
    windows = PopulationWindows([recording(6, 3, labels=True)])
    assert collate_population([windows[0], windows[1]]).replace_label is None


def test_padding_to_a_multiple_leaves_one_shape():
    data = pairs(pad_to_multiple=16)
    shapes = set()
    for epoch in range(6):
        data.set_epoch(epoch)
        shapes.add(data.__getitems__([0, 1, 30]).x.shape)
    assert shapes == {(3, 16, 3)}


@pytest.mark.bad_input
def test_bad_options():
    for options, message in (
        ({"ensemble_sizes": [1]}, "ensemble_sizes"),
        ({"replace_probability": 2.0}, "replace_probability"),
        ({"scored": "some"}, "scored"),
        ({"blur_std": -1.0}, "blur_std"),
        ({"rows": torch.zeros(3)}, "rows"),
        ({"pairs": torch.zeros(3, 3).long()}, "pairs"),
        ({"pad_to_multiple": 0}, "pad_to_multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            pairs(**options)
    with pytest.raises(ValueError, match="1 windows and 12"):
        PopulationPairs([recording(1)])
    with pytest.raises(IndexError):
        pairs()[48]


# recordings


def test_embedding_a_recording_window_by_window():
    signal = torch.randn(3, 47, generator=torch.Generator().manual_seed(0))

    def encoder(rows: Tensor) -> Tensor:
        return torch.stack([rows.mean(1), rows[:, 0]], dim=1)

    for chunk in (1, 3, 99):
        result = embed_recording(signal, encoder, sampling_rate=10, window=1.0, step=0.5, chunk_size=chunk)
        assert result.shape == (8, 3, 2)
        for i in range(8):
            torch.testing.assert_close(result[i], encoder(signal[:, 5 * i : 5 * i + 10]))
    with pytest.raises(ValueError, match="fewer than the 60"):
        embed_recording(signal, encoder, sampling_rate=10, window=6.0)


def test_recordings_on_disk_read_as_in_memory(tmp_path):
    whole = recording(11, 5)
    folder = tmp_path / "source" / "sub_1" / "trial000"
    folder.mkdir(parents=True)
    for i, window in enumerate(whole.embeddings):  # "10.npy" comes after "9.npy"
        np.save(folder / f"{i}.npy", window.numpy())
    (path,) = pack_recordings(tmp_path / "source", tmp_path / "root")
    assert path == tmp_path / "root" / "recordings" / "sub_1" / "trial000.npy"
    windows, channels = torch.tensor([[10, 2, 2], [0, 9, 5]]), torch.tensor([[4, 0, 1], [3, 3, 2]])
    expected = whole.read(windows, channels)
    assert expected.shape == (2, 3, 3)
    forms = [np.load(path, mmap_mode="r"), WindowFiles([folder / f"{i}.npy" for i in range(11)])]
    for form in forms:
        disk = Recording(form, whole.coords)
        assert (disk.n_windows, disk.n_channels) == (11, 5)
        assert torch.equal(disk.read(windows, channels), expected)
        assert torch.equal(
            disk.between(4, 9).read(windows.clamp(0, 4), channels),
            whole.between(4, 9).read(windows.clamp(0, 4), channels),
        )
    with pytest.raises(FileNotFoundError, match="has no files"):
        pack_recordings(tmp_path / "root", tmp_path / "other")
    np.save(folder / "11.npy", np.zeros((4, 3)))
    with pytest.raises(ValueError, match="not one recording"):
        pack_recordings(tmp_path / "source", tmp_path / "again")


def test_rows():
    assert window_rows([recording(3), recording(2)], leave_out=1).tolist() == [[0, 0], [0, 1], [1, 0]]
