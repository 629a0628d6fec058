"""The module base: frozen networks, checkpoints, pickles, schedulers; the plain classifier; the guards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core import Classifier, LossPenalty, MethodModule, capture_outputs, feature_dim
from lightning_methods.core.teacher import cosine_momentum, frozen_copy, momentum_update

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def loader(n: int = 12, poison: float | None = None) -> DataLoader:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    if poison is not None:
        x[1, 2] = poison
    return DataLoader(TensorDataset(x, torch.arange(n) % 3), batch_size=6)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Distilled(MethodModule):
    """A student and a frozen teacher that checkpoints leave out."""

    frozen = ("teacher",)
    checkpoint_excludes = ("teacher.",)

    def __init__(self, student: nn.Module, teacher: nn.Module, weight: float = 0.5, names: tuple[str, ...] = ("a",)):
        super().__init__(lambda params: torch.optim.SGD(params, lr=0.1))
        self.student, self.teacher, self.weight, self.names = student, teacher, weight, names

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return (self.student(x) - self.teacher(x)).square().mean()


def test_frozen_networks_stay_frozen_and_in_eval_mode():
    module = Distilled(net(), net())
    before = copy.deepcopy(module.teacher.state_dict())
    assert not any(p.requires_grad for p in module.teacher.parameters())
    module.train()
    assert module.student.training
    assert not module.teacher.training
    assert not any(m.training for m in module.teacher.modules())
    Trainer(max_epochs=1, **QUIET).fit(module, loader())
    for name, value in module.teacher.state_dict().items():  # BatchNorm statistics too
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    teachers = {id(p) for p in module.teacher.parameters()}
    optimizer = module.configure_optimizers()
    assert not teachers & {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_python_checkpoints_reload_with_their_networks_given_again(tmp_path):
    module = Distilled(net(), net(), weight=0.25)
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert dict(saved["hyper_parameters"]) == {"weight": 0.25, "names": ("a",)}
    assert not any(key.startswith("teacher.") for key in saved["state_dict"])
    again = Distilled.load_from_checkpoint(tmp_path / "a.ckpt", student=net(), teacher=module.teacher)
    assert again.weight == 0.25
    torch.testing.assert_close(again.student.state_dict(), module.student.state_dict(), rtol=0, atol=0)
    with pytest.raises(TypeError, match="give them again"):
        Distilled.load_from_checkpoint(tmp_path / "a.ckpt")


def test_only_the_excluded_state_may_be_missing():
    module = Distilled(net(), net())
    state = {key: value for key, value in module.state_dict().items() if not key.startswith("teacher.")}
    module.load_state_dict(state)
    del state["student.0.weight"]
    with pytest.raises(RuntimeError, match=r"missing \['student\.0\.weight'\]"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match="unexpected"):
        module.load_state_dict({**module.state_dict(), "more": torch.zeros(1)})


def test_default_factories_survive_a_pickle():
    module = pickle.loads(pickle.dumps(Classifier(net(), 3)))
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)


@pytest.mark.parametrize(("interval", "steps"), [("step", 4), ("epoch", 2)])
def test_schedulers_step_at_their_interval(interval, steps):
    halve = torch.optim.lr_scheduler.StepLR
    module = Classifier(net(), 3, lr_interval=interval, lr_scheduler=lambda optimizer: halve(optimizer, 1, 0.5))
    trainer = Trainer(max_epochs=2, **QUIET)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**steps)


@pytest.mark.bad_input
def test_bad_arguments_of_the_classifier():
    with pytest.raises(ValueError, match="num_classes"):
        Classifier(net(), 1)
    with pytest.raises(ValueError, match="label_smoothing"):
        Classifier(net(), 3, label_smoothing=1.0)
    with pytest.raises(ValueError, match="lr_interval"):
        Classifier(net(), 3, lr_interval="epochs")


def test_feature_dim():
    encoder = nn.Identity()
    assert feature_dim(encoder, 5) == 5
    with pytest.raises(ValueError, match="num_features"):
        feature_dim(encoder)
    encoder.num_features = 7
    assert feature_dim(encoder) == 7


# the guards


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_data_that_are_not_finite_stop_the_run(poison):
    with pytest.raises(ValueError, match=r"batch\[0\].*NaN or infinite"):
        Trainer(max_epochs=1, **QUIET).fit(Classifier(net(), 3), loader(poison=poison))


def test_a_loss_that_becomes_nan_stops_the_run_before_a_checkpoint(tmp_path):
    class Explodes(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 1 else loss

    trainer = Trainer(max_epochs=3, default_root_dir=tmp_path, **{**QUIET, "enable_checkpointing": True})
    with pytest.raises(ValueError, match="training loss became nan in epoch 1"):
        trainer.fit(Explodes(net(), 3), loader(), loader())
    [checkpoint] = tmp_path.rglob("*.ckpt")
    assert all(torch.isfinite(v).all() for v in torch.load(checkpoint, weights_only=True)["state_dict"].values())


def test_the_seed_of_an_epoch_does_not_depend_on_what_was_drawn_before(monkeypatch):
    class Draws(Classifier):
        def on_train_start(self):
            self.drawn = []
            torch.rand(self.extra)

        def training_step(self, batch, batch_idx):
            self.drawn.append(torch.rand(1).item())
            return super().training_step(batch, batch_idx)

    def drawn(seed: str | None, extra: int) -> list[float]:
        if seed is None:
            monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        else:
            monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        module = Draws(net(), 3)
        module.extra = extra
        Trainer(max_epochs=2, **QUIET).fit(module, loader())
        return module.drawn

    first = drawn("3", 0)
    assert first == drawn("3", 5)
    assert len(set(first)) == 4
    assert first != drawn("4", 0)


# hooks and penalties


class Mean(LossPenalty):
    """The mean of a layer's output."""

    def penalty(self, outputs, batch):
        return outputs.mean()


def test_a_penalty_changes_the_loss_of_any_module_and_leaves_nothing_behind():
    losses = {}
    for weight in (0.0, 2.0):
        torch.manual_seed(0)
        module = Classifier(net(), 3, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        trainer = Trainer(max_epochs=1, callbacks=[Mean(weight, "network.0")], limit_train_batches=1, **QUIET)
        module.network.eval()  # the same output twice
        with capture_outputs(module, ["network.0"]) as seen:
            trainer.fit(module, loader())
            losses[weight] = (trainer.callback_metrics["train/loss"], seen.outputs["network.0"].mean(), trainer)
        assert "training_step" not in vars(module)
        assert not any(m._forward_hooks for m in module.modules())
    assert "train/Mean" in losses[2.0][2].callback_metrics


def test_a_penalty_sends_gradient():
    torch.manual_seed(0)
    module = Classifier(net(), 3, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    before = module.network[0].bias.detach().clone()
    plain = copy.deepcopy(module)
    Trainer(max_epochs=1, limit_train_batches=1, **QUIET).fit(plain, loader())
    Trainer(max_epochs=1, limit_train_batches=1, callbacks=[Mean(1.0, "network.0")], **QUIET).fit(module, loader())
    # d mean(z) / d bias = 1 / width, on top of the classifier's gradient
    difference = (module.network[0].bias - plain.network[0].bias) / -0.1
    torch.testing.assert_close(difference, torch.full_like(before, 1 / 8), rtol=1e-4, atol=1e-5)


@pytest.mark.bad_input
def test_bad_penalties():
    with pytest.raises(ValueError, match="weight"):
        Mean(float("nan"), "network")
    with pytest.raises(ValueError, match=r"no submodule 'netwrk'.*Did you mean 'network'"):
        Trainer(max_epochs=1, callbacks=[Mean(1.0, "netwrk")], **QUIET).fit(Classifier(net(), 3), loader())
    module = Classifier(net(), 3)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="optimises manually"):
        Trainer(max_epochs=1, callbacks=[Mean(1.0, "network")], **QUIET).fit(module, loader())


def test_captured_outputs_are_not_copied_with_the_module():
    module = net()
    with capture_outputs(module, ["0"]) as captured:
        module(torch.zeros(2, 4))
        assert captured.outputs["0"].shape == (2, 8)
    assert not module[0]._forward_hooks
    assert pickle.loads(pickle.dumps(captured)) is None
    assert copy.deepcopy(captured) is None


# copies of networks


def test_momentum_moves_parameters_only():
    online, target = net(), net()
    online(torch.randn(6, 4))  # moves the BatchNorm statistics
    expected = [0.9 * t + 0.1 * o for t, o in zip(target.parameters(), online.parameters(), strict=True)]
    statistics = target[1].running_mean.clone()
    momentum_update(online, target, 0.9)
    for value, want in zip(target.parameters(), expected, strict=True):
        torch.testing.assert_close(value, want)
    torch.testing.assert_close(target[1].running_mean, statistics)
    with pytest.raises(ValueError, match="momentum"):
        momentum_update(online, target, 1.5)
    with pytest.raises(ValueError, match="differ"):
        momentum_update(online, nn.Linear(2, 2), 0.5)


def test_cosine_momentum_ends_where_it_should():
    assert cosine_momentum(0, 10, 0.99, 0.999) == pytest.approx(0.99)
    assert cosine_momentum(5, 10, 0.99, 0.999) == pytest.approx(0.9945)
    assert cosine_momentum(10, 10, 0.99, 0.999) == pytest.approx(0.999)
    assert cosine_momentum(20, 10, 0.99, 0.999) == pytest.approx(0.999)


def test_frozen_copy():
    network = net()
    copied = frozen_copy(network)
    assert not any(p.requires_grad for p in copied.parameters())
    assert all(p.requires_grad for p in network.parameters())


def test_any_datamodule_will_do(tmp_path):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return loader()

        val_dataloader = train_dataloader

    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Classifier(net(), 3), Data())
    assert {"train/loss", "val/loss", "val/acc"} <= trainer.callback_metrics.keys()
