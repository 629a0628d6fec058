"""CDC: who gets gradient, what is constant, when heads start, what a checkpoint carries, one against two processes."""

import copy
import pickle

import pytest
import torch
from lightning import LightningDataModule
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_methods.cdc import CDC, CDCOutput, FixedThresholdClustering, MultiViewBatch, clustering_metrics
from lightning_methods.cdc.functional import calibration_loss
from tests.ddp import assert_two_processes_agree, run_two_processes

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def blobs(n: int = 120, k: int = 3, d: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % k
    return 3 * torch.randn(k, d, generator=generator)[labels] + torch.randn(n, d, generator=generator), labels


def batch_of(x: Tensor, labels: Tensor, seed: int = 1) -> MultiViewBatch:
    generator = torch.Generator().manual_seed(seed)
    weak, strong = (x + s * torch.randn(x.shape, generator=generator).to(x.dtype) for s in (0.1, 0.3))
    return MultiViewBatch(x, weak, strong, labels, torch.arange(len(x)))


class Views(Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> MultiViewBatch:
        return MultiViewBatch(self.x[i], self.x[i] + 0.1, self.x[i] - 0.2, self.y[i], torch.tensor(i))


class Blobs(LightningDataModule):
    """Three separated clusters, every view in order: nothing is random."""

    def __init__(self, batch_size: int = 60, n: int = 120, k: int = 3) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.x, self.y = blobs(n, k)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Views(self.x, self.y), batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.utils.data.TensorDataset(self.x, self.y), batch_size=50)

    test_dataloader = predict_dataloader = val_dataloader


def encoder(d: int = 8, width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(d, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, width))


def make(kind: type = CDC, seed: int = 0, **options) -> CDC:
    torch.manual_seed(seed)
    common = {"feature_dim": 6, "num_clusters": 3, "hidden_dim": 8, "separation_steps": 20, "kmeans_n_init": 2}
    if kind is CDC:
        common |= {"num_regions": 12}
    return kind(encoder(), **{**common, **options})


def fit(module, data=None, epochs: int = 2, **options) -> Trainer:
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, **{**QUIET, **options})
    trainer.fit(module, datamodule=data or Blobs())
    return trainer


# who gets gradient


def test_the_calibration_loss_reaches_only_the_calibration_head():
    module = make().train()
    batch = batch_of(*blobs())
    features, targets, _, _ = module.pseudo_targets(batch, torch.Generator().manual_seed(0))
    assert not features.requires_grad
    calibration_loss(module.calibration_head(features), targets).backward()
    touched = {name.split(".")[0] for name, p in module.named_parameters() if p.grad is not None}
    assert touched == {"calibration_head"}


def test_the_clustering_loss_reaches_encoder_and_clustering_head_and_no_target():
    module = make().train()
    batch = batch_of(*blobs())
    _, targets, labels, mask = module.pseudo_targets(batch, torch.Generator().manual_seed(0))
    assert not targets.requires_grad
    assert mask.any()
    module._clustering_loss(batch.strong, labels, mask).backward()
    touched = {name.split(".")[0] for name, p in module.named_parameters() if p.grad is not None}
    assert touched == {"backbone", "cluster_head"}


def test_pseudo_labels_come_from_the_calibration_head_on_the_weak_view():
    module = make().train()
    with torch.no_grad():
        module.calibration_head.fc2.weight.zero_()
        module.calibration_head.fc2.bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    _, _, labels, mask = module.pseudo_targets(batch_of(*blobs()), torch.Generator().manual_seed(0))
    assert (labels == 1).all()
    assert mask.sum() == int(40 * torch.tensor([0.0, 9.0, 0.0]).softmax(0)[1])  # the same 40 first rows for each class


def test_regions_average_the_clustering_head_on_the_clean_view():
    module = make(num_regions=1).train()
    x, labels = blobs()
    twin = copy.deepcopy(module)
    targets = module.pseudo_targets(batch_of(x, labels), torch.Generator().manual_seed(0))[1]
    with torch.no_grad():
        expected = twin.cluster_head(twin.backbone(x)).softmax(1).mean(0)
    torch.testing.assert_close(targets, expected.expand(120, 3))
    as_many = make(num_regions=120, kmeans_n_init=1).train()
    with torch.no_grad():
        own = copy.deepcopy(as_many)
        own = own.cluster_head(own.backbone(x)).softmax(1)
    found = as_many.pseudo_targets(batch_of(x, labels), torch.Generator().manual_seed(0))[1]
    torch.testing.assert_close(found, own, msg="a region per sample is the prediction itself")


def test_views_update_the_batch_statistics_without_gradient():
    module = make().train()
    before = module.backbone[1].num_batches_tracked.clone()
    module.pseudo_targets(batch_of(*blobs()), torch.Generator().manual_seed(0))
    assert module.backbone[1].num_batches_tracked - before == 2  # clean and weak
    assert module.calibration_head.bn.num_batches_tracked == 1
    assert module.cluster_head.bn.num_batches_tracked == 1


# a training step


def reference_epoch(module: CDC, batch: MultiViewBatch, size: int) -> None:
    """The training step written out, each loss with its own backward."""
    first, second = module.configure_optimizers()
    first, second = first["optimizer"], second["optimizer"]
    features, targets, labels, mask = module.pseudo_targets(batch, generator_of_step(module))
    for start in range(0, len(batch.clean), size):
        rows = slice(start, start + size)
        if mask[rows].any():
            logits = module.cluster_head(module.backbone(batch.strong[rows]))
            loss = F.cross_entropy(logits[mask[rows]], labels[rows][mask[rows]])
            first.zero_grad()
            loss.backward()
            first.step()
        second.zero_grad()
        calibration_loss(module.calibration_head(features[rows]), targets[rows]).backward()
        second.step()


def generator_of_step(module: CDC, step: int = 0) -> torch.Generator:
    from lightning_methods.core.random import make_generator

    return make_generator(module._seed(), "regions", step)


class OneBatch(Blobs):
    def __init__(self) -> None:
        super().__init__(batch_size=120)


@pytest.mark.parametrize("size", [120, 40])
def test_one_backward_of_both_losses_equals_two_steps_apart(size):
    module = make(head_init="random", sub_batch_size=size, backbone_lr=1e-2)
    reference = copy.deepcopy(module).train()
    data = OneBatch()
    reference_epoch(reference, next(iter(data.train_dataloader())), size)
    fit(module, data, epochs=1, limit_val_batches=0)
    for name, value in reference.state_dict().items():
        if name != "heads_initialized":
            torch.testing.assert_close(
                module.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m
            )


def test_learning_rates_of_the_two_groups_and_two_optimisers():
    first, second = (c["optimizer"] for c in make(backbone_lr=3e-5).configure_optimizers())
    assert [group["lr"] for group in first.param_groups] == [3e-5, 1e-4]
    assert [group["lr"] for group in second.param_groups] == [1e-4]
    module = make()
    first, second = (c["optimizer"] for c in module.configure_optimizers())
    own = {id(p) for g in second.param_groups for p in g["params"]}
    assert own == {id(p) for p in module.calibration_head.parameters()}
    assert not own & {id(p) for g in first.param_groups for p in g["params"]}


def test_a_frozen_encoder_has_no_group():
    module = make()
    module.backbone.requires_grad_(False)
    assert len(module.configure_optimizers()[0]["optimizer"].param_groups) == 1


def test_schedulers_of_both_optimisers_step():
    module = make(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    trainer = fit(module, epochs=2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(5e-5 / 4)
    assert trainer.optimizers[1].param_groups[0]["lr"] == pytest.approx(1e-4 / 4)


@pytest.mark.parametrize("kind", [CDC, FixedThresholdClustering])
def test_nothing_selected_skips_the_clustering_step_and_gives_no_nan(kind):
    options = {"samples_per_class": 1} if kind is CDC else {"threshold": 1.0}
    module = make(kind, head_init="random", sub_batch_size=20, **options)
    before = copy.deepcopy(module.state_dict())
    if kind is CDC:
        module.pseudo_targets = nothing_selected(module.pseudo_targets)
    fit(module, epochs=1, limit_val_batches=0)
    after = module.state_dict()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter).all()
        moved = not torch.equal(before[name], after[name])
        # The hidden layer's bias does nothing in front of batch norm, so only the last layer has to move.
        if name.startswith("calibration_head.fc2"):
            assert moved, f"{name} should train"
        elif not name.startswith("calibration_head"):
            assert not moved, f"{name} should not move without pseudo labels"


def nothing_selected(inner):
    def pseudo_targets(*args):
        features, targets, labels, mask = inner(*args)
        return features, targets, labels, torch.zeros_like(mask)

    return pseudo_targets


def test_only_some_sub_batches_without_selection():
    module = make(head_init="random", sub_batch_size=20)
    inner = module.pseudo_targets

    def first_half(*args):
        features, targets, labels, mask = inner(*args)
        return features, targets, labels, torch.arange(len(mask)) < 30

    module.pseudo_targets = first_half
    trainer = fit(module, epochs=1, limit_val_batches=0)
    steps = [optimizer.state_dict()["state"][0]["step"].item() for optimizer in trainer.optimizers]
    assert steps == [4, 6]  # two batches of three sub-batches: two have selected rows
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.callback_metrics["train/selected_fraction"].item() == pytest.approx(0.5)


def test_a_last_single_row_joins_the_sub_batch_before():
    module = make(sub_batch_size=20)
    sizes = [len(x) for (x,) in module._sub_batches(torch.zeros(61, 2))]
    assert sizes == [20, 20, 21]
    assert [len(x) for (x,) in module._sub_batches(torch.zeros(10, 2))] == [10]
    assert [len(x) for (x,) in make(sub_batch_size=None)._sub_batches(torch.zeros(7, 2))] == [7]


def test_more_regions_than_samples_names_both_numbers():
    with pytest.raises(ValueError, match="got 61 regions for a batch of 60"):
        fit(make(num_regions=61, head_init="random"))


# initialisation


def test_heads_start_equal_from_the_training_images():
    module = make()
    before = copy.deepcopy(module.backbone.state_dict())
    seen = {}
    inner = module.initialize_heads

    def initialize_heads(features: Tensor) -> None:
        inner(features)
        seen.update(copy.deepcopy({"features": features, "module": module.state_dict(), "training": module.training}))

    module.initialize_heads = initialize_heads
    fit(module, epochs=1)
    twin = make().eval()
    torch.testing.assert_close(seen["features"], twin.backbone(Blobs().x).detach())
    state = seen["module"]
    assert state["heads_initialized"]
    assert seen["training"]
    for name, value in before.items():
        assert torch.equal(value, state[f"backbone.{name}"]), "no batch statistics are updated"
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        assert torch.equal(state[f"cluster_head.{name}"], state[f"calibration_head.{name}"])
    assert (state["cluster_head.fc1.bias"] == 0).all()
    assert not torch.equal(state["cluster_head.fc1.weight"], twin.cluster_head.fc1.weight)


def test_random_heads_stay_random():
    module = make(head_init="random", backbone_lr=0.0, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    before = copy.deepcopy(module.cluster_head.fc1.weight)
    fit(module, epochs=1)
    assert torch.equal(module.cluster_head.fc1.weight, before)


def test_heads_are_initialised_once(tmp_path):
    module = make()
    calls = []
    inner = module.initialize_heads
    module.initialize_heads = lambda features: (calls.append(1), inner(features))
    trainer = fit(module, epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = make(seed=5)
    resumed.initialize_heads = module.initialize_heads
    again = Trainer(max_epochs=2, accelerator="cpu", **QUIET)
    again.fit(resumed, datamodule=Blobs(), ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    assert len(calls) == 1


def test_too_few_images_for_the_hidden_layer():
    with pytest.raises(ValueError, match="hidden_dim must be at most the number of rows"):
        fit(make(hidden_dim=121))


def test_encoder_from_a_checkpoint(tmp_path):
    donor = make(FixedThresholdClustering, seed=3)
    fit(donor, epochs=1).save_checkpoint(tmp_path / "pretrained.ckpt")
    module = make(
        init_from=str(tmp_path / "pretrained.ckpt"),
        backbone_lr=0.0,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    )
    assert not torch.equal(module.backbone[0].weight, donor.backbone[0].weight)
    fit(module, epochs=1)
    assert torch.equal(module.backbone[0].weight, donor.backbone[0].weight)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        fit(make(init_from="nowhere.ckpt"))


# what it learns, and what it reports


def test_it_learns_to_cluster_and_reports_it():
    module = make(
        seed=2,
        hidden_dim=16,
        separation_steps=200,
        kmeans_n_init=5,
        calibration_optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    )
    x, y = blobs()
    started = copy.deepcopy(module).eval()
    started.initialize_heads(started.features(x).detach())
    at_start = clustering_metrics(started(x).calibrated_logits.softmax(1).detach(), y)["acc"]
    trainer = fit(module, epochs=10)
    metrics = trainer.callback_metrics
    assert metrics["val/cal_acc"] > max(0.9, at_start + 0.2)
    for name in ("loss", "loss_clu", "loss_cal", "selected_fraction"):
        assert torch.isfinite(metrics[f"train/{name}"])
    assert 0 < metrics["train/selected_fraction"] <= 1
    tested = trainer.test(module, datamodule=Blobs(), verbose=False)[0]
    names = {
        f"test/{head}_{m}" for head in ("clu", "cal") for m in ("acc", "nmi", "ari", "ece", "auroc", "aurc", "fpr95")
    }
    assert names <= set(tested)
    predicted = torch.cat(trainer.predict(module, datamodule=Blobs()))
    assert predicted.shape == (120, 3)
    torch.testing.assert_close(predicted, module.eval()(Blobs().x).calibrated_logits.softmax(1).detach())


def test_more_classes_than_clusters_and_no_labels():
    data = Blobs(k=5)
    data.num_classes = 5
    module = make()
    fit(module, data, epochs=1)
    data.y = torch.full((120,), -1)
    Trainer(accelerator="cpu", **QUIET).test(make(), datamodule=data, verbose=False)


def test_forward_and_predict():
    output = make().eval()(blobs()[0])
    assert isinstance(output, CDCOutput)
    assert [x.shape for x in output] == [(120, 6), (120, 3), (120, 3)]
    assert make(FixedThresholdClustering).eval()(blobs()[0]).shape == (120, 3)


@pytest.mark.parametrize("kind", [CDC, FixedThresholdClustering])
def test_same_seed_same_weights_and_resume_is_exact(kind, tmp_path):
    def run(epochs, seed=7, **options):
        seed_everything(seed, verbose=False)
        module = make(kind, sub_batch_size=30, **({"threshold": 0.4} if kind is not CDC else {}))
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0, **QUIET)
        trainer.fit(module, datamodule=Blobs(), weights_only=True, **options)
        return module, trainer

    whole, _ = run(4)
    again, _ = run(4)
    _, half = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(4, ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize("kind", [CDC, FixedThresholdClustering])
def test_checkpoint_reloads_and_pickles(kind, tmp_path):
    module = make(kind)
    fit(module, epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    loaded = kind.load_from_checkpoint(tmp_path / "x.ckpt", backbone=encoder())
    assert loaded.heads_initialized
    assert loaded.hidden_dim == 8
    x = blobs()[0]
    expected, found = module.eval()(x), loaded.eval()(x)
    for a, b in zip(expected if kind is CDC else [expected], found if kind is CDC else [found], strict=True):
        torch.testing.assert_close(a, b)
    module.trainer = None
    copy_of = pickle.loads(pickle.dumps(module))
    assert torch.equal(copy_of.cluster_head.fc1.weight, module.cluster_head.fc1.weight)
    assert copy_of.configure_optimizers()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_gives_finite_losses(precision):
    module = make(sub_batch_size=30)
    trainer = fit(module, precision=precision)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


# the rival


def test_fixed_threshold_selects_by_its_own_confidence():
    module = make(FixedThresholdClustering, threshold=0.6, head_init="random", sub_batch_size=None)
    batch = batch_of(*blobs())
    twin = copy.deepcopy(module).train()
    with torch.no_grad():
        confidence = twin(batch.weak).softmax(1).max(1).values
    share = (confidence > 0.6).float().mean().item()
    assert 0 < share < 1
    data = OneBatch()
    data.train_dataloader = lambda: DataLoader([batch], batch_size=None)
    trainer = fit(module, data, epochs=1, limit_val_batches=0)
    assert trainer.callback_metrics["train/selected_fraction"].item() == pytest.approx(share)


# two processes


def build_losses():
    """Losses on a whole batch with eval-mode batch norm, so that statistics do not depend on the split."""
    torch.manual_seed(0)
    module = make(head_init="random", samples_per_class=30).double().eval()
    x, labels = blobs()
    batch = batch_of(x.double(), labels)

    def loss_of(module, clean, weak, strong):
        from lightning_methods.core.distributed import gather

        generator = torch.Generator().manual_seed(3)
        part = MultiViewBatch(clean, weak, strong, None, None)
        features, targets, labels, mask = module.pseudo_targets(part, generator)
        clustering = module._clustering_loss(strong, labels, mask)
        logits = module.calibration_head(features)
        return clustering + calibration_loss(gather(logits), gather(targets, grad=False), module.entropy_weight)

    return module, loss_of, (batch.clean, batch.weak, batch.strong)


@pytest.mark.parametrize("sizes", [None, (70, 50)])
def test_two_processes_agree_with_one(sizes):
    assert_two_processes_agree(build_losses, sizes, tolerance=1e-5)


def _targets(rank: int, world: int):
    module, _, (clean, weak, strong) = build_losses()
    rows = slice(60 * rank, 60 * (rank + 1)) if world > 1 else slice(None)
    part = MultiViewBatch(clean[rows], weak[rows], strong[rows], None, None)
    return module.pseudo_targets(part, torch.Generator().manual_seed(3))


def test_selection_and_regions_are_of_the_global_batch():
    whole = _targets(0, 1)
    halves = run_two_processes(_targets)
    for name, one, *two in zip(("features", "targets", "labels", "mask"), whole, *halves, strict=True):
        torch.testing.assert_close(torch.cat(two), one, msg=lambda m, n=name: f"{n}: {m}")


class SplitBlobs(Blobs):
    """Batches of the halves that two processes see, joined again in one process: the same global batches."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Views(self.x, self.y), batch_size=self.batch_size)


def _fit_in_two(rank: int, world: int) -> dict[str, Tensor]:
    import os

    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
    module = make(sub_batch_size=30)
    strategy = DDPStrategy(cluster_environment=LightningEnvironment())
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, datamodule=SplitBlobs(batch_size=60))
    assert module.heads_initialized
    return module.state_dict()


def test_two_processes_fit_with_plain_ddp_and_stay_equal():
    first, second = run_two_processes(_fit_in_two)
    for name, value in first.items():
        if "running" not in name and "num_batches" not in name:  # batch statistics are each process's own
            torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clusters": 1}, "num_clusters"),
        ({"num_clusters": None}, "num_clusters must be given"),
        ({"feature_dim": None}, "number of features"),
        ({"hidden_dim": 1}, "hidden_dim"),
        ({"num_regions": 0}, "num_regions"),
        ({"samples_per_class": 0}, "samples_per_class"),
        ({"sub_batch_size": 1}, "sub_batch_size"),
        ({"entropy_weight": -1.0}, "entropy_weight"),
        ({"head_init": "zeros"}, "head_init must be one of"),
        ({"separation_steps": -1}, "separation_steps"),
        ({"kmeans_n_init": 0}, "kmeans_n_init"),
        ({"backbone_lr": -1.0}, "backbone_lr"),
        ({"lr_interval": "batch"}, "lr_interval"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.bad_input
def test_bad_threshold():
    with pytest.raises(ValueError, match="threshold"):
        make(FixedThresholdClustering, threshold=1.1)
