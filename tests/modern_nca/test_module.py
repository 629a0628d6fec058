from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer
from sklearn.metrics import roc_auc_score
from torch import nn

from datamodules import SklearnTabularDataModule, TabularCSVDataModule
from lightning_methods.cli import run
from lightning_methods.core import IndexedBatch
from lightning_methods.modern_nca import ModernNCA, SklearnBaseline, TabularBatch, TabularEncoder
from tests.ddp import run_two_processes
from tests.vectors import load_cases


def quiet_trainer(**kwargs) -> Trainer:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    return Trainer(accelerator="cpu", enable_model_summary=False, **{**options, **kwargs})


# vectors


def build(case) -> ModernNCA:
    config = {key.removeprefix("cfg."): value for key, value in case.inputs.items() if key.startswith("cfg.")}
    state = {key.removeprefix("state."): value for key, value in case.inputs.items() if key.startswith("state.")}
    outputs, temperature = config.pop("d_out"), config.pop("temperature")
    config.setdefault("num_embedding", "plr-lite" if "n_frequencies" in config else "none")
    encoder = TabularEncoder(**config, dropout=0.0).to(state["encoder.weight"].dtype)
    missing, unexpected = encoder.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(key.endswith("num_batches_tracked") for key in missing)
    classification = not case.inputs["candidate_y"].is_floating_point()
    model = ModernNCA(encoder, outputs if classification else None, temperature=temperature, sample_rate=1.0)
    return model.to(state["encoder.weight"].dtype)


def close(result, expected, dtype):
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(result, torch.as_tensor(expected, dtype=result.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("case", load_cases("modern_nca", "eval"), ids=repr)
def test_evaluation_vectors(case, chunk_size):
    model = build(case).eval()
    model.inference_chunk_size = chunk_size
    x, candidates = case.inputs["x"], (case.inputs["candidate_x"], case.inputs["candidate_y"])
    close(model.predict_from(x, *candidates).detach(), case.outputs["pred"], x.dtype)
    model.set_candidates(*candidates)
    close(model(x).detach(), case.outputs["pred"], x.dtype)


@pytest.mark.parametrize("case", load_cases("modern_nca", "train"), ids=repr)
def test_training_vectors(case):
    model = build(case).train()
    inputs, dtype = case.inputs, case.inputs["x"].dtype
    prediction = model.training_prediction(inputs["x"], inputs["y"], inputs["candidate_x"], inputs["candidate_y"])
    close(prediction.detach(), case.outputs["pred"], dtype)
    loss = model.loss(prediction, inputs["y"])
    close(loss.detach(), case.outputs["loss"], dtype)
    loss.backward()
    close(model.encoder.encoder.weight.grad, case.outputs["grad_encoder_weight"], dtype)
    if "running_mean_after" in case.outputs:
        close(model.encoder.post_encoder[0].block[0].running_mean, case.outputs["running_mean_after"], dtype)


# the encoder


def test_parameter_names_are_the_published_ones():
    names = set(TabularEncoder(3, 2, dim=4, n_blocks=1, d_block=5, n_frequencies=6, d_embedding=7).state_dict())
    block = {f"post_encoder.0.block.{i}.{kind}" for i in (0, 1, 4) for kind in ("weight", "bias")}
    norms = {
        f"{layer}.{kind}"
        for layer in ("post_encoder.0.block.0", "post_encoder.1")
        for kind in ("running_mean", "running_var", "num_batches_tracked")
    }
    embedding = {"num_embeddings.0.frequencies", "num_embeddings.1.weight", "num_embeddings.1.bias"}
    assert names == block | norms | embedding | {
        "encoder.weight",
        "encoder.bias",
        "post_encoder.1.weight",
        "post_encoder.1.bias",
    }


@pytest.mark.parametrize("num_embedding", ["plr-lite", "plr", "none"])
@pytest.mark.parametrize(("d_num", "d_cat"), [(3, 2), (3, 0), (0, 2)])
@pytest.mark.parametrize("n_blocks", [0, 2])
def test_encoder(d_num, d_cat, n_blocks, num_embedding):
    encoder = TabularEncoder(d_num, d_cat, dim=6, n_blocks=n_blocks, d_block=8, num_embedding=num_embedding)
    out = encoder(torch.randn(5, d_num + d_cat))
    assert out.shape == (5, 6)
    out.square().sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())
    assert (encoder.num_embeddings is None) == (num_embedding == "none" or d_num == 0)
    assert encoder.num_features == 6


def test_only_numbers_are_embedded():
    encoder = TabularEncoder(2, 3, dim=4, n_frequencies=5, d_embedding=7)
    assert encoder.encoder.in_features == 2 * 7 + 3
    x = torch.randn(6, 5)
    before = encoder(x)
    with torch.no_grad():
        encoder.num_embeddings[0].frequencies.zero_()  # the numbers are not seen any more
    changed = encoder(torch.cat([torch.randn(6, 2), x[:, 2:]], dim=1))
    assert torch.equal(changed, encoder(x))
    assert not torch.allclose(before, encoder(x))
    assert not torch.allclose(encoder(torch.cat([x[:, :2], torch.randn(6, 3)], dim=1)), encoder(x))


def test_frequencies_start_at_their_scale():
    encoder = TabularEncoder(50, n_frequencies=77, frequency_scale=0.3)
    assert encoder.num_embeddings[0].frequencies.std().item() == pytest.approx(0.3, rel=0.05)


@pytest.mark.bad_input
def test_encoder_rejects():
    for arguments, message in (
        ({"d_num": 0}, "at least one column"),
        ({"d_num": 2, "dropout": 1.0}, "dropout"),
        ({"d_num": 2, "n_blocks": -1}, "n_blocks"),
        ({"d_num": 2, "num_embedding": "plr_lite"}, "Did you mean 'plr-lite'"),
        ({"d_num": 2, "frequency_scale": 0.0}, "frequency_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            TabularEncoder(**arguments)
    with pytest.raises(ValueError, match=r"columns=3\], got \[4, 2\]"):
        TabularEncoder(2, 1)(torch.randn(4, 2))


# training


class Recorder(nn.Module):
    """The identity, which remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return x * self.scale


def stored(
    n: int = 40, columns: int = 3, num_classes: int = 3, **kwargs
) -> tuple[ModernNCA, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, columns, generator=generator), torch.randint(0, num_classes, (n,), generator=generator)
    model = ModernNCA(Recorder(), num_classes, **kwargs)
    model.set_candidates(x, y)
    model.log = lambda *args, **kwargs: None
    return model, x, y


def test_the_batch_is_never_sampled_and_samples_change():
    model, x, y = stored(sample_rate=0.5)
    index = torch.tensor([7, 0, 39, 12])
    sampled = []
    for step in range(30):
        model.encoder.seen.clear()
        model.training_step(TabularBatch(x[index], y[index], index), step)
        batch, others = model.encoder.seen
        assert torch.equal(batch, x[index])
        assert len(others) == 18  # floor(36 * .5)
        assert torch.cdist(others, batch, compute_mode="donot_use_mm_for_euclid_dist").min() > 0
        sampled.append(others)
    assert len(torch.cat(sampled).unique(dim=0)) == 36  # all others come up
    assert not torch.equal(sampled[0].sort(0).values, sampled[1].sort(0).values)


def test_no_row_sees_its_own_label():
    """A model that leaks fits any labels: here the own label must not enter a row's prediction."""
    model, x, y = stored(sample_rate=1.0, temperature=0.01)
    index = torch.arange(10)
    prediction = model.training_prediction(x[:10], y[:10], x[10:], y[10:])
    for i in range(10):
        other = y.clone()
        other[i] = (other[i] + 1) % 3
        changed = model.training_prediction(x[:10], other[:10], x[10:], y[10:])
        torch.testing.assert_close(changed[i], prediction[i])
    nearest = torch.cdist(x[:10], x).fill_diagonal_(torch.inf).argmin(dim=1)
    assert (prediction.argmax(dim=1) == y[nearest]).all()
    loss = model.training_step(TabularBatch(x[index], y[index], index), 0)
    assert loss > 0.5
    assert model.loss(model(x[index]), y[index]) < 0.01  # in evaluation a training row does find itself


def test_gradient_flows_through_queries_and_candidates():
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    model = ModernNCA(nn.Identity(), 2, sample_rate=1.0)
    batch, rest = x[:5].clone().requires_grad_(), x[5:].clone().requires_grad_()
    model.loss(model.training_prediction(batch, y[:5], rest, y[5:]), y[:5]).backward()
    assert (batch.grad.norm(dim=1) > 0).all()
    assert (rest.grad.norm(dim=1) > 0).all()


def test_two_passes_by_default_and_one_on_request():
    encoder = TabularEncoder(3, dim=4, n_blocks=1, num_embedding="none", dropout=0.0)
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    predictions = {}
    for joint, passes in ((False, 2), (True, 1)):
        model = ModernNCA(copy.deepcopy(encoder), 2, sample_rate=1.0, joint_forward=joint)
        predictions[joint] = model.training_prediction(x[:8], y[:8], x[8:], y[8:])
        assert int(model.encoder.post_encoder[0].block[0].num_batches_tracked) == passes
    assert not torch.allclose(predictions[False], predictions[True])


def test_a_batch_of_one_row():
    model = ModernNCA(TabularEncoder(3, dim=4, n_blocks=1), 2, sample_rate=0.5)
    x, y = torch.randn(9, 3), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0])
    assert torch.isfinite(model.training_prediction(x[:1], y[:1], x[1:], y[1:])).all()
    with pytest.raises(ValueError, match="leaves no candidate"):
        model.training_prediction(x[:1], y[:1], x[1:2], y[1:2])  # floor(1 * .5) = 0


def test_the_whole_table_as_one_batch():
    model, x, y = stored()
    index = torch.randperm(40)
    loss = model.training_step(TabularBatch(x[index], y[index], index), 0)
    assert torch.isfinite(loss)
    assert len(model.encoder.seen) == 1


@pytest.mark.bad_input
def test_training_rejects():
    model, x, y = stored()
    with pytest.raises(ValueError, match="WithIndex"):
        model.training_step((x[:4], y[:4]), 0)
    with pytest.raises(ValueError, match=r"index must be in 0..39"):
        model.training_step(TabularBatch(x[:4], y[:4], torch.tensor([0, 1, 2, -1])), 0)
    with pytest.raises(ValueError, match="twice"):
        model.training_step(TabularBatch(x[:4], y[:4], torch.tensor([0, 1, 2, 2])), 0)
    with pytest.raises(ValueError, match=r"index must have shape \[batch=4\]"):
        model.training_step(TabularBatch(x[:4], y[:4], torch.tensor([0, 1, 2])), 0)
    for arguments, message in (
        ({"temperature": 0.0}, "temperature"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"distance": "manhattan"}, "distance"),
        ({"num_classes": 1}, "num_classes"),
        ({"inference_chunk_size": 0}, "inference_chunk_size"),
    ):
        with pytest.raises(ValueError, match=message):
            ModernNCA(Recorder(), **arguments)
    for arguments, message in (
        ((x[:0], y[:0]), "at least one row"),
        ((x, y[:3]), "same number of rows"),
        ((x, y.float()), "integer dtype"),
        ((x, y + 1), "y must be in 0..2, got 3"),
        ((x * torch.inf, y), "finite"),
        ((x, y, 0.0, 0.0), "target_std"),
    ):
        with pytest.raises(ValueError, match=message):
            model.set_candidates(*arguments)
    with pytest.raises(RuntimeError, match="no candidates"):
        ModernNCA(Recorder(), 3)(x)


# in the trainer


def test_fit_on_the_checkerboard_beats_neighbours_in_the_raw_table():
    torch.manual_seed(0)
    data = SklearnTabularDataModule("checkerboard", batch_size=128, n_samples=600, n_features=4)
    model = ModernNCA(TabularEncoder(4, dim=32, n_frequencies=16, d_embedding=8), 2)
    quiet_trainer(max_epochs=25).fit(model, data)
    result = quiet_trainer().test(model, data, verbose=False)[0]
    names = {"loss", "acc", "balanced_acc", "macro_precision", "macro_f1", "log_loss", "auc"}
    assert set(result) == {f"test/{name}" for name in names}
    knn = SklearnBaseline("knn", 2)
    quiet_trainer(max_epochs=1).fit(knn, data)
    baseline = quiet_trainer().test(knn, data, verbose=False)[0]
    assert set(result) == set(baseline)
    assert result["test/acc"] > baseline["test/acc"] + 0.1


def test_regression_is_reported_in_original_units():
    torch.manual_seed(0)
    data = SklearnTabularDataModule("friedman1", batch_size=128, n_samples=300)
    model = ModernNCA(TabularEncoder(10, dim=16, num_embedding="none"))
    quiet_trainer(max_epochs=5).fit(model, data)
    result = quiet_trainer().test(model, data, verbose=False)[0]
    assert set(result) == {f"test/{name}" for name in ("loss", "rmse", "mae", "r2")}
    predicted = torch.cat(quiet_trainer().predict(model, data))
    truth = data.test_set.targets * data.target_std + data.target_mean
    assert 5 < truth.mean() < 25
    assert result["test/rmse"] == pytest.approx((predicted - truth).square().mean().sqrt().item(), rel=1e-4)
    assert result["test/rmse"] == pytest.approx(result["test/loss"] ** 0.5 * data.target_std, rel=1e-4)
    assert result["test/mae"] == pytest.approx((predicted - truth).abs().mean().item(), rel=1e-4)


class CountingEncoder(TabularEncoder):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rows_in_eval = 0

    def forward(self, x):
        if not self.training:
            self.rows_in_eval += len(x)
        return super().forward(x)


def test_candidates_are_embedded_once_per_evaluation():
    data = SklearnTabularDataModule("wine", batch_size=64, eval_batch_size=4)
    model = ModernNCA(CountingEncoder(13, dim=4), 3)
    quiet_trainer(max_epochs=1, num_sanity_val_steps=0).fit(model, data)
    rows, val = len(data.train_set), len(data.val_set)
    assert model.encoder.rows_in_eval == rows + val
    assert model._cached is None  # stale as soon as training goes on
    model.encoder.rows_in_eval = 0
    quiet_trainer().test(model, data, verbose=False)
    assert model.encoder.rows_in_eval == rows + len(data.test_set)
    model.eval()
    x = data.test_set[0][0][None]
    before = model(x)
    with torch.no_grad():
        model.encoder.encoder.weight.mul_(3.0)
    assert not torch.equal(model(x), before)  # no cache outside of an evaluation


def test_a_checkpoint_predicts_alone(tmp_path):
    data = SklearnTabularDataModule("diabetes", batch_size=64)
    model = ModernNCA(TabularEncoder(10, dim=4, n_blocks=1, d_block=8))
    trainer = quiet_trainer()
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = ModernNCA.load_from_checkpoint(
        tmp_path / "model.ckpt", encoder=TabularEncoder(10, dim=4, n_blocks=1, d_block=8)
    )
    x = torch.stack([data.test_set[i][0] for i in range(20)])
    assert torch.equal(again.eval()(x), model.eval()(x))
    assert again.target_std.item() == pytest.approx(data.target_std)
    # A data module that splits otherwise does not change a fitted model.
    quiet_trainer().test(again, SklearnTabularDataModule("diabetes", seed=5), verbose=False)
    assert torch.equal(again.candidate_x, model.candidate_x)
    assert torch.equal(pickle.loads(pickle.dumps(model)).eval()(x), model(x))


def test_fit_without_candidates_says_so():
    model = ModernNCA(TabularEncoder(3, dim=4), 2)
    loader = torch.utils.data.DataLoader([IndexedBatch(torch.randn(3), torch.tensor(0), torch.tensor(0))])
    with pytest.raises(RuntimeError, match="set_candidates"):
        quiet_trainer().fit(model, loader)
    model.set_candidates(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    quiet_trainer(max_epochs=1).fit(model, loader)


def test_own_data_module_with_index(tmp_path):
    from datamodules import WithIndex

    rows = "\n".join(["a,b,y"] + [f"{i % 7},{'uvw'[i % 3]},{'pq'[i % 2]}" for i in range(60)])
    (tmp_path / "t.csv").write_text(rows)
    data = TabularCSVDataModule(str(tmp_path / "t.csv"), batch_size=16, modifiers=[WithIndex()])
    model = ModernNCA(TabularEncoder(1, 3, dim=4), 2)
    quiet_trainer(max_epochs=1).fit(model, data)
    assert len(model.candidate_x) == 45


def test_double_precision():
    data = SklearnTabularDataModule("wine", batch_size=64)
    model = ModernNCA(TabularEncoder(13, dim=4, n_blocks=1, d_block=8), 3)
    quiet_trainer(precision="64-true").fit(model, data)
    assert model.candidate_x.dtype == torch.float64
    assert model.candidate_y.dtype == torch.int64
    assert next(model.parameters()).dtype == torch.float64


def test_bf16_autocast():
    data = SklearnTabularDataModule("wine", batch_size=64)
    model = ModernNCA(TabularEncoder(13, dim=4, n_blocks=1, d_block=8), 3)
    trainer = quiet_trainer(precision="bf16-mixed", max_epochs=3)
    trainer.fit(model, data)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])
    cached, plain = [], []
    model.on_test_epoch_end = lambda: None  # keep the cache to look at it
    quiet = quiet_trainer(precision="bf16-mixed")
    quiet.test(model, data, verbose=False)
    cached.append(model._cached)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain.append(model.eval().embed(model.candidate_x))
    assert torch.equal(cached[0], plain[0])


def test_embeddings_of_an_interrupted_evaluation_are_dropped():
    model, x, _ = stored()
    for renew in (model.train, lambda: model.set_candidates(x[:5], torch.tensor([0, 1, 0, 1, 0]))):
        model.eval()
        model.on_validation_epoch_start()
        renew()
        assert model._cached is None


def test_explain_is_in_eval_mode_and_leaves_the_modes():
    torch.manual_seed(0)
    model = ModernNCA(TabularEncoder(3, dim=4, n_blocks=1, d_block=8, dropout=0.5, num_embedding="none"), 2)
    x = torch.randn(20, 3)
    model.set_candidates(x, torch.arange(20) % 2)
    model.train()
    model.encoder.post_encoder[1].eval()
    mean = model.encoder.post_encoder[0].block[0].running_mean.clone()
    _, rows = model.explain(x[:4])
    assert rows[:, 0].tolist() == [0, 1, 2, 3]  # without dropout, a stored row is its own nearest
    assert torch.equal(model.encoder.post_encoder[0].block[0].running_mean, mean)
    assert model.training
    assert model.encoder.post_encoder[0].block[3].training
    assert not model.encoder.post_encoder[1].training


def test_area_under_the_curve_leaves_undefined_classes_out():
    log_probs = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.7, 0.2, 0.1], [0.45, 0.4, 0.15]]).log()
    model = ModernNCA(TabularEncoder(2, dim=2, num_embedding="none"), 3)
    metric = model.test_metrics["auc"]
    metric.update(log_probs.exp(), torch.tensor([0, 1, 0, 1]))  # no row of class 2
    assert metric.compute() == 1.0
    metric.reset()
    metric.update(log_probs.exp(), torch.tensor([0, 1, 2, 1]))
    wanted = roc_auc_score([0, 1, 2, 1], log_probs.exp().numpy(), multi_class="ovr")
    assert metric.compute() == pytest.approx(wanted)
    metric.reset()
    metric.update(log_probs.exp(), torch.zeros(4, dtype=torch.long))
    assert metric.compute().isnan()


def test_explain():
    model, x, y = stored()
    weights, indices = model.explain(x[:4], k=3)
    assert indices[:, 0].tolist() == [0, 1, 2, 3]
    full, order = model.explain(x[:4], k=40)
    mass = torch.zeros(4, 3).scatter_add_(1, y[order], full)
    torch.testing.assert_close((mass + 1e-7).log(), model(x[:4]).detach(), rtol=0, atol=1e-4)
    torch.testing.assert_close(weights, full[:, :3])


def test_same_seed_same_weights_and_seeds_matter():
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        data = SklearnTabularDataModule("wine", batch_size=32)
        model = ModernNCA(TabularEncoder(13, dim=4), 3, sample_rate=0.3)
        quiet_trainer().fit(model, data)
        weights.append(model.encoder.encoder.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


# several processes


def _ddp_step(rank: int, world: int, rate: float) -> dict:
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.randint(0, 2, (30,))
    model = ModernNCA(TabularEncoder(3, dim=4, num_embedding="none"), 2, sample_rate=rate)
    model.set_candidates(x, y)
    model.log = lambda *args, **kwargs: None
    index = torch.arange(12)[rank * 12 // world : (rank + 1) * 12 // world]
    drawn = []
    model.encoder.register_forward_pre_hook(lambda module, args: drawn.append(args[0]))
    loss = model.training_step(TabularBatch(x[index], y[index], index), 0)
    loss.backward()
    return {"loss": loss.detach(), "gradient": model.encoder.encoder.weight.grad, "sampled": drawn[1], "x": x}


def test_two_processes_agree_with_one_when_all_rows_are_candidates():
    alone = _ddp_step(0, 1, 1.0)
    ranks = run_two_processes(_ddp_step, 1.0)
    torch.testing.assert_close(sum(r["loss"] for r in ranks) / 2, alone["loss"])
    torch.testing.assert_close(sum(r["gradient"] for r in ranks) / 2, alone["gradient"])


def _ddp_fit(rank: int, world: int) -> dict:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                      GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")  # fmt: skip
    sent = []
    broadcast = torch.distributed._broadcast_coalesced
    torch.distributed._broadcast_coalesced = lambda group, tensors, *rest: (
        sent.extend(t.numel() for t in tensors),
        broadcast(group, tensors, *rest),
    )
    data = SklearnTabularDataModule("wine", batch_size=16)
    model = ModernNCA(TabularEncoder(13, dim=4), 3)
    trainer = quiet_trainer(max_epochs=1, devices=world, strategy="ddp")
    trainer.fit(model, data)
    predictions = model.eval()(data.val_set.source[data.val_set.indices])
    whole = torch.nn.functional.nll_loss(predictions, data.val_set.targets)
    return {"sent": sent, "rows": model.candidate_x, "val": trainer.callback_metrics["val/loss"], "whole": whole}


@pytest.mark.filterwarnings("ignore")
def test_the_store_is_not_sent_around_and_losses_are_those_of_all_processes():
    ranks = run_two_processes(_ddp_fit)
    for result in ranks:
        assert 1 in result["sent"]  # the target's mean and deviation
        assert result["rows"].numel() not in result["sent"]
        assert torch.equal(result["rows"], ranks[0]["rows"])
        torch.testing.assert_close(result["val"], result["whole"].detach(), rtol=0, atol=1e-4)


def test_every_process_samples_its_own_candidates():
    sampled = [{tuple(row.tolist()) for row in r["sampled"]} for r in run_two_processes(_ddp_step, 0.5)]
    common_pool = {tuple(row.tolist()) for row in _ddp_step(0, 1, 0.5)["x"][12:]}
    assert sampled[0] & common_pool != sampled[1] & common_pool


# baselines


@pytest.mark.parametrize("name", ["knn", "nca_knn", "mlp", "hist_gradient_boosting", "linear"])
def test_classification_baselines(name, tmp_path):
    data = SklearnTabularDataModule("wine", batch_size=64)
    model = SklearnBaseline(name, 3)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, data)
    assert "val/acc" in trainer.callback_metrics
    result = trainer.test(model, data, verbose=False)[0]
    x, y = data.test_set.source[data.test_set.indices], data.test_set.targets
    assert result["test/acc"] == pytest.approx(model.estimator.score(x.numpy(), y.numpy()))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    again = SklearnBaseline.load_from_checkpoint(tmp_path / "model.ckpt")
    assert again._estimator is None
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("name", ["knn", "mlp", "hist_gradient_boosting", "linear"])
def test_regression_baselines(name):
    data = SklearnTabularDataModule("friedman1", n_samples=200)
    model = SklearnBaseline(name)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, data)
    result = trainer.test(model, data, verbose=False)[0]
    assert 0 < result["test/rmse"] < 10
    assert result["test/r2"] > 0.1


def test_baseline_parameters_and_missing_classes():
    model = SklearnBaseline("knn", 4, parameters={"n_neighbors": 1})
    model.set_candidates(torch.eye(3), torch.tensor([0, 1, 3]))
    assert model.estimator.n_neighbors == 1
    log_probs = model(torch.eye(3))
    assert log_probs.argmax(dim=1).tolist() == [0, 1, 3]
    assert log_probs[0, 2] == pytest.approx(-16.118, abs=1e-3)


@pytest.mark.bad_input
def test_baseline_rejects():
    with pytest.raises(ValueError, match="Did you mean 'knn'"):
        SklearnBaseline("kn", 2)
    with pytest.raises(RuntimeError, match="no candidates"):
        SklearnBaseline("knn", 2)(torch.zeros(1, 2))
    model = SklearnBaseline("nca_knn")
    model.set_candidates(torch.randn(9, 2), torch.randn(9))
    with pytest.raises(ValueError, match="classification"):
        model(torch.zeros(1, 2))


@pytest.mark.parametrize("name", ["catboost", "lightgbm", "xgboost"])
@pytest.mark.parametrize("classes", [3, None])
def test_boosting_baselines(name, classes):
    pytest.importorskip(name)
    data = SklearnTabularDataModule("wine" if classes else "friedman1", n_samples=200)
    model = SklearnBaseline(name, classes)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, data)
    result = trainer.test(model, data, verbose=False)[0]
    assert len(model.val_x) == len(data.val_set)
    assert result["test/acc"] > 0.8 if classes else result["test/r2"] > 0.5


# the paper's configuration on a fake of the benchmark's format


def test_talent_configuration(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    folder = tmp_path / "data" / "talent" / "phoneme"
    folder.mkdir(parents=True)
    for split, n in (("train", 60), ("val", 20), ("test", 20)):
        x = generator.normal(size=(n, 5))
        np.save(folder / f"N_{split}.npy", x)
        np.save(folder / f"y_{split}.npy", (x[:, 0] > 0).astype(int))
    (folder / "info.json").write_text('{"task_type": "binclass", "n_num_features": 5, "n_cat_features": 0}')
    config = Path(__file__).parents[2] / "configs" / "modern_nca" / "talent.yaml"
    monkeypatch.chdir(tmp_path)
    cli = run(["fit", "--config", str(config), "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"])
    assert cli.model.candidate_x.shape == (60, 5)
    assert cli.model.temperature == 1.0
    optimizer = cli.model.configure_optimizers()
    assert optimizer.defaults["lr"] == 0.01
    assert optimizer.defaults["weight_decay"] == 2e-4


def test_a_baseline_without_optimiser_steps_leaves_a_checkpoint(tmp_path, monkeypatch):
    config = str(Path(__file__).parents[2] / "configs" / "modern_nca" / "checkerboard_knn.yaml")
    monkeypatch.chdir(tmp_path)
    fitted = run(["fit", "--config", config, "--trainer.accelerator=cpu"])
    tested = run(["test", "--config", config, "--trainer.accelerator=cpu", "--ckpt_path=last"])
    assert tested.test_metrics == fitted.test_metrics
