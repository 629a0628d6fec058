"""Pretraining in the same run, and the reliability diagrams of a test."""

import copy
import json
import os

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from lightning_methods.cdc import Pretraining, ReliabilityDiagram
from lightning_methods.core.module import Classifier
from tests.cdc.test_module import QUIET, Blobs, encoder, fit, make
from tests.ddp import run_two_processes


class Supervised(Classifier):
    """Any LightningModule with a `backbone` will do."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(nn.Sequential(backbone, nn.Linear(6, 3)), 3, lambda params: torch.optim.SGD(params, lr=0.1))
        self.backbone = backbone
        self.worlds = []

    def training_step(self, batch, batch_idx):
        self.worlds.append(self.trainer.world_size)
        return super().training_step((batch.clean, batch.target), batch_idx)


def pretraining(epochs: int = 2, seed: int = 9) -> Pretraining:
    torch.manual_seed(seed)
    return Pretraining(Supervised(encoder()), Blobs(batch_size=30), max_epochs=epochs)


def still(**options):
    """CDC whose encoder does not train."""
    return make(optimizer=lambda params: torch.optim.SGD(params, lr=0.0), backbone_lr=0.0, **options)


def weights(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.backbone.named_parameters()}


def test_the_encoder_is_the_one_that_was_pretrained_and_heads_start_from_it():
    module, callback = still(), pretraining()
    at_start = weights(callback.module)
    seen = {}
    inner = module.initialize_heads
    module.initialize_heads = lambda features: (seen.update(features=features), inner(features))
    before_fit = weights(module)
    fit(module, epochs=1, callbacks=[callback])
    trained = weights(callback.module)
    for name, value in weights(module).items():
        assert torch.equal(value, trained[name])
        assert not torch.equal(value, before_fit[name])
    assert any(not torch.equal(trained[name], value) for name, value in at_start.items())
    donor = copy.deepcopy(callback.module.backbone).eval()
    torch.testing.assert_close(seen["features"], donor(Blobs().x).detach())
    assert callback.module._trainer is None


def test_it_is_reproducible_and_leaves_the_random_numbers_alone():
    class Draw(Callback):
        def on_train_start(self, trainer, pl_module):
            self.value = torch.rand(1)

    def run(callbacks):
        seed_everything(3, verbose=False)
        draw, module = Draw(), still()
        fit(module, epochs=1, callbacks=[*callbacks, draw])
        return draw.value, weights(module)

    (one, first), (two, second) = run([pretraining()]), run([pretraining()])
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one == two == run([])[0]


def test_a_resumed_run_does_not_pretrain_again(tmp_path):
    callback = pretraining()
    module = still()
    trainer = fit(module, epochs=1, callbacks=[callback])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    expected = weights(module)
    again, resumed = pretraining(seed=1), still(seed=4)
    again.module.training_step = None  # a call would fail
    second = Trainer(max_epochs=2, accelerator="cpu", callbacks=[again], **QUIET)
    second.fit(resumed, datamodule=Blobs(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert again.done
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_an_encoder_from_a_checkpoint_is_left_alone(tmp_path):
    donor = make(seed=3)
    fit(donor, epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    callback = pretraining()
    callback.module.training_step = None
    module = still(init_from=str(tmp_path / "x.ckpt"))
    fit(module, epochs=1, callbacks=[callback])
    assert all(torch.equal(value, weights(donor)[name]) for name, value in weights(module).items())


def test_bad_input():
    with pytest.raises(ValueError, match="max_epochs"):
        pretraining(epochs=0)
    other = Pretraining(Supervised(encoder(width=6)), Blobs(), 1)
    other.module.backbone = nn.Linear(8, 6)
    with pytest.raises(ValueError, match=r"they differ in 0\.bias"):
        fit(make(), callbacks=[other])
    with pytest.raises(ValueError, match="has no submodule 'encoder'"):
        fit(make(), callbacks=[Pretraining(Supervised(encoder()), Blobs(), 1, part="encoder")])


class Look(Callback):
    """The run's own environment is still there after the pretraining."""

    def on_train_start(self, trainer, pl_module):
        assert os.environ["WORLD_SIZE"] == "2"


def _in_two(rank: int, world: int) -> dict[str, torch.Tensor]:
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
    module, callback = still(), pretraining()
    strategy = DDPStrategy(cluster_environment=LightningEnvironment())
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback, Look()], **QUIET
    )
    trainer.fit(module, datamodule=Blobs(batch_size=30))
    assert set(callback.module.worlds) == {2}, "the pretraining is shared out, too"
    assert len(callback.module.worlds) == 2 * 2, "two epochs of 120 rows in batches of 30, half of them here"
    assert trainer.world_size == 2
    return weights(module)


def test_two_processes_pretrain_together_and_agree():
    first, second = run_two_processes(_in_two)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(value, weights(make())[name]) for name, value in first.items())


def test_reliability_diagram_saves_what_the_test_saw(tmp_path):
    module = make()
    options = {**QUIET, "callbacks": [ReliabilityDiagram(num_bins=10)], "default_root_dir": tmp_path}
    tested = Trainer(accelerator="cpu", **options).test(module, datamodule=Blobs(), verbose=False)[0]
    saved = json.loads((tmp_path / "reliability.json").read_text())
    assert set(saved) == {"clu", "cal"}
    for head, content in saved.items():
        assert (tmp_path / f"reliability_{head}.png").stat().st_size > 1000
        assert sum(content["count"]) == 120
        right = sum(n * a for n, a in zip(content["count"], content["accuracy"], strict=True)) / 120
        assert right == pytest.approx(tested[f"test/{head}_acc"], abs=1e-6)
    assert ReliabilityDiagram(15).num_bins == 15


def test_reliability_diagram_needs_what_it_draws(tmp_path):
    classifier = Classifier(nn.Linear(8, 3), 3)
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[ReliabilityDiagram()], **QUIET)
    with pytest.raises(ValueError, match="not Classifier"):
        trainer.test(classifier, datamodule=Blobs(), verbose=False)
    with pytest.raises(ValueError, match="num_bins"):
        ReliabilityDiagram(0)
