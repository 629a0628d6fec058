from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

from lightning_methods.core import Classifier
from lightning_methods.core.schedules import warmup_cosine
from lightning_methods.lemon import (
    LEMON,
    LEMONMaskedLM,
    PreLNBertForMaskedLM,
    SourceTraining,
    expanded_cosine,
    max_output_difference,
    norm_eps,
)
from tests.lemon.networks import bert, images, vit

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def nets(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    return vit(16, 1, 2, seed=seed).float(), vit(24, 2, 3, seed=seed + 1).float()


def loader(count: int = 24, batch: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(5, (count,), generator=generator)), batch_size=batch)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def trainer(folder, **options) -> Trainer:
    return Trainer(**{**QUIET, "default_root_dir": folder, "enable_checkpointing": False, "max_epochs": 1, **options})


def fit(model, folder, *, val=True, **options) -> Trainer:
    run = trainer(folder, **options)
    run.fit(model, loader(), loader() if val else None)
    return run


class AtStart(Callback):
    """Keeps what the optimiser has and the state when the first batch comes."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not hasattr(self, "state"):
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            self.source = pl_module.source
            self.optimised = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}


def test_training_starts_from_the_function_of_the_source(tmp_path):
    source, target = nets()
    kept, eps = copy.deepcopy(source), norm_eps(target)
    model, look = LEMON(source, target, optimizer=sgd), AtStart()
    run = fit(model, tmp_path, callbacks=[look])
    started = copy.deepcopy(target)
    started.load_state_dict({k.removeprefix("target."): v for k, v in look.state.items() if k.startswith("target.")})
    assert max_output_difference(kept, started, images().float()) < 1e-5
    assert norm_eps(target) != eps  # 16 to 24
    assert run.callback_metrics["expand/max_abs_diff"] < 1e-5
    # The source takes no part in the training and is gone.
    assert look.source is None
    assert model.source is None
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), kept.parameters(), strict=True))
    assert look.optimised == {id(p) for p in target.parameters()}
    assert not any("source" in name for name in model.state_dict())
    assert max_output_difference(kept, target, images().float()) > 1e-3  # it has trained


def test_the_difference_is_measured_without_a_sanity_check_and_without_validation(tmp_path):
    for options in ({"num_sanity_val_steps": 0}, {"val": False}):
        model = LEMON(*nets(), optimizer=sgd)
        assert fit(model, tmp_path, **options).callback_metrics["expand/max_abs_diff"] < 1e-5
    stacked = fit(LEMON(*nets(), optimizer=sgd, method="stack"), tmp_path)
    assert stacked.callback_metrics["expand/max_abs_diff"] > 1e-3
    scratch = fit(LEMON(None, nets()[1], optimizer=sgd, method="scratch"), tmp_path)
    assert "expand/max_abs_diff" not in scratch.callback_metrics


def test_a_second_fit_goes_on_and_does_not_expand_again(tmp_path):
    model = LEMON(*nets(), optimizer=sgd)
    fit(model, tmp_path)
    before, look = copy.deepcopy(model.state_dict()), AtStart()
    fit(model, tmp_path, callbacks=[look])
    assert all(torch.equal(value, before[name]) for name, value in look.state.items())


def test_a_resumed_run_does_not_expand_again_and_needs_no_source(tmp_path):
    whole = LEMON(*nets(), optimizer=sgd)
    fit(whole, tmp_path / "whole", max_epochs=2)
    first = LEMON(*nets(), optimizer=sgd)
    run = trainer(tmp_path / "first", enable_checkpointing=True)
    run.fit(first, loader(), loader())
    run.save_checkpoint(tmp_path / "half.ckpt")
    again = LEMON(None, nets(seed=5)[1], optimizer=sgd)
    trainer(tmp_path / "again", max_epochs=2).fit(again, loader(), loader(), ckpt_path=tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    assert norm_eps(again.target) == norm_eps(whole.target)


def test_a_checkpoint_restores_eps(tmp_path):
    model = LEMON(*nets(), optimizer=sgd)
    run = fit(model, tmp_path)
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = LEMON.load_from_checkpoint(tmp_path / "run.ckpt", source=None, target=nets(seed=3)[1])
    assert norm_eps(again.target) == norm_eps(model.target)
    assert bool(again.expanded)
    x = images().float()
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_the_source_comes_from_a_checkpoint_of_another_run(tmp_path):
    trained = Classifier(vit(16, 1, 2, seed=9).float(), num_classes=5)
    run = fit(trained, tmp_path)
    run.save_checkpoint(tmp_path / "small.ckpt")
    source, target = nets()
    model, look = LEMON(source, target, optimizer=sgd, source_checkpoint=str(tmp_path / "small.ckpt")), AtStart()
    fit(model, tmp_path, callbacks=[look])
    started = copy.deepcopy(target)
    started.load_state_dict({k.removeprefix("target."): v for k, v in look.state.items() if k.startswith("target.")})
    assert max_output_difference(trained.network, started, images().float()) < 1e-5


def test_soft_targets_smoothing_and_augmentation():
    model = LEMON(*nets(), label_smoothing=0.2)
    x, y = next(iter(loader()))
    logits = model.target(x)
    torch.testing.assert_close(
        model.network_loss(model.target, (x, y)), F.cross_entropy(logits, y, label_smoothing=0.2)
    )
    soft = torch.rand(8, 5).softmax(dim=1)
    torch.testing.assert_close(
        model.network_loss(model.target, (x, soft)), F.cross_entropy(logits, soft, label_smoothing=0.2)
    )
    mixed = LEMON(*nets(), augment=v2.MixUp(num_classes=5))
    torch.manual_seed(0)
    expected_x, expected_y = v2.MixUp(num_classes=5)(x, y)
    torch.manual_seed(0)
    loss = mixed.network_loss(mixed.target, (x, y))
    torch.testing.assert_close(loss, F.cross_entropy(mixed.target(expected_x), expected_y))
    assert not torch.equal(expected_x, x)


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader()


def test_the_source_is_trained_first(tmp_path):
    losses, states = {}, {}
    for epochs in (1, 30):
        source, target = nets()
        model, look = LEMON(source, target, optimizer=sgd), AtStart()
        before = [p.clone() for p in source.parameters()]
        training = SourceTraining(Data(), epochs=epochs)
        fit(model, tmp_path, callbacks=[training, look], max_steps=1)
        assert any((p != q).any() for p, q in zip(source.parameters(), before, strict=True))
        assert not any(p.requires_grad for p in source.parameters())
        x, y = next(iter(loader(24, 24)))
        losses[epochs] = F.cross_entropy(source(x), y).item()
        states[epochs] = look.state
    assert losses[30] < losses[1] - 0.2
    assert any((states[1][name] != states[30][name]).any() for name in states[1])
    with pytest.raises(ValueError, match="has none"):
        fit(Classifier(nets()[0], num_classes=5), tmp_path, callbacks=[SourceTraining(Data())])


def test_expanded_cosine_is_a_warm_up_and_half_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = expanded_cosine(optimizer, warmup_steps=5, total_steps=130, min_ratio=0.1, start_factor=0.01)
    assert isinstance(schedule, warmup_cosine)
    assert [schedule.factor(step) for step in (0, 5, 130, 300)] == pytest.approx([0.01, 1.0, 0.1, 0.1])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


@pytest.mark.bad_input
def test_bad_options(tmp_path):
    for options, words in (
        ({"method": "ligo"}, "method"),
        ({"depth_mode": "middle"}, "depth_mode"),
        ({"new_block": "half"}, "new_block"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"split": "odd"}, "split"),
        ({"new_block_init": "next"}, "new_block_init"),
        ({"free_scale": float("inf")}, "free_scale"),
    ):
        with pytest.raises(ValueError, match=words):
            LEMON(*nets(), **options)
    with pytest.raises(ValueError, match="needs a source"):
        fit(LEMON(None, nets()[1]), tmp_path)


def test_it_pickles_with_its_source():
    model = pickle.loads(pickle.dumps(LEMON(*nets())))
    assert model.source is not None


# masked language modelling


def text(count: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 20, (count, 8), generator=generator)
    labels = torch.where(torch.rand(count, 8, generator=generator) < 0.3, ids, -100)
    labels[0] = -100  # a row without anything to predict
    rows = [
        {"input_ids": i, "attention_mask": torch.ones(8).long(), "labels": k} for i, k in zip(ids, labels, strict=True)
    ]
    return DataLoader(rows, batch_size=3)


def test_a_masked_language_model_starts_from_its_source(tmp_path):
    source, target = (bert(PreLNBertForMaskedLM, *size).float() for size in ((8, 1, 2), (20, 2, 5)))
    kept = copy.deepcopy(source)
    model = LEMONMaskedLM(source, target, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    run = trainer(tmp_path)
    run.fit(model, text(), text())
    assert run.callback_metrics["expand/max_abs_diff"] < 1e-5
    # The loss of a set is the mean over its tokens, however they fall into batches.
    batch = next(iter(DataLoader(text().dataset, batch_size=16)))
    with torch.no_grad():
        logits = kept(batch["input_ids"], batch["attention_mask"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(run.callback_metrics["val/loss"], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(run.callback_metrics["val/perplexity"], expected.exp(), rtol=1e-4, atol=0)
    assert model.predict_step(batch, 0).shape == (16, 8)
    torch.testing.assert_close(model.network_loss(model.target, batch), expected, rtol=0, atol=1e-5)


def test_a_batch_without_labels_has_loss_zero():
    model = LEMONMaskedLM(None, bert(PreLNBertForMaskedLM, 8, 1, 2).float(), method="scratch")
    batch = {"input_ids": torch.ones(2, 4).long(), "labels": torch.full((2, 4), -100)}
    loss = model.network_loss(model.target, batch)
    loss.backward()
    assert loss == 0


def _mlm():
    torch.manual_seed(0)
    model = LEMONMaskedLM(None, bert(PreLNBertForMaskedLM, 8, 1, 2, hidden_dropout_prob=0.0).float(), method="scratch")
    batch = next(iter(DataLoader(text().dataset, batch_size=6)))

    def loss_of(module, ids, labels):
        return module.network_loss(module.target, {"input_ids": ids, "labels": labels})

    return model, loss_of, (batch["input_ids"], batch["labels"])


def test_two_processes_weigh_every_token_alike():
    from tests.ddp import assert_two_processes_agree

    assert_two_processes_agree(_mlm, sizes=(2, 4))
