from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core.batches import TwoViewBatch
from lightning_methods.core.distributed import sum_over_ranks
from lightning_methods.core.module import Classifier
from lightning_methods.core.schedules import warmup_cosine
from lightning_methods.ssl import (
    BYOL,
    LARS,
    BarlowTwins,
    KNNEvaluation,
    LinearProbe,
    MLPHead,
    MoCoV2,
    OnlineLinearProbe,
    SimCLR,
    TwoViewSSL,
    ZeroCL,
    alignment_loss,
    barlow_twins_loss,
    byol_loss,
    cosine_momentum,
    info_nce_queue_loss,
    knn_predict,
    nt_xent_loss,
    zero_cl_loss,
)
from lightning_methods.wasserstein_uniformity import (
    PairwiseUniformityLoss,
    SpectrumWriter,
    WassersteinUniformityLoss,
    uniformity_loss,
    wasserstein_uniformity,
)
from tests.ddp import run_two_processes

METHODS = {"SimCLR": SimCLR, "BarlowTwins": BarlowTwins, "ZeroCL": ZeroCL, "MoCoV2": MoCoV2, "BYOL": BYOL}
OWN: dict[str, Callable[[], dict]] = {
    "MoCoV2": lambda: {"queue_size": 64, "out_dim": 6, "momentum": 0.9, "momentum_end": None},
    "BYOL": lambda: {"predictor": nn.Linear(6, 6), "momentum": 0.9},
}


def build(name: str, norm: bool = True, **changes) -> TwoViewSSL:
    torch.manual_seed(0)
    normalisation = nn.BatchNorm1d(12) if norm else nn.LayerNorm(12)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), normalisation, nn.ReLU())
    return METHODS[name](backbone, nn.Linear(12, 6), **(OWN.get(name, dict)() | changes))


def batch_of(rows: int = 16, seed: int = 0) -> TwoViewBatch:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 4, 4, generator=g)
    noisy = [x + 0.3 * torch.randn(x.shape, generator=g) for _ in range(2)]
    return TwoViewBatch(*noisy, label=torch.arange(rows) % 5, index=torch.arange(rows))


class Views(LightningDataModule):
    """Noisy views of five clusters; evaluation on `(x, y)`, or on views."""

    def __init__(self, batch_size: int = 16, rows: int = 64, eval_views: bool = False) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.y = torch.arange(rows) % 5
        self.x = (2 * torch.randn(5, 1, 4, 4, generator=g))[self.y] + torch.randn(rows, 1, 4, 4, generator=g)
        self.views = [self.x + 0.1 * torch.randn(self.x.shape, generator=g) for _ in range(2)]
        self.batch_size, self.eval_views = batch_size, eval_views

    @staticmethod
    def _collate(samples):
        return TwoViewBatch(*map(torch.stack, zip(*samples, strict=True)))

    def train_dataloader(self):
        return DataLoader(TensorDataset(*self.views, self.y), self.batch_size, collate_fn=self._collate)

    def memory_dataloader(self):
        return DataLoader(TensorDataset(self.x, self.y), 10)

    def val_dataloader(self):
        if self.eval_views:
            return DataLoader(TensorDataset(*self.views, self.y), 10, collate_fn=self._collate)
        return DataLoader(TensorDataset(self.x + 0.1, self.y), 10)

    test_dataloader = val_dataloader


def trainer_for(epochs: int = 2, **options) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **(quiet | options))


# what each loss is


def test_simclr_barlow_and_zero_cl_losses():
    batch = batch_of()
    for name, expected in (
        ("SimCLR", lambda a, b: nt_xent_loss(a, b, 0.4)),
        ("BarlowTwins", lambda a, b: barlow_twins_loss(a, b, 0.3)),
        ("ZeroCL", lambda a, b: zero_cl_loss(a, b, 1e-2)),
    ):
        own = {"SimCLR": {"temperature": 0.4}, "BarlowTwins": {"lambd": 0.3}, "ZeroCL": {"eps": 1e-2}}[name]
        module = build(name, **own)
        loss, z1, z2 = module.ssl_loss(batch)
        torch.testing.assert_close(z1, module.projector(module.backbone(batch.view1)))
        torch.testing.assert_close(loss, expected(z1, z2))
        assert z1.requires_grad
        assert z2.requires_grad


def test_byol_loss_uses_predictor_and_copy_crosswise():
    module, batch = build("BYOL"), batch_of()
    with torch.no_grad():
        for p in module.target_encoder.parameters():
            p.add_(0.1)  # a copy that is not the online network
    loss, z1, z2 = module.ssl_loss(batch)
    t1, t2 = module.target_encoder(batch.view1), module.target_encoder(batch.view2)
    p1, p2 = module.predictor(z1), module.predictor(z2)
    torch.testing.assert_close(loss, byol_loss(p1, p2, t1, t2))
    assert abs(loss.item() - byol_loss(p2, p1, t1, t2).item()) > 1e-4


def test_moco_takes_the_negatives_of_before_and_then_enqueues():
    module, batch = build("MoCoV2", temperature=0.3), batch_of()
    before = module.queue.keys.clone()
    loss, z1, z2 = module.ssl_loss(batch)
    k1, k2 = (F.normalize(module.target_encoder(x), dim=1) for x in (batch.view1, batch.view2))
    q1, q2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    torch.testing.assert_close(
        loss, info_nce_queue_loss(q1, k2, before, 0.3) + info_nce_queue_loss(q2, k1, before, 0.3)
    )
    torch.testing.assert_close(module.queue.keys[:32], torch.cat([k1, k2]))
    assert torch.equal(module.queue.keys[32:], before[32:])
    loss.backward()  # the queue moved on before the backward pass
    module.eval()
    module.ssl_loss(batch)
    torch.testing.assert_close(module.queue.keys[:32], torch.cat([k1, k2]))  # evaluation leaves it


def test_the_copy_is_equal_frozen_in_train_mode_and_out_of_the_optimizer():
    for name in ("MoCoV2", "BYOL"):
        module = build(name)
        online = [*module.backbone.parameters(), *module.projector.parameters()]
        target = list(module.target_encoder.parameters())
        assert all(torch.equal(a, b) and a is not b for a, b in zip(online, target, strict=True))
        assert not any(p.requires_grad for p in target)
        assert module.train().target_encoder.training
        optimised = {id(p) for g in module.configure_optimizers().param_groups for p in g["params"]}
        expected = online + (list(module.predictor.parameters()) if name == "BYOL" else [])
        assert optimised == {id(p) for p in expected}
        running = module.target_encoder[0][2].running_mean.clone()
        module.ssl_loss(batch_of())
        module.ssl_loss(batch_of(seed=1))[0].backward()
        assert all(p.grad is None for p in target)
        assert not torch.equal(module.target_encoder[0][2].running_mean, running)  # statistics of its own


def test_the_copy_follows_after_each_optimiser_step():
    """After every step the copy is momentum * copy + (1 - momentum) * online, with the momentum of that step."""
    for name, end in (("BYOL", None), ("BYOL", 1.0), ("MoCoV2", 0.99)):
        module = build(name, momentum=0.5, momentum_end=end)
        trace = []

        def record(m=module, trace=trace):
            online = [*m.backbone.parameters(), *m.projector.parameters()]
            trace.append(([p.detach().clone() for p in online], [p.clone() for p in m.target_encoder.parameters()]))

        record()
        original = module.on_train_batch_end
        module.on_train_batch_end = lambda *a, f=original, r=record: (f(*a), r())
        trainer_for(2).fit(module, Views())
        assert len(trace) == 9
        for step in range(1, 9):
            momentum = 0.5 if end is None else cosine_momentum(step, 8, 0.5, end)
            for old, online, new in zip(trace[step - 1][1], trace[step][0], trace[step][1], strict=True):
                torch.testing.assert_close(new, momentum * old + (1 - momentum) * online)
        assert not torch.equal(trace[-1][0][0], trace[0][0][0])


def test_accumulated_batches_do_not_move_the_copy():
    module = build("BYOL", momentum=0.5)
    seen = []
    original = module.on_train_batch_end
    module.on_train_batch_end = lambda *a, f=original: (
        f(*a),
        seen.append(next(module.target_encoder.parameters()).clone()),
    )
    before = next(module.target_encoder.parameters()).clone()
    trainer_for(1, accumulate_grad_batches=2).fit(module, Views())
    assert torch.equal(seen[0], before)
    assert not torch.equal(seen[1], before)
    assert torch.equal(seen[2], seen[1])


# the regulariser


def test_regularizer_sees_unnormalised_projector_outputs_of_both_views():
    class Recorder(nn.Module):
        def forward(self, z1, z2):
            self.seen = (z1, z2)
            return z1.sum() * 0 + 2.0

    module, batch = build("BYOL", regularizer=Recorder(), regularizer_weight=0.3), batch_of()
    loss = module.training_step(batch, 0)
    expected, z1, z2 = module.ssl_loss(batch)
    torch.testing.assert_close(module.regularizer.seen, (z1, z2))
    torch.testing.assert_close(loss, expected + 0.6)


def test_weight_falls_from_epoch_to_epoch():
    module = build("BarlowTwins", regularizer=WassersteinUniformityLoss(), regularizer_weight=30.0)
    module.regularizer_weight_end = 0.0
    weights = []
    original = module.training_step
    module.training_step = lambda *a: (weights.append(module.current_regularizer_weight()), original(*a))[1]
    trainer_for(3).fit(module, Views())
    assert weights == pytest.approx([20.0] * 4 + [10.0] * 4 + [0.0] * 4)
    weights.clear()
    trainer_for(-1, max_steps=12).fit(module, Views())
    assert weights == pytest.approx([20.0] * 4 + [10.0] * 4 + [0.0] * 4)


def test_w2_spreads_the_embeddings():
    values = {}
    for weight in (0.0, 2.0):
        module = build("BYOL", regularizer=WassersteinUniformityLoss(), regularizer_weight=weight)
        trainer = trainer_for(8)
        trainer.fit(module, Views())
        values[weight] = trainer.callback_metrics["val/wasserstein_uniformity"].item()
    assert values[2.0] < values[0.0] - 0.1


# logs and evaluation


def test_logs():
    module = build("BYOL", regularizer=PairwiseUniformityLoss())
    trainer = trainer_for(1)
    data = Views()
    trainer.fit(module, data)
    logged = set(trainer.callback_metrics)
    assert {"train/loss", "train/ssl_loss", "train/regularizer", "val/wasserstein_uniformity"} <= logged
    assert "val/alignment" not in logged
    module.eval()
    with torch.no_grad():
        z = module.embed(data.x + 0.1)[1]
    metrics = trainer.callback_metrics
    assert metrics["val/wasserstein_uniformity"].item() == pytest.approx(wasserstein_uniformity(z).item(), rel=1e-5)
    assert metrics["val/uniformity"].item() == pytest.approx(uniformity_loss(z).item(), rel=1e-5)
    tested = trainer.test(module, data, verbose=False)[0]
    assert tested["test/wasserstein_uniformity"] == pytest.approx(wasserstein_uniformity(z).item(), rel=1e-5)


def test_alignment_is_logged_for_views():
    module, data = build("SimCLR").eval(), Views(eval_views=True)
    batches = list(data.val_dataloader())
    (logged,) = trainer_for().validate(module, DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad():
        values = [alignment_loss(module.embed(b.view1)[1], module.embed(b.view2)[1]).item() for b in batches]
    sizes = [len(b.view1) for b in batches]
    expected = sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    assert logged["val/alignment"] == pytest.approx(expected, rel=1e-5)


def test_forward_flattens_and_predict_gives_features():
    backbone = nn.Conv2d(1, 2, 3, padding=1)
    module = SimCLR(backbone, nn.Linear(32, 4))
    batch = batch_of(3)
    assert module(batch.view1).shape == (3, 32)
    for given in (batch, (batch.view1, batch.label), batch.view1):
        assert torch.equal(module.predict_step(given, 0), module(batch.view1))


def test_images_without_labels_are_evaluated():
    module, x = build("SimCLR").eval(), batch_of(12).view1
    (logged,) = trainer_for().validate(module, DataLoader(x, 6), verbose=False)
    with torch.no_grad():
        expected = wasserstein_uniformity(module.embed(x)[1]).item()
    assert logged["val/wasserstein_uniformity"] == pytest.approx(expected, rel=1e-5)


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.current_epoch + 1 == self.epochs


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_uninterrupted_run(name, tmp_path):
    whole = build(name, regularizer=WassersteinUniformityLoss())
    seed_everything(3, verbose=False)
    trainer_for(4).fit(whole, Views())
    half = build(name, regularizer=WassersteinUniformityLoss())
    seed_everything(3, verbose=False)
    trainer = trainer_for(4, callbacks=[StopAfter(2)])
    trainer.fit(half, Views())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = build(name, regularizer=WassersteinUniformityLoss())
    seed_everything(3, verbose=False)
    trainer_for(4).fit(resumed, Views(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_a_python_checkpoint_keeps_the_arguments_of_the_base(tmp_path):
    module = build("SimCLR", temperature=0.7, regularizer_weight=0.3, regularizer_weight_end=0.1)
    trainer = trainer_for(1)
    trainer.fit(module, Views())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fresh = build("SimCLR")
    loaded = SimCLR.load_from_checkpoint(tmp_path / "last.ckpt", backbone=fresh.backbone, projector=fresh.projector)
    assert (loaded.temperature, loaded.regularizer_weight, loaded.regularizer_weight_end) == (0.7, 0.3, 0.1)
    torch.testing.assert_close(loaded.state_dict(), module.state_dict())


def test_pickle_and_deepcopy():
    for name in METHODS:
        module = build(name)
        for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
            torch.testing.assert_close(other.state_dict(), module.state_dict())
            other.configure_optimizers()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("MoCoV2", {"momentum": 1.5}, "momentum must be"),
        ("MoCoV2", {"momentum_end": -0.1}, "momentum_end must be"),
        ("MoCoV2", {"temperature": 0.0}, "temperature must be"),
        ("MoCoV2", {"queue_size": 0}, "size must be"),
        ("BYOL", {"momentum": -0.1}, "momentum must be"),
        ("SimCLR", {"temperature": 0.0}, "temperature must be"),
        ("BarlowTwins", {"lambd": -1.0}, "lambd must be"),
        ("ZeroCL", {"eps": 0.0}, "eps must be"),
        ("SimCLR", {"regularizer_weight": math.nan}, "regularizer_weight must be"),
        ("SimCLR", {"regularizer_weight_end": math.inf}, "regularizer_weight_end must be"),
    ],
)
def test_bad_arguments(name, change, match):
    with pytest.raises(ValueError, match=match):
        build(name, **change)


@pytest.mark.bad_input
def test_queue_has_to_hold_whole_batches():
    module = build("MoCoV2", queue_size=50)
    with pytest.raises(ValueError, match="50 is not a multiple of 32"):
        trainer_for(1).fit(module, Views())
    wrong_width = build("MoCoV2", out_dim=7)
    with pytest.raises(ValueError, match="queue must have shape"):
        wrong_width.ssl_loss(batch_of())


# the global batch


def _loss_of(module, x1, x2):
    module.log = lambda *args, **kwargs: None
    return module.training_step(TwoViewBatch(x1, x2, torch.zeros(len(x1), dtype=torch.int64)), 0)


W2 = WassersteinUniformityLoss
DISTRIBUTED: dict[str, tuple[str, Callable[[], dict]]] = {
    "SimCLR": ("SimCLR", dict),
    "Barlow Twins": ("BarlowTwins", dict),
    "Zero-CL": ("ZeroCL", lambda: {"eps": 0.1}),
    "MoCo": ("MoCoV2", dict),
    "BYOL": ("BYOL", dict),
    "SimCLR + W2": ("SimCLR", lambda: {"regularizer": W2()}),
    "Barlow Twins + W2": ("BarlowTwins", lambda: {"regularizer": W2(eps=1e-12)}),
    "MoCo + W2": ("MoCoV2", lambda: {"regularizer": W2(eps=1e-4)}),
    "BYOL + W2": ("BYOL", lambda: {"regularizer": W2()}),
    "BYOL + L_U": ("BYOL", lambda: {"regularizer": PairwiseUniformityLoss()}),
    "per process": ("SimCLR", lambda: {"gather_distributed": False}),
}


def _step(name: str, rank: int = 0, world: int = 1) -> dict:
    """Loss, what DistributedDataParallel makes of the gradients, and the queue, from this rank's part of the batch."""
    method, changes = DISTRIBUTED[name]
    # SyncBatchNorm has no CPU form: without batch norm in the networks only the losses mix the samples.
    module = build(method, norm=False, **changes())
    x1, x2 = (x.chunk(world)[rank] for x in batch_of()[:2])
    loss = _loss_of(module, x1, x2)
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        gradient.copy_(sum_over_ranks(gradient, grad=False) / world)
    return {"loss": loss.detach(), **gradients, "queue": dict(module.named_buffers()).get("queue.keys")}


def _all_steps(rank: int, world: int) -> dict:
    return {name: _step(name, rank, world) for name in DISTRIBUTED}


@pytest.fixture(scope="module")
def two_processes():
    return run_two_processes(_all_steps)


@pytest.mark.parametrize("name", [name for name in DISTRIBUTED if name != "per process"])
def test_two_processes_with_half_the_batch_are_one_with_all_of_it(two_processes, name):
    alone = _step(name)
    assert len(alone) > 4
    for result in two_processes:
        torch.testing.assert_close(result[name], alone, rtol=0, atol=1e-5)


def test_without_gather_the_loss_is_per_process(two_processes):
    first, second = (result["per process"]["loss"] for result in two_processes)
    module = build("SimCLR", norm=False)
    halves = [_loss_of(module, *(x.chunk(2)[i] for x in batch_of()[:2])) for i in range(2)]
    torch.testing.assert_close(torch.stack([first, second]), torch.stack(halves).detach())
    assert first != second


# callbacks


def test_online_probe_learns_and_leaves_the_encoder_alone():
    states, metrics = [], None
    for callbacks in ([], [OnlineLinearProbe(12, 5, lr=0.1), KNNEvaluation(5, k=5)]):
        torch.manual_seed(5)
        module = build("SimCLR")
        trainer = trainer_for(5, callbacks=callbacks)
        trainer.fit(module, Views())
        states.append(copy.deepcopy(module.state_dict()))
        metrics = trainer.callback_metrics
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert {"train/probe_loss", "val/probe_acc", "val/probe_acc5", "val/knn_acc", "val/knn_acc5"} <= set(metrics)
    assert metrics["train/probe_loss"] < 1.2
    assert metrics["val/probe_acc"] > 0.7
    assert metrics["val/probe_acc5"] == 1  # five classes
    assert not callbacks[0]._handle


def test_online_probe_uses_view_1_and_skips_unknown_labels():
    module, probe = build("SimCLR"), OnlineLinearProbe(12, 5)
    module.log = lambda *a, **k: None
    probe.setup(trainer_for(), module, "fit")
    batch = batch_of(8)
    batch = batch._replace(label=torch.tensor([0, 1, -1, 3, -1, 0, 1, 2]))
    probe.on_train_batch_start(trainer_for(), module, batch, 0)
    module.training_step(batch, 0)
    kept = probe._first
    features, labels = probe._take(module, batch)
    module.eval()
    assert features.shape == (6, 12)
    assert labels.tolist() == [0, 1, 3, 0, 1, 2]
    again = build("SimCLR").train()
    torch.testing.assert_close(kept, again(batch.view1).detach())
    probe.teardown(trainer_for(), module, "fit")


def test_online_probe_state_resumes():
    probe, batch = OnlineLinearProbe(12, 5), batch_of()
    module = build("SimCLR")
    module.log = lambda *a, **k: None

    def step(p):
        p._first = module(batch.view1).detach()
        p.on_train_batch_end(trainer_for(), module, None, batch, 0)

    step(probe)
    other = OnlineLinearProbe(12, 5)
    other.load_state_dict(copy.deepcopy(probe.state_dict()))
    module.eval()
    step(probe)
    step(other)
    assert torch.equal(probe.probe.weight, other.probe.weight)
    assert len(other.optimizer.state_dict()["state"]) == 2  # momentum travelled


def test_knn_is_knn_predict_on_the_memory():
    module, data = build("BYOL"), Views()
    trainer = trainer_for(1, callbacks=[KNNEvaluation(5, k=7, temperature=0.1)])
    trainer.fit(module, data)
    module.eval()
    with torch.no_grad():
        predicted = knn_predict(module(data.x + 0.1), module(data.x), data.y, 5, 7, 0.1)[0]
    accuracy = (predicted == data.y).float().mean().item()
    assert trainer.callback_metrics["val/knn_acc"].item() == pytest.approx(accuracy)
    tested = trainer_for(callbacks=[KNNEvaluation(5, k=7, temperature=0.1)]).test(module, data, verbose=False)
    assert tested[0]["test/knn_acc"] == pytest.approx(accuracy)


def test_knn_comes_every_n_epochs_and_at_the_end():
    class Log(KNNEvaluation):
        calls = ()

        def _bank(self, trainer, *args):
            self.calls = (*self.calls, trainer.current_epoch)
            return super()._bank(trainer, *args)

    callback = Log(5, k=3, every_n_epochs=2)
    trainer_for(5, callbacks=[callback]).fit(build("SimCLR"), Views())
    assert callback.calls == (1, 3, 4)


def test_knn_comes_at_the_end_of_a_run_that_counts_steps():
    trainer = trainer_for(-1, max_steps=12, callbacks=[KNNEvaluation(5, k=3, every_n_epochs=5)])
    trainer.fit(build("SimCLR"), Views())
    assert "val/knn_acc" in trainer.callback_metrics


class OneForward(Classifier):
    """Sees two views in one batch: the layer's output has twice the rows of the labels."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.network(torch.cat([x, x])), torch.cat([y, y]))


def test_the_probe_leaves_alone_a_module_that_it_has_to_run_itself():
    data, states = Views(), []
    loader = DataLoader(TensorDataset(data.x, data.y), 16)
    for callbacks in ([], [OnlineLinearProbe(12, 5, layer="network.0")]):
        torch.manual_seed(5)
        network = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12)), nn.Dropout(0.5))
        network.append(nn.Linear(12, 5))
        network[1].eval()  # a part that its owner has frozen stays so
        module = OneForward(network, 5)
        trainer_for(2, callbacks=callbacks).fit(module, loader)
        assert not network[1].training
        states.append(copy.deepcopy(module.state_dict()))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_callbacks_work_in_every_precision(precision, tmp_path):
    callbacks = [OnlineLinearProbe(12, 5), KNNEvaluation(5, k=3), SpectrumWriter()]
    module = build("BYOL", regularizer=WassersteinUniformityLoss())
    trainer = trainer_for(1, precision=precision, callbacks=callbacks, default_root_dir=tmp_path)
    trainer.fit(module, Views())
    assert trainer.callback_metrics["val/knn_acc"] > 0.5
    assert (tmp_path / "spectrum.csv").exists()


@pytest.mark.bad_input
def test_callbacks_say_what_is_missing():
    data = Views()
    with pytest.raises(ValueError, match=r"KNNEvaluation needs a data module with memory_dataloader"):
        trainer_for(1, callbacks=[KNNEvaluation(5)]).fit(
            build("SimCLR"), data.train_dataloader(), data.val_dataloader()
        )
    with pytest.raises(ValueError, match=r"no submodule 'encoder'"):
        trainer_for(1, callbacks=[OnlineLinearProbe(12, 5, layer="encoder")]).fit(build("SimCLR"), data)
    with pytest.raises(ValueError, match="num_classes"):
        OnlineLinearProbe(12, 1)
    with pytest.raises(ValueError, match="every_n_epochs"):
        KNNEvaluation(5, every_n_epochs=0)


# offline evaluation


def test_linear_probe_trains_the_head_only(tmp_path):
    pretrained = build("SimCLR")
    trainer = trainer_for(1)
    trainer.fit(pretrained, Views())
    trainer.save_checkpoint(tmp_path / "ssl.ckpt")

    class Labelled(Views):
        def train_dataloader(self):
            return DataLoader(TensorDataset(self.x, self.y), 16)

    fresh = build("BYOL").backbone
    probe = LinearProbe(fresh, 5, 12, init_from=str(tmp_path / "ssl.ckpt"))
    assert probe.network.weight.std().item() == pytest.approx(0.01, rel=0.3)
    assert probe.network.bias.abs().max() == 0
    trainer = trainer_for(10)
    trainer.fit(probe, Labelled())
    torch.testing.assert_close(probe.backbone.state_dict(), pretrained.backbone.state_dict())  # BatchNorm too
    assert not probe.train().backbone.training
    assert [tuple(p.shape) for g in trainer.optimizers[0].param_groups for p in g["params"]] == [(5, 12), (5,)]
    assert {"train/acc", "val/acc", "val/acc5"} <= set(trainer.callback_metrics)
    assert trainer.callback_metrics["val/acc"] > 0.7
    assert trainer.callback_metrics["val/acc5"] == 1


def test_linear_probe_reads_the_width():
    backbone = MLPHead(16, 8, 4, num_layers=2)
    backbone.num_features = 4
    assert LinearProbe(backbone, 3).network.in_features == 4
    with pytest.raises(ValueError, match="number of features of Linear is not known"):
        LinearProbe(nn.Linear(3, 3), 3)


# the paper's optimisation


def test_lars_warms_up_and_decays_step_by_step_in_both_groups():
    rates = []
    module = build(
        "SimCLR",
        optimizer=lambda params: LARS(params, lr=0.2, lr_1d=0.005),
        lr_scheduler=lambda optimizer: warmup_cosine(optimizer, warmup=0.25, min_ratio=0.1),
        lr_interval="step",
    )
    module.on_before_optimizer_step = lambda optimizer: rates.append([g["lr"] for g in optimizer.param_groups])
    trainer_for(2).fit(module, Views())
    factors = [0, 0.5] + [0.1 + 0.9 * (1 + math.cos(math.pi * s / 6)) / 2 for s in range(6)]
    assert [weights for weights, _ in rates] == pytest.approx([0.2 * f for f in factors])
    assert [vectors for _, vectors in rates] == pytest.approx([0.005 * f for f in factors])
    assert {p.dim() for p in module.optimizers().param_groups[1]["params"]} == {1}
