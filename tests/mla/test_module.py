from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core import Classifier
from lightning_methods.mla import (
    MLA,
    CompareAdjustments,
    ETFClassifier,
    LogitAdjustment,
    TableMLP,
    additive_logit_adjustment,
    multiplicative_logit_adjustment,
    one_vs_one_scores,
    optimal_boundary_angles,
    search_strength,
)
from lightning_methods.mla.figures import boundary_angles
from tests.ddp import run_two_processes

COUNTS = [40, 12, 6, 2]


def samples(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
    return centres[y] + torch.randn(60, 6, generator=generator), y


class Data(LightningDataModule):
    """Long-tailed training data; a second, unaugmented loader gives other features than the training's."""

    class_counts = torch.tensor(COUNTS)

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift
        self.asked = 0

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples()), batch_size=16, shuffle=True)

    def feature_dataloader(self) -> DataLoader:
        self.asked += 1
        x, y = samples()
        return DataLoader(TensorDataset(x + self.shift, y), batch_size=7)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*samples(1)), batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader


def model(**options) -> MLA:
    torch.manual_seed(0)
    options = {"many_threshold": 10, "few_threshold": 3, **options}
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    return MLA(backbone, num_features=8, num_classes=4, **options)


def trainer(tmp_path, **options) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        logger=False,
        **{"max_epochs": 1, "enable_checkpointing": False, **options},
    )


# modules


def test_the_simplex_is_no_parameter_and_survives_training(tmp_path):
    module = model()
    assert {name for name, _ in module.named_parameters() if "classifier" in name} == {"classifier.bias"}
    assert "classifier.weight" in module.state_dict()
    before, bias = module.classifier.weight.clone(), module.classifier.bias.detach().clone()
    assert bias.abs().max() <= 1 / 8
    trainer(tmp_path).fit(module, datamodule=Data())
    assert torch.equal(module.classifier.weight, before)
    assert not torch.equal(module.classifier.bias, bias)
    assert ETFClassifier(8, 4, bias=False).bias is None
    assert isinstance(model(classifier="linear").classifier, nn.Linear)


def test_table_network():
    torch.manual_seed(0)
    plain, skipping = TableMLP(5, 16, num_blocks=3), TableMLP(5, 16, num_blocks=3, skip=True)
    assert [block.skip for block in skipping.blocks] == [False, True, True, False]
    skipping.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5)
    assert plain.eval()(x).shape == (4, 16)
    assert not torch.equal(plain(x), skipping.eval()(x))
    assert all(block.linear.bias is None for block in plain.blocks)
    assert len(TableMLP().blocks) == 9


# the loss


def test_the_loss(tmp_path):
    module = model(feature_regularization=0.3, class_counts=COUNTS).train()
    logged = {}
    module.log = lambda name, value, **options: logged.update({name: value})
    x, y = samples()
    torch.manual_seed(1)
    loss = module.training_step((x, y), 0)
    torch.manual_seed(1)
    features = module.backbone(x)
    ce = F.cross_entropy(module.classifier(features), y)  # nothing is adjusted in training
    penalty = 0.15 * features.square().sum(1).mean()
    torch.testing.assert_close(loss, ce + penalty)
    torch.testing.assert_close(logged["train/loss_ce"], ce)
    torch.testing.assert_close(logged["train/loss_feature"], penalty)
    late = model(loss="logit_adjusted", adjustment="none", tau=0.7, class_counts=COUNTS, feature_regularization=0.0)
    late.log = module.log
    torch.manual_seed(1)
    loss = late.training_step((x, y), 0)
    prior = (torch.tensor(COUNTS) / 60).log()
    torch.manual_seed(1)
    torch.testing.assert_close(loss, F.cross_entropy(late.logits(x) + 0.7 * prior, y))


# adjustment


def test_forward_adjusts_in_eval_mode_only():
    x, _ = samples()
    module = model(class_counts=COUNTS, gamma=0.8).eval()
    raw = module.logits(x)
    torch.testing.assert_close(module(x), multiplicative_logit_adjustment(raw, COUNTS, 0.8))
    module.set_adjustment("additive", 1.5)
    torch.testing.assert_close(module(x), additive_logit_adjustment(raw, COUNTS, 1.5))
    module.set_adjustment("one_vs_one")  # keeps gamma
    assert torch.equal(module(x), one_vs_one_scores(raw, optimal_boundary_angles(COUNTS, 0.8)))
    module.feature_norms.copy_(torch.tensor([1.0, 4.0, 2.0, 3.0]))
    angles = optimal_boundary_angles(COUNTS, 0.8, module.feature_norms)
    assert torch.equal(module(x), one_vs_one_scores(raw, angles))
    module.use_feature_norms = False
    assert torch.equal(module(x), one_vs_one_scores(raw, optimal_boundary_angles(COUNTS, 0.8)))
    module.set_adjustment("none")
    assert torch.equal(module(x), raw)
    module.set_adjustment("multiplicative", 0.8)
    module.train()
    torch.manual_seed(1)
    out = module(x)
    torch.manual_seed(1)
    assert torch.equal(out, module.logits(x))


def test_counts_and_logs(tmp_path):
    module = model()
    run = trainer(tmp_path, max_epochs=3)
    run.fit(module, datamodule=Data())
    assert module.class_counts.tolist() == COUNTS
    assert {"train/loss", "train/loss_ce", "train/loss_feature", "val/acc"} <= set(run.callback_metrics)
    result = run.test(module, datamodule=Data(), verbose=False)[0]
    x, y = samples(1)
    module.eval()
    with torch.no_grad():
        hits = module(x).argmax(1) == y
        raw_hits = module.logits(x).argmax(1) == y
    by_class = torch.stack([hits[y == k].float().mean() for k in range(4)])
    assert result["test/acc"] == pytest.approx(by_class.mean().item())
    assert result["test/acc_many"] == pytest.approx(by_class[:2].mean().item())
    assert result["test/acc_medium"] == pytest.approx(by_class[2].item())
    assert result["test/acc_few"] == pytest.approx(by_class[3].item())
    raw = torch.stack([raw_hits[y == k].float().mean() for k in range(4)]).mean()
    assert result["test/acc_unadjusted"] == pytest.approx(raw.item())
    # Without classes of a kind there is nothing to log, rather than a nan or a zero.
    assert "test/acc_many" not in run.test(model(many_threshold=50), datamodule=Data(), verbose=False)[0]


def test_search_takes_the_best_on_the_given_data(tmp_path):
    module = model(class_counts=COUNTS)
    loader = Data().val_dataloader()
    best, accuracies = module.search_strength(loader)
    x, y = samples(1)
    with torch.no_grad():
        expected, values = search_strength(module.eval().logits(x), y, COUNTS, [i / 20 for i in range(41)])
    assert best == expected == module.gamma
    assert list(accuracies.values()) == pytest.approx(values.tolist())
    assert len(accuracies) == 41
    module.set_adjustment("none")
    with pytest.raises(ValueError, match="no strength"):
        module.search_strength(loader)


# feature norms


def test_norms_are_those_of_class_means_in_eval_mode(tmp_path):
    module = model(class_counts=COUNTS).train()
    norms = module.estimate_feature_norms(Data().feature_dataloader())
    assert module.training
    x, y = samples()
    with torch.no_grad():
        features = module.eval().backbone(x)
    expected = torch.stack([features[y == k].mean(0).norm() for k in range(4)])
    torch.testing.assert_close(norms, expected)
    torch.testing.assert_close(module.state_dict()["feature_norms"], expected)
    with pytest.raises(ValueError, match="class 3 does not occur"):
        module.estimate_feature_norms([(x[:58], y[:58])])
    with pytest.raises(ValueError, match="no batch"):
        module.estimate_feature_norms([])


def test_norms_come_from_the_feature_loader_at_the_end_of_a_fit_or_before_a_test(tmp_path):
    data = Data(shift=2.0)
    module = model(adjustment="one_vs_one")
    run = trainer(tmp_path)
    run.fit(module, datamodule=data)
    assert data.asked == 1
    expected = module.feature_norms.clone()
    torch.testing.assert_close(module.estimate_feature_norms(Data(shift=2.0).feature_dataloader()), expected)
    run.test(module, datamodule=data, verbose=False)
    assert data.asked == 1  # they are known
    run.save_checkpoint(tmp_path / "fitted.ckpt")
    again = MLA.load_from_checkpoint(tmp_path / "fitted.ckpt", backbone=model().backbone)
    assert torch.equal(again.feature_norms, expected)
    assert again.class_counts.tolist() == COUNTS
    module.norms_known.fill_(False)  # as in a checkpoint from the middle of a training
    run.test(module, datamodule=data, verbose=False)
    assert data.asked == 2
    unaware = Data()
    trainer(tmp_path).fit(model(), datamodule=unaware)
    assert unaware.asked == 0


def test_norms_are_in_the_checkpoint_of_the_last_epoch(tmp_path):
    for options in ({"max_epochs": 2}, {"max_epochs": -1, "max_steps": 5}):
        module, data = model(adjustment="one_vs_one"), Data()
        saved = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
        trainer(tmp_path, callbacks=[saved], enable_checkpointing=True, **options).fit(module, datamodule=data)
        assert data.asked == 1
        again = MLA.load_from_checkpoint(tmp_path / "last.ckpt", backbone=model().backbone).eval()
        x, _ = samples(1)
        assert again.norms_known
        assert torch.equal(again(x), module.eval()(x))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_statistics_in_every_precision(tmp_path, precision):
    module, data = model(adjustment="one_vs_one"), Data()
    run = trainer(tmp_path, precision=precision, callbacks=[CompareAdjustments()])
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    module.search_strength(data.val_dataloader(), [0.0, 0.5])
    exact = copy.deepcopy(module).double()
    exact._trainer = None
    expected = exact.estimate_feature_norms([(x.double(), y) for x, y in data.feature_dataloader()])
    torch.testing.assert_close(module.feature_norms.double(), expected, rtol=0.02, atol=0)


def test_measuring_leaves_modes_as_they_are():
    module = model(class_counts=COUNTS, adjustment="one_vs_one").train()
    module.backbone[1].eval()  # a part that its owner has frozen
    module.estimate_feature_norms(Data().feature_dataloader())
    module.search_strength(Data().val_dataloader(), [0.5])
    with pytest.raises(ValueError, match="does not occur"):
        module.estimate_feature_norms([(torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))])
    assert [part.training for part in module.backbone] == [True, False, True]
    assert module.training


@pytest.mark.bad_input  # the run-time check of types allows lists only
def test_counts_may_be_a_tensor(recwarn):
    counts = torch.tensor(COUNTS)
    module = model(class_counts=counts)
    module.class_counts.zero_()
    assert counts.tolist() == COUNTS
    assert not recwarn


def _norms_on_a_rank(rank: int, world: int) -> torch.Tensor:
    x, y = samples()
    rows = slice(0, 17) if rank == 0 else slice(17, 60)
    return model(class_counts=COUNTS).estimate_feature_norms([(x[rows], y[rows])])


def test_norms_are_of_the_samples_of_all_ranks():
    alone = model(class_counts=COUNTS).estimate_feature_norms([samples()])
    for norms in run_two_processes(_norms_on_a_rank):
        torch.testing.assert_close(norms, alone)


def test_a_checkpoint_keeps_a_later_adjustment(tmp_path):
    module = model()
    run = trainer(tmp_path)
    run.fit(module, datamodule=Data())
    module.set_adjustment("additive", 0.3)
    run.save_checkpoint(tmp_path / "set.ckpt")
    again = MLA.load_from_checkpoint(tmp_path / "set.ckpt", backbone=model().backbone)
    assert (again.adjustment, again.tau, again.gamma) == ("additive", 0.3, 0.5)


# callbacks


class Watching(Classifier):
    """Keeps what its own forward gave to its steps."""

    def on_fit_start(self) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {}

    def loss(self, logits, y):
        self.seen.setdefault("train" if self.training else "eval", []).append(logits.detach())
        return super().loss(logits, y)


@pytest.mark.parametrize("adjustment", ["multiplicative", "additive", "one_vs_one"])
def test_the_callback_adjusts_any_module_outside_of_training(tmp_path, adjustment):
    torch.manual_seed(0)
    module = Watching(nn.Linear(6, 4), 4)
    callback = LogitAdjustment(adjustment, gamma=0.7, tau=0.4)
    run = trainer(tmp_path, callbacks=[callback], max_epochs=2)
    seen = []
    module.register_forward_hook(lambda m, args, out: seen.append((m.training, args[0], out)))
    run.fit(module, datamodule=Data())
    assert callback._handle is None
    assert len(module._forward_hooks) == 1
    assert any(training for training, *_ in seen)
    x, _ = samples(1)
    raw = module.network(x[:16]).detach()
    module.seen = {}
    run.test(module, datamodule=Data(), verbose=False)
    expected = {
        "multiplicative": lambda: multiplicative_logit_adjustment(raw, COUNTS, 0.7),
        "additive": lambda: additive_logit_adjustment(raw, COUNTS, 0.4),
        "one_vs_one": lambda: one_vs_one_scores(raw, optimal_boundary_angles(COUNTS, 0.7)),
    }[adjustment]()
    torch.testing.assert_close(module.seen["eval"][0], expected)
    predicted = torch.cat(run.predict(module, datamodule=Data()))
    torch.testing.assert_close(predicted[:16], expected.softmax(1))
    torch.testing.assert_close(module(x[:16]).detach(), raw)  # gone again
    assert pickle.loads(pickle.dumps(callback))._handle is None
    assert copy.deepcopy(callback)._handle is None


def test_the_callback_leaves_training_alone(tmp_path):
    states = []
    for callbacks in ([], [LogitAdjustment(class_counts=COUNTS, gamma=1.0)]):
        torch.manual_seed(0)
        module = Classifier(nn.Linear(6, 4), 4)
        trainer(tmp_path, callbacks=callbacks, max_epochs=2).fit(module, datamodule=Data())
        states.append(module.state_dict()["network.weight"])
    assert torch.equal(*states)


class GoesAround(Classifier):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(self.network(batch[0]), batch[1]))


def test_the_callback_warns_where_forward_is_not_called(tmp_path):
    run = trainer(tmp_path, callbacks=[LogitAdjustment()])
    with pytest.warns(UserWarning, match="LogitAdjustment did nothing: GoesAround"):
        run.validate(GoesAround(nn.Linear(6, 4), 4), datamodule=Data(), verbose=False)


def test_compare_adjustments(tmp_path):
    module = model()
    run = trainer(tmp_path, callbacks=[CompareAdjustments(gamma=0.5, tau=1.0)], max_epochs=2)
    run.fit(module, datamodule=Data())
    result = run.test(module, datamodule=Data(), verbose=False)[0]
    x, y = samples(1)
    module.eval()
    with torch.no_grad():
        raw = module.logits(x)
    norms = Data().feature_dataloader()
    norms = module.estimate_feature_norms(norms)
    best = one_vs_one_scores(raw, optimal_boundary_angles(COUNTS, 0.5, norms)).argmax(1)
    preds = {
        "none": raw.argmax(1),
        "multiplicative": multiplicative_logit_adjustment(raw, COUNTS, 0.5).argmax(1),
        "additive": additive_logit_adjustment(raw, COUNTS, 1.0).argmax(1),
        "one_vs_one": best,
    }
    for name, pred in preds.items():
        hits = torch.stack([(pred == y)[y == k].float().mean() for k in range(4)])
        assert result[f"test/acc_{name}"] == pytest.approx(hits.mean().item())
        assert result[f"test/few_{name}"] == pytest.approx(hits[3].item())
        assert result[f"test/agreement_{name}"] == pytest.approx((pred == best).float().mean().item())
    expected = (torch.tensor(COUNTS) * norms).sum() / 60
    assert result["test/feature_norm"] == pytest.approx(expected.item(), rel=1e-5)
    assert not module.classifier._forward_hooks


def test_the_figures_angles():
    angles = boundary_angles(torch.tensor([0.01, 1.0, 100.0]))
    for values in angles.values():
        assert values[1].item() == pytest.approx(48.19, abs=0.01)
    assert (angles["one_vs_one"] - angles["multiplicative"]).abs().max() < 3.3


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjustment": "multiplicativ"}, "Did you mean 'multiplicative'"),
        ({"classifier": "simplex"}, "classifier must be one of"),
        ({"loss": "ce"}, "loss must be one of"),
        ({"adjustment": "additive", "loss": "logit_adjusted"}, "two forms of one correction"),
        ({"gamma": -1.0}, "gamma"),
        ({"tau": -1.0}, "tau"),
        ({"feature_regularization": -1.0}, "feature_regularization"),
        ({"many_threshold": 2}, "many_threshold"),
        ({"class_counts": [1, 2, 3]}, "class_counts must have shape"),
        ({"class_counts": [1, 2, 3, 0]}, "class_counts must be positive"),
        ({"lr_interval": "batch"}, "lr_interval"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        model(**options)


@pytest.mark.bad_input
def test_bad_use(tmp_path):
    x, y = samples()
    with pytest.raises(ValueError, match="num_features must be at least num_classes=4, got 3"):
        MLA(nn.Linear(6, 3), 3, 4)
    with pytest.raises(ValueError, match="one_vs_one"):
        MLA(nn.Linear(6, 3), 3, 2, adjustment="one_vs_one")
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    with pytest.raises(ValueError, match="MLA needs class_counts"):
        trainer(tmp_path).fit(model(), loader)
    with pytest.raises(ValueError, match="MLA needs class_counts"):
        model().eval()(x)
    with pytest.raises(ValueError, match=r"the batch's labels must be in 0\.\.3, got 4"):
        trainer(tmp_path).fit(model(class_counts=COUNTS), DataLoader(TensorDataset(x, y + 1), batch_size=60))
    with pytest.raises(ValueError, match="LogitAdjustment needs class_counts"):
        trainer(tmp_path, callbacks=[LogitAdjustment()]).validate(Classifier(nn.Linear(6, 4), 4), loader, verbose=False)
    with pytest.raises(ValueError, match="MLA adjusts its logits itself"):
        trainer(tmp_path, callbacks=[LogitAdjustment()]).validate(model(), datamodule=Data(), verbose=False)
    twice = [LogitAdjustment(class_counts=COUNTS), LogitAdjustment("additive", class_counts=COUNTS)]
    with pytest.raises(ValueError, match="several LogitAdjustment"):
        trainer(tmp_path, callbacks=twice).validate(Classifier(nn.Linear(6, 4), 4), loader, verbose=False)
    with pytest.raises(ValueError, match="class_counts must have shape"):
        LogitAdjustment(class_counts=[1, 2]).adjusted(torch.zeros(1, 3))
    with pytest.raises(TypeError, match="forward that returns logits"):
        LogitAdjustment(class_counts=[1, 2])._hook(None, (), (x, y))
    with pytest.raises(ValueError, match="class_counts must be positive"):
        LogitAdjustment(class_counts=[1, 0])
    with pytest.raises(ValueError, match="one of"):
        LogitAdjustment("mla")
    with pytest.raises(ValueError, match="CompareAdjustments is for MLA"):
        trainer(tmp_path, callbacks=[CompareAdjustments()]).test(
            Classifier(nn.Linear(6, 4), 4), datamodule=Data(), verbose=False
        )
