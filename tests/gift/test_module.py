from __future__ import annotations

import warnings

import pytest
import torch
from lightning import LightningDataModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_methods.core import SoftLabelBatch
from lightning_methods.gift import GIFT, DiffAugment, TeacherTraining, soft_label_loss
from lightning_methods.nn import SmallConvNet
from tests.ddp import run_two_processes

CLASSES = 6


def network(seed: int = 0, num_classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return SmallConvNet((4, 4), num_classes=num_classes)


def images(n: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % CLASSES


class Data(LightningDataModule):
    """Images whose brightest row is their class."""

    def setup(self, stage: str) -> None:
        x, y = images(96)
        x[torch.arange(96), 0, y] += 2
        self.data = TensorDataset(x, y)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=40)

    test_dataloader = val_dataloader


def fit(model: GIFT, tmp_path, data: LightningDataModule | None = None, **options) -> Trainer:
    options = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, **options}
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **options,
    )
    trainer.fit(model, datamodule=data or Data())
    return trainer


class Recorder(nn.Module):
    """Keeps what a network sees and gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.seen.append(x)
        self.given.append(out)
        self.modes.append(self.inner.training)
        return out


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# the step


def step(model: GIFT, batch) -> torch.Tensor:
    """One training step without a trainer."""
    model.log = lambda *args, **kwargs: None
    return model.training_step(batch, 0)


@pytest.mark.parametrize("loss", ["kl", "softce", "mse", "mse_ce", "softce_ce", "cosine", "gift"])
def test_student_and_teacher_see_the_same_augmented_images(loss):
    student, teacher = Recorder(network(0)), Recorder(network(1))
    options = {"weight": 0.3, "smoothing": 0.2, "mode": "additive", "temperature": 4.0, "hard_weight": 0.5}
    model = GIFT(student, teacher, loss=loss, augment=DiffAugment("crop_color"), num_classes=CLASSES, **options).train()
    x, y = images()
    value = step(model, (x, y))
    assert len(student.seen) == len(teacher.seen) == 1
    assert torch.equal(student.seen[0], teacher.seen[0])
    assert not torch.equal(student.seen[0], x)
    assert teacher.modes == [False]
    assert student.modes == [True]
    torch.testing.assert_close(value, soft_label_loss(loss, student.given[0], teacher.given[0], y, **options))
    value.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not teacher.given[0].requires_grad


def test_where_soft_labels_come_from():
    x, y = images()
    stored = torch.randn(12, CLASSES, generator=torch.Generator().manual_seed(1))
    student, teacher = network(0).eval(), network(1).eval()

    def loss(given: nn.Module | None, batch) -> torch.Tensor:
        return step(GIFT(student, given, num_classes=CLASSES).eval(), batch)

    def expected(soft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return soft_label_loss("gift", student(x), soft, target)

    torch.testing.assert_close(loss(teacher, SoftLabelBatch(x, stored, y)), expected(teacher(x), y))
    torch.testing.assert_close(loss(None, SoftLabelBatch(x, stored, y)), expected(stored, y))
    torch.testing.assert_close(loss(None, (x, stored)), expected(stored, stored.argmax(1)))
    torch.testing.assert_close(loss(teacher, (x, stored)), expected(teacher(x), stored.argmax(1)))
    with pytest.warns(UserWarning, match="neither a teacher nor soft labels"):
        torch.testing.assert_close(loss(None, (x, y)), expected(F.one_hot(y, CLASSES).float(), y))


def test_the_warning_comes_once_and_cross_entropy_needs_no_soft_labels():
    batch = images()
    model = GIFT(network(), num_classes=CLASSES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, batch)
        step(GIFT(network(), num_classes=CLASSES, loss="ce"), batch)
    assert len([w for w in caught if "one-hot" in str(w.message)]) == 1
    teacher = Recorder(network(1))
    step(GIFT(network(), teacher, loss="ce", num_classes=CLASSES), batch)
    assert not teacher.seen  # its forward is spared


# training


def test_the_teacher_does_not_change_and_the_student_does(tmp_path):
    teacher = network(1)
    teacher(images(seed=5)[0])  # statistics of BatchNorm that are not the initial ones
    model = GIFT(network(0), teacher, num_classes=CLASSES)
    before, student = state(teacher), state(model.backbone)
    trainer = fit(model, tmp_path)
    assert_equal(state(teacher), before)
    assert not teacher.training
    assert all(not torch.equal(student[key], value) for key, value in model.backbone.named_parameters())
    handed = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert handed == {id(p) for p in model.backbone.parameters()}


def test_the_teacher_stays_in_eval_mode_through_train_and_validation(tmp_path):
    teacher = Recorder(network(1))
    student = Recorder(network(0))
    model = GIFT(student, teacher, num_classes=CLASSES)
    model.train()
    assert model.training
    assert not any(module.training for module in teacher.modules())
    fit(model, tmp_path)
    assert not any(teacher.modes)
    assert student.modes[:3] == [True] * 3
    assert student.modes[3:6] == [False] * 3  # validation, in which the teacher is not asked
    assert len(teacher.modes) == 6


def test_augmentation_is_for_training_only(tmp_path):
    augment = Recorder(DiffAugment("crop"))
    model = GIFT(network(), network(1), augment=augment, num_classes=CLASSES)
    trainer = fit(model, tmp_path, max_epochs=1)
    trainer.test(model, datamodule=Data(), verbose=False)
    assert len(augment.seen) == 3


def test_what_is_logged(tmp_path):
    model = GIFT(network(), network(1), num_classes=CLASSES)
    trainer = fit(model, tmp_path)
    logged = {"train/loss", "train/loss_step", "train/loss_epoch", "train/acc", "val/loss", "val/acc", "val/acc5"}
    assert set(trainer.callback_metrics) == logged
    x, y = trainer.datamodule.data.tensors
    logits = model.eval()(x)
    accuracy = (logits.argmax(1) == y).float().mean()
    fifth = (logits.topk(5).indices == y[:, None]).any(1).float().mean()
    torch.testing.assert_close(trainer.callback_metrics["val/acc"], accuracy)
    torch.testing.assert_close(trainer.callback_metrics["val/acc5"], fifth)
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], F.cross_entropy(logits, y))  # not the soft labels
    tested = trainer.test(model, datamodule=Data(), verbose=False)[0]
    assert tested == {"test/acc": pytest.approx(accuracy.item()), "test/acc5": pytest.approx(fifth.item())}
    few = GIFT(network(num_classes=5), num_classes=5)
    assert "acc5" not in few.val_metrics


def test_top5_is_right_when_the_first_batch_does_not_tell_it_from_top1(tmp_path):
    model = GIFT(network(), num_classes=CLASSES)
    logged = {}
    model.log = lambda name, value, **kwargs: logged.update({name: value})
    model.log_dict = lambda values, **kwargs: None
    model.forward = lambda x: x
    good = torch.eye(CLASSES)
    model.validation_step((good, torch.arange(CLASSES)), 0)
    ranked = torch.arange(6.0, 0, -1).expand(CLASSES, -1)  # class 0 first, class 5 last
    model.validation_step((ranked, torch.full((CLASSES,), 1)), 1)
    values = model.val_metrics.compute()
    assert values["val/acc"] == 0.5
    assert values["val/acc5"] == 1.0


def test_prediction():
    model = GIFT(network(), num_classes=CLASSES).eval()
    x, y = images()
    expected = model(x).softmax(1)
    for batch in (x, (x, y), SoftLabelBatch(x, torch.zeros(12, CLASSES), y)):
        torch.testing.assert_close(model.predict_step(batch, 0), expected)


# checkpoints


@pytest.mark.parametrize("save_teacher", [False, True])
def test_checkpoint_with_and_without_the_teacher(tmp_path, save_teacher):
    model = GIFT(network(0), network(1), num_classes=CLASSES, save_teacher=save_teacher)
    trainer = fit(model, tmp_path, max_epochs=1)
    path = tmp_path / "model.ckpt"
    trainer.save_checkpoint(path)
    keys = torch.load(path, weights_only=True)["state_dict"]
    assert any(key.startswith("teacher.") for key in keys) is save_teacher
    loaded = GIFT.load_from_checkpoint(path, backbone=network(2), teacher=network(3))
    assert_equal(state(loaded.backbone), state(model.backbone))
    assert_equal(state(loaded.teacher), state(model.teacher) if save_teacher else state(network(3)))


# the teacher's training


def test_teacher_training_trains_the_teacher_and_leaves_the_run_alone(tmp_path):
    # A run with the callback is the run of somebody who brings that teacher along.
    model = GIFT(network(0), network(1), num_classes=CLASSES, augment=DiffAugment("crop"))
    callback = TeacherTraining(Data(), epochs=15, optimizer=lambda params: torch.optim.AdamW(params, lr=0.02))
    torch.manual_seed(3)
    trainer = fit(model, tmp_path, callbacks=[callback])
    assert callback.accuracy > 0.8
    teacher = model.teacher
    assert not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())
    assert trainer.test(model, datamodule=Data(), verbose=False)[0]["teacher/acc"] == pytest.approx(callback.accuracy)

    other = network(1)
    other.load_state_dict(teacher.state_dict())
    alone = GIFT(network(0), other, num_classes=CLASSES, augment=DiffAugment("crop"))
    torch.manual_seed(3)
    fit(alone, tmp_path)
    assert_equal(state(alone), state(model))


def test_teacher_training_does_not_depend_on_the_global_generators(tmp_path):
    teachers = []
    for seed in (0, 1):
        model = GIFT(network(0), network(1), num_classes=CLASSES)
        torch.manual_seed(seed)
        fit(model, tmp_path, max_epochs=0, callbacks=[TeacherTraining(Data(), epochs=1, seed=7)])
        teachers.append(state(model.teacher))
    assert_equal(*teachers)


@pytest.mark.parametrize("save_teacher", [False, True])
def test_a_resumed_run_has_the_teacher_of_the_uninterrupted_one(tmp_path, save_teacher):
    def build() -> tuple[GIFT, TeacherTraining]:
        model = GIFT(network(0), network(1), num_classes=CLASSES, save_teacher=save_teacher)
        return model, TeacherTraining(Data(), epochs=2, seed=0)

    whole, callback = build()
    trainer = fit(whole, tmp_path, max_epochs=1, callbacks=[callback])
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, callback = build()
    trained = []
    callback.train = lambda *args: trained.append(TeacherTraining.train(callback, *args))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
    )
    trainer.fit(resumed, datamodule=Data(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert len(trained) == (0 if save_teacher else 1)  # in the checkpoint, or made again
    assert_equal(state(resumed.teacher), state(whole.teacher))


def train_on_a_rank(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    model = GIFT(network(0), network(seed=rank), num_classes=CLASSES)  # the ranks begin with different teachers
    fit(model, folder, max_epochs=0, callbacks=[TeacherTraining(Data(), epochs=1)])
    return state(model.teacher)


def test_all_processes_have_the_first_ones_teacher(tmp_path):
    first, second = run_two_processes(train_on_a_rank, str(tmp_path))
    assert_equal(first, second)
    alone = train_on_a_rank(0, 1, str(tmp_path))
    assert_equal(first, alone)


def test_teacher_training_needs_a_teacher(tmp_path):
    with pytest.raises(ValueError, match="needs a module with a teacher; GIFT has none"):
        fit(GIFT(network(), num_classes=CLASSES), tmp_path, callbacks=[TeacherTraining(Data())])


# bad input


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cosin"}, "Did you mean 'cosine'"),
        ({"weight": 1.5}, "weight"),
        ({"weight": -1.0, "mode": "additive"}, "weight"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"mode": "sum"}, "mode must be one of 'convex', 'additive'"),
        ({"temperature": 0.0}, "temperature"),
        ({"hard_weight": -1.0}, "hard_weight"),
        ({"num_classes": 1}, "num_classes"),
        ({"lr_interval": "batch"}, "lr_interval"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GIFT(network(), **options)


@pytest.mark.bad_input
def test_bad_batches():
    x, y = images()
    with pytest.raises(ValueError, match=r"the backbone's output must have shape \[batch, classes=5\], got \[12, 6\]"):
        step(GIFT(network(), network(), num_classes=5), (x, y.clamp(max=4)))
    with pytest.raises(ValueError, match=r"the batch's labels must be in 0\.\.5, got 6"):
        step(GIFT(network(), network(), num_classes=CLASSES), (x, y + 1))
    with pytest.raises(ValueError, match=r"soft_labels must have shape \[batch=12, classes=6\], got \[12, 7\]"):
        step(GIFT(network(), network(num_classes=7), num_classes=CLASSES), (x, y))
    with pytest.raises(
        ValueError, match=r"the batch's soft labels must have shape \[batch, classes=6\], got \[12, 3\]"
    ):
        step(GIFT(network(), num_classes=CLASSES), (x, torch.zeros(12, 3)))
    with pytest.raises(ValueError, match="integer dtype"):
        step(GIFT(network(), network(), num_classes=CLASSES), (x, y.float()))
