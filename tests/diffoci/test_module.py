from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules import SensitiveToyDataModule, SpuriousDigitsDataModule, ToyDependenceDataModule
from lightning_methods.core import Classifier, GroupBatch, IndexedBatch
from lightning_methods.diffoci import (
    AttributeLeakage,
    DifFOCIClassifier,
    DifFOCIPenalty,
    DifFOCIRegularizer,
    DifFOCIRepresentation,
    DifFOCISelector,
    ElementwiseScale,
    codec,
    diffoci_coefficient,
    group_dro_update,
)
from lightning_methods.diffoci.callbacks import DownstreamScore, SaliencyMaps
from lightning_methods.diffoci.metrics import DependenceCoefficient
from lightning_methods.nn import MLP
from tests.ddp import assert_two_processes_agree, run_two_processes


def trainer(epochs=1, **kwargs):
    options = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(**{**options, **kwargs})


def group_batch(n=64, d=6, groups=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    group = torch.randint(0, groups, (n,), generator=g)
    x[:, 0] += 2 * group
    return GroupBatch(x, (x[:, 1] > 0).long(), group)


# penalty and scale


def test_penalty_is_the_weighted_coefficient():
    batch = group_batch()
    features = batch.x.clone().requires_grad_()
    value = DifFOCIPenalty(beta=0.3, weight=-0.7, num_neighbors=9, distance_scale="mean")(features, batch.group)
    expected = diffoci_coefficient(batch.group, batch.x, beta=0.3, num_neighbors=9, distance_scale="mean")
    assert value.item() == pytest.approx(-0.7 * expected.item())
    value.backward()
    assert features.grad.abs().sum() > 0
    images = batch.x.view(64, 1, 2, 3)
    assert DifFOCIPenalty()(images, batch.group) == DifFOCIPenalty()(batch.x, batch.group)
    x = torch.randn(64, generator=torch.Generator().manual_seed(3))
    assert DifFOCIPenalty()(batch.x, batch.y, x).item() == diffoci_coefficient(batch.y, batch.x, x).item()


def test_penalty_of_one_sample_is_zero_and_few_neighbours_are_enough():
    features = torch.randn(1, 3, requires_grad=True)
    value = DifFOCIPenalty()(features, torch.tensor([1]))
    value.backward()
    assert value.item() == 0
    assert features.grad.abs().sum() == 0
    batch = group_batch(n=5)
    assert DifFOCIPenalty(num_neighbors=50)(batch.x, batch.group).item() == pytest.approx(
        DifFOCIPenalty()(batch.x, batch.group).item(), abs=1e-6
    )


def test_nominal_attribute_goes_in_one_hot():
    batch = group_batch(groups=4)
    onehot = diffoci_coefficient(F.one_hot(batch.group, 4), batch.x)
    ordered = diffoci_coefficient(batch.group, batch.x)
    assert DifFOCIPenalty(num_groups=4)(batch.x, batch.group).item() == onehot.item()
    assert DifFOCIPenalty()(batch.x, batch.group).item() == ordered.item() != onehot.item()
    two = group_batch()
    assert DifFOCIPenalty(num_groups=2)(two.x, two.group) == DifFOCIPenalty()(two.x, two.group)


def test_scale():
    torch.manual_seed(0)
    scale = ElementwiseScale(5000, std=0.1)
    assert scale.scale.mean().item() == pytest.approx(1, abs=0.01)
    assert scale.scale.std().item() == pytest.approx(0.1, abs=0.01)
    x = torch.randn(3, 5000)
    assert torch.equal(scale(x), scale.scale * x)


# two processes


def build_everything():
    """Penalty, conditional objective with its options, and group DRO on one classifier."""
    torch.manual_seed(0)
    batch = group_batch(n=30)
    model = DifFOCIClassifier(MLP(6, [5], norm=None), num_classes=2, objective="group_dro", penalty_weight=0.3)
    model.log = lambda *args, **kwargs: None
    objective = DifFOCIPenalty(weight=-1.0, num_neighbors=8, distance_scale="mean")

    def loss_of(module, x, y, group):
        return module.training_step(GroupBatch(x, y, group), 0) + objective(module.features(x), x[:, 1], group.float())

    return model, loss_of, tuple(batch)


@pytest.mark.parametrize("sizes", [(15, 15), (19, 11)], ids=str)
def test_two_processes_give_the_loss_and_gradients_of_one(sizes):
    assert_two_processes_agree(build_everything, sizes, tolerance=1e-5)


def on_one_of_two(rank, world):
    batch = group_batch(n=40)
    rows = slice(25 * rank, 25 + 15 * rank)
    metric = AttributeLeakage()
    metric.update(batch.x[rows], batch.group[rows])
    alone = DifFOCIPenalty(gather_distributed=False)(batch.x[rows], batch.group[rows])
    single = DifFOCIPenalty()(batch.x[rank : rank + 1], batch.group[rank : rank + 1])
    return metric.compute(), alone, single


def test_metric_and_local_penalty_on_two_processes():
    batch = group_batch(n=40)
    for rank, (leakage, alone, single) in enumerate(run_two_processes(on_one_of_two)):
        rows = slice(25 * rank, 25 + 15 * rank)
        assert leakage.item() == pytest.approx(codec(batch.group, batch.x).item(), abs=1e-6)
        assert alone.item() == DifFOCIPenalty()(batch.x[rows], batch.group[rows]).item()
        assert single.item() == DifFOCIPenalty()(batch.x[:2], batch.group[:2]).item()  # one sample each: two in all


# selection and representation


def test_selector_finds_the_variables_and_transforms():
    seed_everything(0, verbose=False)
    model, data = DifFOCISelector(5), ToyDependenceDataModule("sin3", n=120, p=5, n_val=100, n_test=100)
    run = trainer(
        100, check_val_every_n_epoch=50, callbacks=[DownstreamScore(["inputs", "foci", "pca"], relevant=[0, 1, 2])]
    )
    run.fit(model, data)
    assert model.selected_features().tolist() == [0, 1, 2]
    assert run.callback_metrics["train/num_selected"] <= 4
    x = torch.randn(7, 5)
    assert torch.equal(model.transform(x), (model.scale * x)[:, :3])
    coefficient = diffoci_coefficient(data.val_set.targets, model(data.val_set.source[data.val_set.indices])).item()
    assert run.callback_metrics["val/coefficient"].item() == pytest.approx(coefficient, abs=1e-5)
    scores = run.test(model, data, verbose=False)[0]
    assert scores["test/num_selected"] == 3
    assert scores["test/recall"] == 1
    assert scores["test/false_selections"] == 0
    assert scores["test/mse"] < 0.5 * scores["test/mse_pca"]
    assert {"test/mse_inputs", "test/mse_foci", "test/recall_foci"} <= scores.keys()


def train_directly(module, batch, steps):
    """Training steps without a trainer."""
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    for step in range(steps):
        optimizer.zero_grad()
        module.training_step(batch, step).backward()
        optimizer.step()


def test_conditional_mode_ignores_what_the_group_says():
    data = SensitiveToyDataModule(n=150, p=4)
    data.setup()
    batch, selected = next(iter(data.train_dataloader())), {}
    for mode in ("dependence", "conditional"):
        torch.manual_seed(1)
        model = DifFOCISelector(4, mode=mode)
        train_directly(model, batch, 200)
        selected[mode] = model.selected_features().tolist()
    assert {0, 1} <= set(selected["dependence"])
    assert selected["conditional"] == [0]


def test_conditional_objective_is_the_conditional_coefficient():
    batch = group_batch()
    model = DifFOCISelector(6, mode="conditional")
    model.log = lambda *args, **kwargs: None
    expected = diffoci_coefficient(batch.y, model(batch.x), batch.group.float())
    assert model.training_step(batch, 0).item() == pytest.approx(-expected.item())
    columns = GroupBatch(batch.x, batch.y, batch.x[:, 2:4])
    expected = diffoci_coefficient(batch.y, model(batch.x), batch.x[:, 2:4])
    assert model.training_step(columns, 0).item() == pytest.approx(-expected.item())
    with pytest.raises(ValueError, match="field `group`"):
        model.training_step((batch.x, batch.y), 0)


def test_representation_maximises_the_coefficient_of_the_whole_validation_set():
    seed_everything(0, verbose=False)
    model = DifFOCIRepresentation(MLP(10, [16], 2, norm=None))
    data = ToyDependenceDataModule("xor", n=200, batch_size=50, eval_batch_size=70)
    run = trainer(15)
    run.validate(model, data, verbose=False)
    before = run.callback_metrics["val/coefficient"].item()
    run.fit(model, data)
    after = run.callback_metrics["val/coefficient"].item()
    x = data.val_set.source[data.val_set.indices]
    with torch.no_grad():
        assert after == pytest.approx(diffoci_coefficient(data.val_set.targets, model(x)).item(), abs=1e-5)
    assert after > before
    features = trainer().predict(model, data)
    assert sum(len(part) for part in features) == 400
    assert features[0].shape[1] == 2


def test_class_targets_are_compared_one_hot():
    batch = group_batch()
    y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(0))
    model = DifFOCISelector(6, num_classes=3)
    model.log = lambda *args, **kwargs: None
    expected = diffoci_coefficient(F.one_hot(y, 3), model(batch.x))
    assert model.training_step((batch.x, y), 0).item() == pytest.approx(-expected.item())


@pytest.mark.parametrize("model", [lambda: DifFOCISelector(6), lambda: DifFOCIRepresentation(nn.Linear(6, 2))])
def test_batch_of_one_sample(model):
    module = model()
    module.log = lambda *args, **kwargs: None
    loss = module.training_step((torch.randn(1, 6), torch.randn(1)), 0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in module.parameters())


# classifier


def classifier(**kwargs):
    torch.manual_seed(0)
    return DifFOCIClassifier(MLP(6, [8], norm=None), num_classes=2, **kwargs)


def logged(module):
    record = {}
    module.log = lambda name, value, **kwargs: record.__setitem__(name, value)
    return record


def test_loss_is_cross_entropy_plus_weighted_penalty():
    batch, model = group_batch(), classifier(penalty_weight=0.3, beta=0.5)
    record = logged(model)
    loss = model.training_step(batch, 0)
    features = model.backbone(batch.x)
    task = F.cross_entropy(model.head(features), batch.y)
    penalty = diffoci_coefficient(batch.group, features, beta=0.5)
    assert loss.item() == pytest.approx((task + 0.3 * penalty).item())
    assert record["train/task_loss"].item() == pytest.approx(task.item())
    assert record["train/penalty"].item() == pytest.approx(penalty.item())
    assert model.penalty(features, batch.group).item() == pytest.approx(penalty.item())
    loss.backward()
    # the penalty moves the backbone and never the head
    expected = torch.autograd.grad(
        F.cross_entropy(model.head(model.backbone(batch.x)), batch.y), list(model.head.parameters())
    )
    for parameter, gradient in zip(model.head.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    alone = torch.autograd.grad(F.cross_entropy(model(batch.x), batch.y), next(model.backbone.parameters()))[0]
    assert (next(model.backbone.parameters()).grad - alone).abs().max() > 1e-4


def test_training_with_a_large_penalty_forgets_the_group():
    batch, leakage = group_batch(n=200), {}
    for weight in (0.0, 3.0):
        model = classifier(penalty_weight=weight, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
        train_directly(model, batch, 120)
        with torch.no_grad():
            leakage[weight] = codec(batch.group, model.features(batch.x)).item()
    assert leakage[3.0] < leakage[0.0] - 0.15


def test_without_penalty_it_is_plain_erm_and_needs_no_group():
    batch, model = group_batch(), classifier(penalty_weight=0.0)
    record = logged(model)
    loss = model.training_step((batch.x, batch.y), 0)
    assert loss.item() == F.cross_entropy(model(batch.x), batch.y).item()
    assert "train/penalty" not in record
    with pytest.raises(ValueError, match="field `group`"):
        classifier().training_step((batch.x, batch.y), 0)


def test_group_dro_weights_the_groups_of_class_and_attribute():
    batch, model = group_batch(), classifier(penalty_weight=0.0, objective="group_dro", group_dro_eta=0.5)
    logged(model)
    losses = F.cross_entropy(model(batch.x), batch.y, reduction="none")
    expected, q = group_dro_update(torch.ones(4), losses, 2 * batch.y + batch.group, 0.5)
    assert model.training_step(batch, 0).item() == pytest.approx(expected.item())
    torch.testing.assert_close(model.q, q)
    model.training_step(batch, 1)
    assert (model.q - q).abs().max() > 1e-4  # it goes on from the last weights
    assert "q" in model.state_dict()
    fresh = classifier(objective="group_dro")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.q, model.q)
    assert "q" not in classifier().state_dict()
    model.eval()
    before = model.q.clone()
    model.validation_step(batch, 0)
    assert torch.equal(model.q, before)  # evaluation does not move them


def test_sensitive_columns_as_the_attribute():
    batch, model = group_batch(), classifier(penalty_weight=0.3)
    logged(model)
    columns = GroupBatch(batch.x, batch.y, batch.x[:, :2])
    expected = F.cross_entropy(model(batch.x), batch.y) + 0.3 * diffoci_coefficient(
        batch.x[:, :2], model.features(batch.x)
    )
    assert model.training_step(columns, 0).item() == pytest.approx(expected.item())
    model.validation_step(columns, 0)
    assert not model.val_worst_group_acc.update_called
    with pytest.raises(ValueError, match="group index"):
        classifier(objective="group_dro").training_step(columns, 0)


def test_metrics_by_group():
    batch, model = group_batch(n=90), classifier(num_groups=3)
    loader = DataLoader(
        TensorDataset(*batch),
        batch_size=32,
        collate_fn=lambda rows: GroupBatch(*map(torch.stack, zip(*rows, strict=True))),
    )
    scores = trainer().test(model, loader, verbose=False)[0]
    right = (model(batch.x).argmax(1) == batch.y).float()
    groups = 3 * batch.y + batch.group
    by_group = {k: right[groups == k].mean().item() for k in (0, 1, 3, 4)}
    assert scores["test/acc"] == pytest.approx(right.mean().item())
    assert scores["test/worst_group_acc"] == pytest.approx(min(by_group.values()))
    assert {k: scores[f"test/group_{k}_acc"] for k in by_group} == pytest.approx(by_group)
    assert "test/group_2_acc" not in scores  # the attribute 2 does not occur


def test_any_batch_with_the_fields_will_do():
    batch, model = group_batch(), classifier()
    logged(model)

    class Other:
        x, y, index, group = batch.x, batch.y, torch.arange(64), batch.group

    assert model.training_step(Other(), 0).item() == model.training_step(batch, 0).item()


def test_last_batch_of_one_sample():
    model = classifier(penalty_weight=1.0)
    logged(model)
    batch = GroupBatch(*(v[:1] for v in group_batch()))
    loss = model.training_step(batch, 0)
    assert loss.item() == F.cross_entropy(model(batch.x), batch.y).item()


def test_resumed_group_dro_run_equals_the_uninterrupted_one(tmp_path):
    def make():
        seed_everything(0, verbose=False)
        data = SpuriousDigitsDataModule(batch_size=256, train_size=400, val_size=100, test_size=100)
        model = DifFOCIClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), 8, objective="group_dro")
        return model, data

    whole, data = make()
    trainer(4).fit(whole, data)
    half, data = make()
    run = trainer(2)
    run.fit(half, data)
    run.save_checkpoint(tmp_path / "half.ckpt")
    rest, data = make()
    rest.q.fill_(7.0)
    trainer(4).fit(rest, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(rest.state_dict()[name], value, rtol=0, atol=0)
    assert whole.q.sum().item() == pytest.approx(1)


def test_feature_width_is_read_or_given():
    assert classifier().head.in_features == 8
    assert DifFOCIClassifier(nn.Linear(6, 5), feature_dim=5).head.in_features == 5
    with pytest.raises(ValueError, match="num_features"):
        DifFOCIClassifier(nn.Linear(6, 5))


# the regulariser for any module


def fit_with(regularizer, model, loader, epochs=1):
    run = trainer(epochs, callbacks=[regularizer] if regularizer else [])
    run.fit(model, loader)
    return run


def pairs_loader(n=64):
    batch = group_batch(n)
    return DataLoader(TensorDataset(batch.x, batch.y), batch_size=n), batch


def plain(seed=0):
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return Classifier(network, num_classes=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize("attribute", ["y", "label", "target", 1, -1])
def test_regularizer_on_a_classifier_with_pairs(attribute):
    loader, batch = pairs_loader()
    model = plain()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    run = fit_with(DifFOCIRegularizer(weight=0.5, layer="network.1", attribute=attribute), model, loader)
    reference = plain()
    features = reference.network[:2](batch.x)
    coefficient = diffoci_coefficient(batch.y, features)
    loss = F.cross_entropy(reference.network[2](features), batch.y) + 0.5 * coefficient
    loss.backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.state_dict()[name], start[name] - 0.1 * parameter.grad)
    assert run.callback_metrics["train/DifFOCIRegularizer"].item() == pytest.approx(coefficient.item(), abs=1e-6)
    assert "training_step" not in model.__dict__  # nothing is left behind


def test_regularizer_takes_the_group_of_the_batch_by_default():
    seed_everything(0, verbose=False)
    data = SpuriousDigitsDataModule(batch_size=None, train_size=300, val_size=100, test_size=100)
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 2))
    model = Classifier(network, num_classes=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    run = fit_with(DifFOCIRegularizer(weight=0.2, layer="network.2"), model, data)
    batch = next(iter(data.train_eval_dataloader()))
    coefficient = diffoci_coefficient(batch.group, network[:3](batch.x)).item()
    assert run.callback_metrics["train/DifFOCIRegularizer"].item() == pytest.approx(coefficient, abs=1e-5)


def test_regularizer_with_dictionaries_and_sensitive_columns():
    batch = group_batch()
    regularizer = DifFOCIRegularizer(attribute="age")
    found = regularizer.penalty(batch.x, {"x": batch.x, "age": batch.x[:, 2]})
    assert found.item() == pytest.approx(diffoci_coefficient(batch.x[:, 2], batch.x).item())
    nominal = DifFOCIRegularizer(num_groups=4)
    four = group_batch(groups=4)
    assert nominal.penalty(four.x, four).item() == diffoci_coefficient(F.one_hot(four.group, 4), four.x).item()


@pytest.mark.parametrize(
    ("attribute", "batch", "message"),
    [
        (
            "group",
            (torch.zeros(4, 2), torch.zeros(4)),
            r"no tensor 'group'; it has 2 entries without names.*`attribute`",
        ),
        ("group", IndexedBatch(*torch.zeros(3, 4)), "it has the fields x, y, index"),
        ("group", {"x": torch.zeros(4)}, "it has the keys x"),
        (5, (torch.zeros(4, 2), torch.zeros(4)), "no tensor 5"),
        ("group", torch.zeros(4, 2), "no tensor 'group'"),
    ],
)
def test_regularizer_says_what_the_batch_lacks(attribute, batch, message):
    with pytest.raises(ValueError, match=message):
        DifFOCIRegularizer(attribute=attribute).penalty(torch.zeros(4, 2), batch)


def test_regularizer_names_the_layers_there_are():
    loader, _ = pairs_loader()
    with pytest.raises(ValueError, match=r"no submodule 'netwrk'.*network"):
        fit_with(DifFOCIRegularizer(layer="netwrk", attribute="y"), plain(), loader)

    class Manual(LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(6, 2)

        def training_step(self, batch, batch_idx):
            self.backbone(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="optimises manually"):
        fit_with(DifFOCIRegularizer(attribute="y"), Manual(), loader)


def test_regularizer_pickles():
    copy = pickle.loads(pickle.dumps(DifFOCIRegularizer(weight=0.3, layer="a", num_groups=3)))
    assert (copy.weight, copy.layer, copy.coefficient.num_groups) == (0.3, "a", 3)


# metrics and other callbacks


def test_leakage_over_batches_is_that_of_the_whole():
    batch = group_batch(n=120, groups=3)
    metric = AttributeLeakage(num_groups=3, chunk_size=50)
    for rows in torch.arange(120).split(50):
        metric.update(batch.x[rows].view(-1, 2, 3), batch.group[rows])
    assert metric.compute().item() == pytest.approx(codec(F.one_hot(batch.group, 3), batch.x).item(), abs=1e-6)
    ordered = AttributeLeakage()
    ordered.update(batch.x, batch.group)
    assert ordered.compute().item() == pytest.approx(codec(batch.group, batch.x).item(), abs=1e-6)
    assert ordered.compute() != metric.compute()


def test_metrics_of_too_few_samples_are_nan():
    metric = DependenceCoefficient()
    metric.update(torch.zeros(1, 2), torch.zeros(1))
    assert math.isnan(metric.compute())


def test_leakage_score_of_the_sensitive_toy():
    model = DifFOCISelector(6)
    with torch.no_grad():
        model.scale.copy_(torch.tensor([1.0, 0, 0, 0, 0, 0]))
    data = SensitiveToyDataModule()
    scores = trainer(callbacks=[DownstreamScore(["inputs"])]).test(model, data, verbose=False)[0]
    assert scores["test/leakage"] < 0.6
    assert scores["test/leakage_inputs"] > 0.95
    assert 0.5 <= scores["test/leakage_chance"] < 0.6


def test_nothing_selected_predicts_a_constant():
    model = DifFOCISelector(10)
    with torch.no_grad():
        model.scale.zero_()
    data = ToyDependenceDataModule(n=100)
    scores = trainer(callbacks=[DownstreamScore()]).test(model, data, verbose=False)[0]
    assert scores["test/mse"] == pytest.approx(data.test_set.targets.var().item(), rel=0.1)


def test_saliency_maps_are_saved(tmp_path):
    data = SpuriousDigitsDataModule(batch_size=128, train_size=200, val_size=100, test_size=100)
    model = DifFOCIClassifier(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU()), 8)
    trainer(callbacks=[SaliencyMaps(num_images=5, folder=str(tmp_path))]).test(model, data, verbose=False)
    saved = torch.load(tmp_path / "saliency.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        "images": (5, 3, 8, 8),
        "maps": (5, 8, 8),
        "predicted": (5,),
        "y": (5,),
        "group": (5,),
    }
    assert saved["maps"].amax(dim=(1, 2)).tolist() == [1] * 5
    assert torch.equal(saved["predicted"], model(saved["images"]).argmax(1))


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DifFOCIPenalty(beta=0.0), "beta must be"),
        (lambda: DifFOCIPenalty(ties="first"), "ties must be one of"),
        (lambda: DifFOCIPenalty(distance_scale="max"), "distance_scale must be one of"),
        (lambda: DifFOCIPenalty(num_neighbors=0), "num_neighbors must be"),
        (lambda: DifFOCIPenalty(weight=math.nan), "weight must be"),
        (
            lambda: DifFOCIPenalty(num_groups=3)(torch.zeros(4, 2), torch.tensor([0, 1, 2, 3])),
            r"group must be in 0\.\.2",
        ),
        (lambda: DifFOCIPenalty()(torch.zeros(4, 2), torch.zeros(3)), "same number of rows"),
        (lambda: ElementwiseScale(0), "num_features must be"),
        (lambda: DifFOCISelector(5, mode="fair"), "mode must be one of"),
        (lambda: DifFOCISelector(5, threshold=-1.0), "threshold must be"),
        (lambda: DifFOCISelector(5)(torch.zeros(4, 6)), r"x must have shape \[batch, features=5\]"),
        (lambda: classifier(objective="dro"), "objective must be one of"),
        (lambda: classifier(group_dro_eta=-1.0), "group_dro_eta must be"),
        (lambda: classifier(num_groups=0), "num_groups must be"),
        (lambda: DownstreamScore(["lda"]), "compare must be one of"),
    ],
)
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()
