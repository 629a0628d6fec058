"""The callbacks on real fits: what is counted, when it is reset, what a checkpoint carries, who else may use them."""

from __future__ import annotations

import copy
import math
import os
import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from datamodules import ContinualDataModule
from lightning_methods.core import Classifier
from lightning_methods.snr import (
    CausalTransformer,
    ConcatReLU,
    ContinualBackprop,
    ContinualClassifier,
    ContinualCNN,
    ContinualMLP,
    L2Init,
    L2Regularization,
    PlasticityMonitor,
    ReDo,
    SelfNormalizedResets,
    ShrinkAndPerturb,
    UnitResetCallback,
    cbp_utility,
    find_layer_pairs,
    redo_scores,
    update_ages,
    update_thresholds,
)
from tests.ddp import run_two_processes

BATCH = 8


def trainer(*callbacks, max_epochs=1, **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return Trainer(**{"max_epochs": max_epochs, "enable_checkpointing": False, "devices": 1, **quiet, **options},
                   callbacks=list(callbacks))  # fmt: skip


def loader(batches=6, features=4, batch=BATCH, seed=0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch, features, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (len(x),), generator=generator)), batch_size=batch)


def network(width=6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def learner(net=None, lr=0.05, optimizer=torch.optim.Adam) -> ContinualClassifier:
    torch.manual_seed(0)
    return ContinualClassifier(net or network(), optimizer=lambda params: optimizer(params, lr=lr))


def kill_(layer: nn.Linear, *units: int) -> None:
    """Make units silent for good."""
    with torch.no_grad():
        layer.weight[list(units)] = 0
        layer.bias[list(units)] = -1


class StandIn(Trainer):
    """What the callbacks ask a trainer, without one."""

    global_step = 0
    strategy = DDPStrategy()
    optimizers = ()

    def __init__(self, optimizers):
        self.optimizers = optimizers


SMALL = {"initial_threshold": 16, "max_threshold": 64, "min_threshold": 16, "update_every_n_steps": 4}


# the algorithm


class Reference(SelfNormalizedResets):
    """Writes down what the callback saw and did, for an independent loop to repeat."""

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.log_fired, self.log_reset = [], []

    def after_batch(self, fired, examples):
        self.log_fired.append((fired.clone(), examples))
        super().after_batch(fired, examples)

    def after_reset(self, mask):
        self.log_reset.append((self.steps, mask.clone()))
        super().after_reset(mask)


def test_a_fit_is_the_algorithm_step_by_step():
    """Ages, histograms, thresholds and resets of a whole fit, repeated by the pure functions in the paper's order."""
    model = learner(lr=0.3)
    kill_(model.network[0], 1)
    callback = Reference(eta=0.1, histogram_bin=1, **SMALL)
    trainer(callback, max_epochs=6).fit(model, loader())
    assert callback.total_resets > 3
    ages = torch.zeros(12, dtype=torch.long)
    thresholds = torch.full((12,), 16)
    histogram = torch.zeros(12, 65, dtype=torch.long)
    resets = dict(callback.log_reset)
    for step, (fired, examples) in enumerate(callback.log_fired, start=1):
        assert examples == BATCH
        ages, histogram = update_ages(fired, ages, examples, histogram)
        mask = ages >= thresholds
        assert torch.equal(resets.get(step, torch.zeros(12, dtype=torch.bool)), mask), step
        for unit in mask.nonzero().flatten().tolist():
            if ages[unit] <= 64:
                histogram[unit, ages[unit]] += 1
            ages[unit] = 0
        if step % 4 == 0:
            thresholds = update_thresholds(histogram, thresholds, percentile=0.9, min_threshold=16, max_threshold=64)
            histogram.zero_()
    assert torch.equal(callback.state["ages"], ages)
    assert torch.equal(callback.state["thresholds"], thresholds)
    assert torch.equal(callback.state["histogram"].long(), histogram)
    assert callback.total_resets == sum(int(mask.sum()) for _, mask in callback.log_reset)
    assert sum(callback.resets_per_layer.values()) == callback.total_resets
    assert list(callback.resets_per_layer) == ["network.0", "network.2"]


def test_firing_is_that_of_the_parameters_before_the_step():
    """A unit that the step brings to life was silent in this batch."""

    class Awaken(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
            kill_(self.net[0], 0, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            with torch.no_grad():
                self.net[0].bias.fill_(100.0)

    callback = SelfNormalizedResets(dead_after=8)
    fit = trainer(callback, limit_train_batches=1)
    fit.fit(Awaken(), loader())
    assert callback.state["ages"].tolist() == [BATCH, BATCH]
    fit = trainer(callback, limit_train_batches=2)
    fit.fit(Awaken(), loader())
    assert callback.state["ages"].tolist() == [0, 0]


def test_a_reset_unit_is_new_and_its_optimizer_state_is_clean():
    model = learner(lr=1e-3)
    kill_(model.network[0], 2)
    with torch.no_grad():
        model.network[2].weight[:, 2] = 9.0
    callback = SelfNormalizedResets(**{**SMALL, "initial_threshold": 16})
    fit = trainer(callback, max_steps=2, max_epochs=-1)
    fit.fit(model, loader())
    assert callback.resets_per_layer["network.0"] >= 1
    assert (model.network[0].weight[2] != 0).all()
    assert model.network[0].weight[2].abs().max() <= 4**-0.5
    assert model.network[0].bias[2] == 0
    fresh = callback.resets_per_layer["network.2"] == 0
    if fresh:
        assert (model.network[2].weight[:, 2] == 0).all()
    state = fit.optimizers[0].state
    assert (state[model.network[0].weight]["exp_avg_sq"][2] == 0).all()
    assert (state[model.network[2].weight]["exp_avg"][:, 2] == 0).all()
    assert state[model.network[0].weight]["step"] == 2


def test_a_unit_of_the_last_layer_is_never_reset():
    model = learner(nn.Sequential(nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="no layers to watch"):
        trainer(SelfNormalizedResets()).fit(model, loader())


def test_lecun_init_is_used():
    model = learner(nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 3)))
    kill_(model.network[0], *range(400))
    trainer(SelfNormalizedResets(init="lecun_normal", **SMALL), max_steps=2, max_epochs=-1).fit(model, loader())
    assert model.network[0].weight.std().item() == pytest.approx(0.5, rel=0.05)


# estimators


@pytest.mark.parametrize("estimator", ["geometric", "empirical"])
def test_a_unit_is_judged_by_its_own_history(estimator):
    """A unit that used to fire always is reset after a short silence, one that fires rarely is not."""
    callback = SelfNormalizedResets(
        0.05, estimator=estimator, min_threshold=16, max_threshold=10_000, initial_threshold=10_000, min_observations=5
    )
    model = learner()
    trainer(callback, max_steps=1, max_epochs=-1).fit(model, loader())
    callback.watched = []
    units = 12
    callback.state = {
        "silence": torch.zeros(units, dtype=torch.long),
        **callback.make_state(units, torch.device("cpu")),
    }
    for step in range(200):
        fired = torch.ones(units, dtype=torch.bool)
        fired[1] = step % 10 == 0
        fired[2] = False  # never known
        callback.after_batch(fired, BATCH)
    silent = torch.zeros(units, dtype=torch.bool)
    due = []
    for _ in range(60):
        callback.after_batch(silent, BATCH)
        due.append(callback.select())
    due = torch.stack(due)
    first = due.int().argmax(dim=0)
    assert first[0] == 1  # 16 examples: not before min_threshold, and then at once
    # Ten steps from firing to firing; the first one counts one step, the last one was nine steps ago.
    mean = (1 + 19 * 10) / 20
    wanted = math.ceil(math.log(0.05) / math.log(1 - 1 / mean)) + 1 - 10 if estimator == "geometric" else 0
    assert first[1] == wanted
    assert due[wanted:, 1].all()
    assert not due[:, 2].any()
    callback.after_reset(due[-1])
    assert callback.state["ages"][0] == 0
    assert callback.state["observations"][0] == 0
    assert callback.state["observations"][2] == 0
    assert callback.state["ages"][2] == 260 * BATCH


@pytest.mark.parametrize("estimator", ["histogram", "geometric", "empirical"])
def test_estimators_in_a_fit(estimator):
    model = learner(lr=0.5)
    callback = SelfNormalizedResets(0.1, estimator=estimator, min_observations=2, window=7, **SMALL)
    trainer(callback, max_epochs=6).fit(model, loader())
    assert callback.total_resets > 0


def test_bins_have_the_size_of_the_first_batch_and_forget_nothing():
    runs = []
    for bins in (None, 1, BATCH):
        model = learner(lr=0.3)
        callback = SelfNormalizedResets(0.1, histogram_bin=bins, **SMALL)
        trainer(callback, max_epochs=6).fit(model, loader())
        runs.append((callback, model.network[2].weight))
    assert runs[0][0].state["histogram"].shape == (12, 64 // BATCH + 1)
    assert runs[1][0].state["histogram"].shape == (12, 65)
    for callback, weight in runs[1:]:
        assert torch.equal(weight, runs[0][1])
        assert torch.equal(callback.state["thresholds"], runs[0][0].state["thresholds"])


# how a module trains


def test_accumulation_resets_after_real_steps_only_and_counts_every_micro_batch():
    model = learner(lr=0.0)
    kill_(model.network[0], 0)
    seen = []

    class Watch(SelfNormalizedResets):
        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            seen.append((trainer.global_step, int(self.state["ages"][0]), self.resets_per_layer["network.0"]))

    callback = Watch(initial_threshold=16, max_threshold=64, min_threshold=16)
    trainer(callback, accumulate_grad_batches=3, limit_train_batches=6).fit(model, loader())
    # 16 examples are reached at the second micro-batch, the step comes at the third.
    assert seen[:4] == [(0, 8, 0), (0, 16, 0), (1, 0, 1), (1, 0 if seen[3][1] == 0 else 8, 1)]
    assert callback.steps == 2


class ManualGAN(LightningModule):
    """Two networks, two optimisers, manual optimisation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.a = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.b = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
        kill_(self.a[0], 1)
        kill_(self.b[0], 3)

    def training_step(self, batch, batch_idx):
        losses = lambda: self.b(self.a(batch[0])).mean(), lambda: self.b(self.a(batch[0]).detach()).std()
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.a.parameters(), lr=1e-3),
            torch.optim.SGD(self.b.parameters(), lr=1e-3, momentum=0.9),
        ]


def test_manual_optimisation_with_two_optimizers():
    model = ManualGAN()
    callback = SelfNormalizedResets(initial_threshold=32, max_threshold=64, min_threshold=32)
    fit = trainer(callback, limit_train_batches=3)
    fit.fit(model, loader())
    # Two forward passes a batch: 16 examples.
    assert callback.resets_per_layer["a.0"] >= 1
    assert callback.resets_per_layer["b.0"] >= 1
    assert (model.a[0].weight[1] != 0).all()
    assert (model.b[0].weight[3] != 0).all()
    assert callback.steps == 3


def test_validation_and_predictions_are_not_watched():
    class Validated(Classifier):
        def on_train_batch_start(self, *args):
            self.train()
            self(torch.ones(3, 4))  # a forward pass of somebody else's: before the callback watches or after

    callback = PlasticityMonitor()
    model = Classifier(network(), 3)
    trainer(callback).fit(model, loader(), loader(seed=1))
    alone = PlasticityMonitor()
    trainer(alone).fit(copy.deepcopy(model), loader())
    assert callback.state["silence"].max() <= 6 * BATCH
    model.network(torch.zeros(2, 4))  # no hook is left
    assert callback.watching is False


def test_checkpointed_activations_are_counted_once():
    class Checkpointed(ContinualClassifier):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.network, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(network())
    kill_(model.network[0], 0)
    callback = PlasticityMonitor()
    trainer(callback, limit_train_batches=2).fit(model, loader())
    assert callback.state["silence"][0] == 2 * BATCH


def test_frozen_teachers_are_not_touched():
    class Student(Classifier):
        frozen = ("teacher",)

        def __init__(self):
            super().__init__(network(), 3)
            self.teacher = network()

        def training_step(self, batch, batch_idx):
            self.teacher(batch[0])
            return super().training_step(batch, batch_idx)

    model = Student()
    before = copy.deepcopy(model.teacher.state_dict())
    callback = SelfNormalizedResets(initial_threshold=8, max_threshold=8, min_threshold=8)
    trainer(callback, max_epochs=3).fit(model, loader())
    assert list(callback.resets_per_layer) == ["network.0", "network.2"]
    assert all(torch.equal(value, before[name]) for name, value in model.teacher.state_dict().items())


class TwoHeads(LightningModule):
    """One layer with a norm, read by two heads, and a residual sum: nothing that can be found by itself."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        h = self.norm(self.body(batch[0])).relu()
        return F.cross_entropy(self.left(h) + self.right(h), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.0)


def test_named_layers_with_several_consumers_and_a_norm():
    torch.manual_seed(0)
    model = TwoHeads()
    with torch.no_grad():
        model.norm.bias[2] = -50.0  # silent after the norm, though the layer itself is not
    callback = SelfNormalizedResets(layers=[("body", ["norm", "left", "right"])], **SMALL)
    trainer(callback, limit_train_batches=2).fit(model, loader())
    assert callback.resets_per_layer == {"body": 1}
    for head in (model.left, model.right):
        assert (head.weight[:, 2] == 0).all()
        assert (head.weight[:, 3] != 0).all()
    assert model.norm.bias[2] == 0
    assert model.norm.running_var[2] == 1


def test_convolutions_batchnorm_and_bfloat16():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip
    with torch.no_grad():
        for norm, silent in ((net[1], 3), (net[6], 0)):
            norm.bias.fill_(5.0)
            norm.bias[silent] = -50.0
    x = torch.randn(4 * BATCH, 1, 8, 8)
    data = DataLoader(TensorDataset(x, torch.randint(3, (len(x),))), batch_size=BATCH)
    model = learner(net, lr=0.0)
    callback = SelfNormalizedResets(initial_threshold=32, max_threshold=64, min_threshold=32)
    trainer(callback, precision="bf16-mixed").fit(model, data)
    assert callback.resets_per_layer == {"network.0": 1, "network.5": 1}
    assert (net[5].weight[1:, 27:] == 0).all()
    assert (net[5].weight[:, :27] != 0).all()
    assert (net[5].weight[0] != 0).sum() >= 36 - 9
    assert net[1].bias[3] == 0
    assert net[6].bias[0] == 0


def test_other_activations_warn():
    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    with pytest.warns(UserWarning, match="not ReLU"):
        trainer(SelfNormalizedResets(), fast_dev_run=True).fit(learner(net), loader())


def test_transformer_mlp_units():
    torch.manual_seed(0)
    model = learner(CausalTransformer(11, context=5, num_layers=2, mlp_units=16), lr=1e-3)
    with torch.no_grad():
        model.network.blocks[1].mlp[0].bias[7] = -50.0
    tokens = torch.randint(11, (4 * BATCH, 6))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH)
    callback = SelfNormalizedResets(initial_threshold=16, max_threshold=64, min_threshold=16)
    with pytest.warns(UserWarning, match="could not be proven"):
        trainer(callback).fit(model, data)
    assert list(callback.resets_per_layer) == ["network.blocks.0.mlp.0", "network.blocks.1.mlp.0"]
    assert callback.resets_per_layer["network.blocks.1.mlp.0"] >= 1
    assert model.network.blocks[1].mlp[0].bias[7] > -1


def test_unsupported_optimizers_and_strategies_say_so():
    class Factored(ContinualClassifier):
        def configure_optimizers(self):
            return torch.optim.Adafactor(self.parameters())

    with pytest.raises(ValueError, match="Adafactor"):
        trainer(SelfNormalizedResets()).fit(Factored(network()), loader())
    trainer(PlasticityMonitor(), fast_dev_run=True).fit(Factored(network()), loader())  # resets nothing

    sharded = StandIn([])
    sharded.strategy = FSDPStrategy()
    for callback in (SelfNormalizedResets(), L2Init(), ShrinkAndPerturb(), ReDo()):
        with pytest.raises(NotImplementedError, match="FSDPStrategy"):
            callback.setup(sharded, learner(), "fit")


# checkpoints, copies


CALLBACKS = {
    "snr": lambda: SelfNormalizedResets(0.1, **SMALL),
    "snr geometric": lambda: SelfNormalizedResets(0.1, estimator="geometric", min_observations=2, **SMALL),
    "snr empirical": lambda: SelfNormalizedResets(0.1, estimator="empirical", min_observations=2, window=5, **SMALL),
    "redo": lambda: ReDo(period=4, tau=0.3),
    "cbp": lambda: ContinualBackprop(0.05, maturity=3),
    "l2 init": lambda: L2Init(0.1),
    "l2": lambda: L2Regularization(0.1),
    "shrink and perturb": lambda: ShrinkAndPerturb(0.99, 0.01, every_n_steps=4),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resumed_fit_is_the_uninterrupted_one(name, tmp_path):
    """Five epochs of six steps: no period divides what was done before the interruption."""
    options = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    whole, callback = learner(lr=0.3), CALLBACKS[name]()
    trainer(callback, max_epochs=5).fit(whole, loader())

    first = learner(lr=0.3)
    saver = ModelCheckpoint(tmp_path, save_last=True)
    trainer(CALLBACKS[name](), saver, max_epochs=3, **options).fit(first, loader())
    second, resumed = learner(lr=0.3), CALLBACKS[name]()
    trainer(resumed, max_epochs=5, **options).fit(second, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key
    assert second.task_accuracies == whole.task_accuracies
    if isinstance(callback, UnitResetCallback):
        assert callback.total_resets > 0
        assert resumed.resets_per_layer == callback.resets_per_layer
        for key, value in callback.state.items():
            assert torch.equal(resumed.state[key], value), key
    plain = learner(lr=0.3)
    trainer(max_epochs=5).fit(plain, loader())
    assert not torch.equal(plain.network[0].weight, whole.network[0].weight)


def test_a_checkpoint_of_other_layers_is_refused():
    callback = SelfNormalizedResets(**SMALL)
    trainer(callback).fit(learner(), loader())
    other = SelfNormalizedResets(**SMALL)
    other.load_state_dict(callback.state_dict())
    deeper = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *network()[2:], nn.ReLU(), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="watched the layers"):
        trainer(other).fit(learner(deeper), loader())


class Copying(SelfNormalizedResets):
    """Copies the network and itself in the middle of a fit."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        if not hasattr(self, "copies"):
            self.copies = []
            self.copies.append(copy.deepcopy(pl_module.network))
            self.copies.append(pickle.loads(pickle.dumps(pl_module.network)))
            self.copies.append(pickle.loads(pickle.dumps(self)))


def test_copies_made_while_training_carry_no_live_hook_and_none_is_left_behind():
    model = learner()
    callback = Copying(**SMALL)
    trainer(callback).fit(model, loader())
    assert not any(module._forward_hooks for module in model.modules())
    twin, pickled, other = callback.copies
    callback.watching = True
    callback.see = lambda *args: pytest.fail("a copy reached the callback")
    for copied in (twin, pickled):
        copied.train()(torch.zeros(2, 4))
    assert other.state["ages"].shape == (12,)
    assert other.watched == []


def test_hooks_are_removed_after_an_exception():
    class Fails(ContinualClassifier):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("stop")

    model = Fails(network())
    with pytest.raises(RuntimeError, match="stop"):
        trainer(SelfNormalizedResets()).fit(model, loader())
    assert not any(module._forward_hooks for module in model.modules())


def test_random_numbers_of_the_run_do_not_depend_on_resets():
    states = []
    for threshold in (8, 20000):
        model = learner()
        seed_everything(0, verbose=False)
        trainer(SelfNormalizedResets(initial_threshold=threshold, min_threshold=8), max_epochs=2).fit(model, loader())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def _two_ranks(rank: int, world: int) -> dict:
    """One rank of a fit: every rank has half of each batch of 2 * BATCH."""
    model = learner(lr=0.2, optimizer=torch.optim.SGD)
    callback = SelfNormalizedResets(0.1, **SMALL)
    fake = StandIn([model.configure_optimizers()])
    callback.setup(fake, model, "fit")
    callback.on_train_start(fake, model)
    x, _ = loader(batches=24, batch=2 * BATCH).dataset.tensors
    model.train()
    for step in range(24):
        batch = x[step * 2 * BATCH : (step + 1) * 2 * BATCH]
        local = batch[rank * BATCH : (rank + 1) * BATCH] if world > 1 else batch
        callback.on_train_batch_start(fake, model, None, step)
        model.network(local)
        fake.global_step += 1
        callback.on_train_batch_end(fake, model, None, None, step)
    return {"model": model.state_dict(), "state": callback.state, "resets": callback.total_resets}


def test_two_processes_see_the_global_batch_and_draw_the_same():
    one = _two_ranks(0, 1)
    assert one["resets"] > 0
    for result in run_two_processes(_two_ranks):
        assert result["resets"] == one["resets"]
        for part in ("model", "state"):
            for key, value in one[part].items():
                assert torch.equal(result[part][key], value), key


# competitors


def test_redo_resets_what_its_score_says_in_its_steps_only():
    model = learner(lr=0.0, optimizer=torch.optim.SGD)
    before = copy.deepcopy(model.network)
    callback = ReDo(period=3, tau=0.5)
    trainer(callback, max_steps=3, max_epochs=-1).fit(model, loader())
    x = list(loader())[2][0]
    h1 = before[1](before[0](x))
    h2 = before[3](before[2](h1))
    wanted = [int((redo_scores(h) <= 0.5).sum()) for h in (h1, h2)]
    assert sum(wanted) > 0
    assert list(callback.resets_per_layer.values()) == wanted
    changed = (model.network[0].weight != before[0].weight).any(dim=1)
    assert torch.equal(changed, redo_scores(h1) <= 0.5)


def test_redo_under_accumulation_looks_at_all_micro_batches():
    resets = []
    for batch, accumulate in ((24, 1), (8, 3)):
        model = learner(lr=0.0, optimizer=torch.optim.SGD)
        callback = ReDo(period=2, tau=0.5)
        trainer(callback, accumulate_grad_batches=accumulate).fit(model, loader(batches=48 // batch, batch=batch))
        resets.append((callback.resets_per_layer, model.network[0].weight))
    assert resets[0][0] == resets[1][0]
    assert torch.equal(resets[0][1], resets[1][1])


def test_continual_backprop_saves_up_and_takes_the_least_useful():
    model = learner(lr=0.0, optimizer=torch.optim.SGD)
    before = copy.deepcopy(model.network)
    callback = ContinualBackprop(replacement_rate=0.1, decay=0.9, maturity=2)
    # 6 units: 0.6 per step after two steps of protection; the first whole unit is due at step 4.
    trainer(callback, max_steps=3, max_epochs=-1).fit(model, loader())
    assert callback.total_resets == 0
    model = learner(lr=0.0, optimizer=torch.optim.SGD)
    trainer(callback, max_steps=4, max_epochs=-1).fit(model, loader())
    assert list(callback.resets_per_layer.values()) == [1, 1]
    utility, mean = torch.zeros(6), torch.zeros(6)
    for x, _ in list(loader())[:4]:
        h = before[1](before[0](x)).detach()
        utility = cbp_utility(h, before[2].weight.detach(), utility, 0.9)
        mean = 0.9 * mean + 0.1 * h.mean(dim=0)
    unit = int(utility.argmin())
    assert (model.network[0].weight != before[0].weight).any(dim=1).nonzero().item() == unit
    assert callback.state["unit_steps"][:6].tolist() == [0 if i == unit else 4 for i in range(6)]
    gain = before[2].weight[:, unit] * mean[unit] / (1 - 0.9**4)
    other = (model.network[2].weight != before[2].weight).all(dim=1)  # reset in its turn: its bias is zero
    torch.testing.assert_close(model.network[2].bias[~other], (before[2].bias + gain)[~other])


def test_l2_init_is_the_gradient_of_its_penalty():
    torch.manual_seed(0)
    penalised, reference = learner(lr=0.1, optimizer=torch.optim.SGD), learner(lr=0.1, optimizer=torch.optim.SGD)
    trainer(L2Init(0.05), max_epochs=2).fit(penalised, loader())
    origin = [p.detach().clone() for p in reference.parameters()]
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader():
            loss = F.cross_entropy(reference(x), y)
            loss = loss + 0.05 * sum(
                (p - o).square().sum() for p, o in zip(reference.parameters(), origin, strict=True)
            )
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    for a, b in zip(penalised.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.network[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network[0], optimizer, lr=0.1)


def test_l2_init_remembers_what_is_unfrozen_later():
    class Partly(ContinualClassifier):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    torch.manual_seed(0)
    model = Partly(network())
    start = model.network[0].weight.detach().clone()
    callback = L2Init(0.1)
    trainer(Unfreeze(), callback, max_epochs=3).fit(model, loader())
    assert not torch.equal(model.network[0].weight, start)
    assert torch.equal(callback.state_dict()["initial"]["network.0.weight"], start)


def test_l2_draws_to_zero_and_shrink_and_perturb_is_its_formula():
    model = learner(lr=0.0, optimizer=torch.optim.SGD)
    start = copy.deepcopy(model.network)
    trainer(ShrinkAndPerturb(0.5, 0.0), max_steps=2, max_epochs=-1).fit(model, loader())
    torch.testing.assert_close(model.network[0].weight, start[0].weight / 4)
    trainer(ShrinkAndPerturb(1.0, 0.1), max_steps=1, max_epochs=-1).fit(model, loader())
    drawn = (model.network[0].weight - start[0].weight / 4) / 0.1
    assert 0 < drawn.abs().max() <= 0.5 + 1e-5
    assert drawn.std() > 0.1
    model = learner(lr=0.1, optimizer=torch.optim.SGD)
    norm = sum(p.square().sum() for p in model.parameters())
    trainer(L2Regularization(1.0), max_epochs=3).fit(model, loader())
    assert sum(p.square().sum() for p in model.parameters()) < norm / 4


def test_monitor_logs_and_changes_nothing():
    watched, plain = learner(lr=0.1), learner(lr=0.1)
    fit = trainer(PlasticityMonitor(dead_after=8), max_epochs=2)
    fit.fit(watched, loader())
    trainer(max_epochs=2).fit(plain, loader())
    assert torch.equal(watched.network[0].weight, plain.network[0].weight)
    logged = fit.callback_metrics
    norm = sum(float(p.detach().square().sum()) for p in watched.parameters())
    assert logged["plasticity/weight_norm"] == pytest.approx(norm)
    assert logged["plasticity/grad_norm"] > 0
    assert 0 <= logged["plasticity/dead_fraction"] <= 1


# the learner and its networks


def test_online_accuracy_is_measured_before_the_update():
    model = learner(lr=0.1)
    reference = learner(lr=0.1)
    fit = trainer(max_epochs=1)
    fit.fit(model, loader())
    adam, right = torch.optim.Adam(reference.parameters(), lr=0.1), 0
    for x, y in loader():
        logits = reference(x)
        right += int((logits.argmax(dim=1) == y).sum())
        adam.zero_grad()
        F.cross_entropy(logits, y).backward()
        adam.step()
    assert model.task_accuracies == [pytest.approx(right / 48)]
    assert fit.callback_metrics["train/task_acc"] == pytest.approx(right / 48)


def test_a_task_is_the_data_modules_epochs():
    data = ContinualDataModule("random_label_digits", epochs_per_task=3, num_samples=32)
    model = ContinualClassifier(ContinualMLP(64))
    fit = trainer(max_epochs=7, reload_dataloaders_every_n_epochs=1)
    fit.fit(model, datamodule=data)
    assert len(model.task_accuracies) == 2
    assert model.task_sums[2] == 32  # the third task has begun
    results = fit.test(model, datamodule=data, verbose=False)[0]
    assert results["test/last_tasks_acc"] == pytest.approx(model.task_accuracies[-1])
    assert results["test/first_tasks_acc"] == pytest.approx(model.task_accuracies[0])
    assert 0 <= results["test/acc"] <= 1


def _counting_fit(rank: int, world: int, folder: str) -> dict:
    """Two epochs of a task of three, then the third from a checkpoint; nothing is learned, so that counts compare."""
    strategy = {"devices": 1}
    if world > 1:  # one process is that of all tests, whose environment has to stay
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                          GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")  # fmt: skip
        strategy = {"devices": world, "strategy": "ddp"}
    options = {"reload_dataloaders_every_n_epochs": 1, "enable_checkpointing": True, "default_root_dir": folder}
    data = {"epochs_per_task": 3, "num_samples": 64, "batch_size": 16 // world}
    for epochs, path in ((2, None), (3, f"{folder}/last.ckpt")):
        torch.manual_seed(0)
        model = learner(ContinualMLP(64), lr=0.0, optimizer=torch.optim.SGD)
        saver = ModelCheckpoint(folder, save_last=True)
        fit = trainer(saver, max_epochs=epochs, **options, **strategy)
        fit.fit(model, datamodule=ContinualDataModule("random_label_digits", **data), ckpt_path=path, weights_only=True)
    return {"accuracies": model.task_accuracies, "loss": fit.callback_metrics["train/task_loss"]}


@pytest.mark.filterwarnings("ignore")
def test_two_processes_count_every_batch(tmp_path):
    """Buffers are broadcast by DDP before each step; the counts of the second process must survive that."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = _counting_fit(0, 1, str(tmp_path / "one"))
    for result in run_two_processes(_counting_fit, str(tmp_path / "two")):
        assert result["accuracies"] == one["accuracies"]
        torch.testing.assert_close(result["loss"], one["loss"])


def test_summary_is_the_mean_of_a_tenth():
    model = learner()
    model.task_accuracies = [0.1] * 2 + [0.5] * 16 + [0.8, 0.9]
    logged = {}
    model.log = lambda name, value: logged.update({name: value})
    model._log_summary("train")
    assert logged == {"train/first_tasks_acc": pytest.approx(0.1), "train/last_tasks_acc": pytest.approx(0.85)}


@pytest.mark.parametrize("activation", ["relu", "crelu"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_networks(activation, layer_norm):
    options = {"activation": activation, "layer_norm": layer_norm, "init": "lecun_normal"}
    mlp, cnn = ContinualMLP(20, num_classes=7, **options), ContinualCNN(num_classes=7, **options)
    assert mlp(torch.randn(3, 4, 5)).shape == (3, 7)
    assert cnn(torch.randn(3, 3, 32, 32)).shape == (3, 7)
    assert all((m.bias == 0).all() for m in mlp.modules() if isinstance(m, nn.Linear))
    if activation == "relu":
        pairs = find_layer_pairs(cnn)
        assert len(pairs) == 4
        assert pairs[1].consumer.in_features == 16 * 25
        assert all((pair.norm is not None) == layer_norm for pair in pairs)
    plain = sum(p.numel() for p in ContinualMLP(20, num_classes=7).parameters())
    assert sum(p.numel() for p in mlp.parameters()) <= plain + 400 * layer_norm


def test_concat_relu_keeps_a_units_two_halves_together():
    x = torch.tensor([[1.0, -2.0]])
    assert ConcatReLU()(x).tolist() == [[1, 0, 0, 2]]
    assert ConcatReLU()(torch.randn(2, 3, 4, 4)).shape == (2, 6, 4, 4)


def test_transformer_is_causal_and_scales():
    net = CausalTransformer(13, context=8, scale=4)
    assert net.token.embedding_dim == 64
    assert net.blocks[0].mlp[0].out_features == 512
    x = torch.randint(13, (2, 8))
    y = x.clone()
    y[:, 5:] = (y[:, 5:] + 1) % 13
    torch.testing.assert_close(net(x)[:, :5], net(y)[:, :5])
    assert not torch.allclose(net(x)[:, 5:], net(y)[:, 5:])
    with pytest.raises(ValueError, match="divisible"):
        CausalTransformer(13, num_heads=3)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SelfNormalizedResets(0.0), "eta"),
        (lambda: SelfNormalizedResets(1.0), "eta"),
        (lambda: SelfNormalizedResets(initial_threshold=200, max_threshold=150), "initial_threshold"),
        (lambda: SelfNormalizedResets(max_threshold=50, initial_threshold=50), "max_threshold"),
        (lambda: SelfNormalizedResets(estimator="poisson"), "estimator"),
        (lambda: SelfNormalizedResets(init="zeros"), "init"),
        (lambda: SelfNormalizedResets(layers=[("a",)]), "layers"),
        (lambda: SelfNormalizedResets(expansion_factor=0.5), "expansion_factor"),
        (lambda: SelfNormalizedResets(histogram_bin=0), "histogram_bin"),
        (lambda: ReDo(tau=-1), "tau"),
        (lambda: ReDo(period=0), "period"),
        (lambda: ContinualBackprop(2.0), "replacement_rate"),
        (lambda: ContinualBackprop(decay=1.0), "decay"),
        (lambda: L2Init(-1.0), "strength"),
        (lambda: ShrinkAndPerturb(0.0), "shrink"),
        (lambda: ContinualMLP(activation="gelu"), "activation"),
        (lambda: ContinualCNN(image_size=12), "image_size"),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_names_that_do_not_fit_are_named():
    for layers, match in (
        ([("network.7", "network.2")], "no submodule"),
        ([("network.0", "network.4")], None),
        ([("network.0", "network.1")], "units are those"),
        ([("network.0", [])], "at least one consumer"),
    ):
        if match:
            with pytest.raises(ValueError, match=match):
                trainer(SelfNormalizedResets(layers=layers)).fit(learner(), loader())
    model = learner()
    model.network[0].requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        trainer(SelfNormalizedResets(layers=[("network.0", "network.2")])).fit(model, loader())
