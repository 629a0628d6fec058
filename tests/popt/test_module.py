"""PopT as LightningModules: what is learned, what is frozen, learning rates, checkpoints, baselines, two processes."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from datamodules import SyntheticPopulationDataModule
from lightning_methods.popt import (
    ConcatenatedDecoder,
    ConcatenatedLogistic,
    PopTBatch,
    PopTFinetuning,
    PopTPretraining,
    PopulationTransformer,
    RampUp,
    popt_pretraining_loss,
    ramp_up_factor,
    rank_channels,
)
from lightning_methods.popt.module import load_pretrained
from tests.ddp import assert_two_processes_agree

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
FAST = {**QUIET, "logger": False, "enable_checkpointing": False}


def small(seed: int = 0, dropout: float = 0.1) -> PopulationTransformer:
    torch.manual_seed(seed)
    return PopulationTransformer(6, 16, 2, 1, 24, dropout, max_position=200, layernorm_bias_init=0.0)


def batch_of(n: int = 8, channels: int = 5, seed: int = 0, pretraining: bool = True) -> PopTBatch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, channels, 6, generator=generator)
    coords = torch.randint(200, (n, channels, 3), generator=generator)
    seq_id = (torch.arange(channels) >= channels // 2).long().expand(n, -1) * int(pretraining)
    pad_mask = (
        torch.arange(channels).expand(n, -1) >= torch.tensor([channels, channels - 1])[torch.arange(n) % 2][:, None]
    )
    label = (torch.arange(n) % 2).float()
    replace_label = torch.randint(3, (n, channels), generator=generator).masked_fill(pad_mask, 0)
    return PopTBatch(x, coords, seq_id, pad_mask, label, replace_label if pretraining else None)


def data(**options) -> SyntheticPopulationDataModule:
    sizes = {"num_windows": 60, "val_size": 30, "test_size": 40, "input_dim": 6, "num_channels": 8, "num_subjects": 2}
    return SyntheticPopulationDataModule(**{**sizes, "ensemble_sizes": [4, 6], "test_ensemble_sizes": [6], **options})


# pretraining


def test_the_loss_is_that_of_the_two_questions():
    module, batch = PopTPretraining(small(), ensemble_weight=2.0, channel_weight=0.5).eval(), batch_of()
    output = module.model(batch.x, batch.coords, batch.seq_id, batch.pad_mask)
    expected = popt_pretraining_loss(output.cls_logit, output.token_logit, batch.label, batch.replace_label, 2.0, 0.5)
    torch.testing.assert_close(module.training_step(batch, 0), expected[0])
    torch.testing.assert_close(module.predict_step(batch, 0), output.hidden[:, 0])


@pytest.mark.parametrize(("weights", "silent"), [((1.0, 0.0), "token_cls_head"), ((0.0, 1.0), "cls_head")])
def test_who_gets_gradient(weights, silent):
    module = PopTPretraining(small(), *weights)
    module.training_step(batch_of(), 0).backward()
    for name, parameter in module.model.named_parameters():
        assert parameter.grad is not None, name  # DistributedDataParallel waits for all of them
        if name.startswith(silent):
            assert not parameter.grad.any()
    assert module.model.input_encoding["in_proj"].weight.grad.any()


def test_pretraining_logs_and_learns():
    module = PopTPretraining(small(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    trainer = Trainer(max_epochs=2, **FAST)
    trainer.fit(module, data())
    fitted = dict(trainer.callback_metrics)
    (tested,) = trainer.test(module, data(), verbose=False)
    losses, scores = {"loss", "ensemble_loss", "channel_loss"}, {"ensemble_auroc", "channel_auroc"}
    assert {name for name in fitted if name.startswith("train/")} == {f"train/{name}" for name in losses}
    assert {name for name in fitted if name.startswith("val/")} == {f"val/{name}" for name in losses | scores}
    assert set(tested) == {f"test/{name}" for name in losses | scores}
    assert 0 <= tested["test/ensemble_auroc"] <= 1
    total = tested["test/ensemble_loss"] + tested["test/channel_loss"]
    assert tested["test/loss"] == pytest.approx(total, rel=1e-5)


def test_auroc_counts_scored_channels_only():
    from torchmetrics.functional.classification import binary_auroc

    module, batches = PopTPretraining(small()).eval(), [batch_of(seed=1), batch_of(seed=2)]
    Trainer(limit_val_batches=2, **FAST)
    logits, targets = [], []
    for batch in batches:
        module.validation_step(batch, 0)
        output = module.model(batch.x, batch.coords, batch.seq_id, batch.pad_mask)
        scored = batch.replace_label > 0
        logits.append(output.token_logit[..., 0][scored])
        targets.append((batch.replace_label[scored] == 1).long())
    expected = binary_auroc(torch.cat(logits), torch.cat(targets))
    torch.testing.assert_close(module.val_channel_auroc.compute(), expected)


def test_one_sample_and_nothing_scored():
    module = PopTPretraining(small())
    single = PopTBatch(*(value[:1] for value in batch_of()))
    loss = module.training_step(single._replace(replace_label=torch.zeros_like(single.replace_label)), 0)
    loss.backward()
    assert torch.isfinite(loss)


def test_decoding_batches_are_refused_in_pretraining():
    with pytest.raises(ValueError, match="mode 'pretrain'"):
        PopTPretraining(small()).training_step(batch_of(pretraining=False), 0)
    with pytest.raises(ValueError, match="nothing to learn"):
        PopTPretraining(small(), 0.0, 0.0)
    with pytest.raises(ValueError, match="ensemble_weight"):
        PopTPretraining(small(), -1.0)


def _build():
    module = PopTPretraining(small(dropout=0.0)).double()
    batch = batch_of(6)
    # Few scored channels in the second half.
    replace_label = batch.replace_label.clone()
    replace_label[3:, 1:] = 0

    def loss_of(module, *fields):
        return module.training_step(PopTBatch(*fields), 0)

    return module, loss_of, (batch.x.double(), *batch[1:5], replace_label)


def test_two_processes_agree_with_one():
    assert_two_processes_agree(_build, tolerance=1e-9)


def test_per_process_means_do_not():
    def build():
        module, loss_of, batch = _build()
        module.global_token_mean = False
        return module, loss_of, batch

    module, loss_of, batch = build()
    halves = [loss_of(module, *(value[rows] for value in batch)) for rows in (slice(0, 3), slice(3, 6))]
    assert not torch.isclose(sum(halves) / 2, loss_of(module, *batch))


# fine-tuning


def test_two_learning_rates_and_unused_heads():
    module = PopTFinetuning(small(), upstream_lr_scale=0.1, optimizer=lambda p: torch.optim.AdamW(p, lr=5e-4))
    optimizer = module.configure_optimizers()
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.named_parameters():
        if "cls_head" in name:
            assert not parameter.requires_grad
            assert id(parameter) not in rates
        else:
            assert rates[id(parameter)] == pytest.approx(5e-4 if name.startswith("head.") else 5e-5)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01}
    loss = module.training_step(batch_of(pretraining=False), 0)
    loss.backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    torch.testing.assert_close(
        module.eval().training_step(batch_of(pretraining=False), 0),
        nn.functional.binary_cross_entropy_with_logits(module.decode(batch_of(pretraining=False)), batch_of().label),
    )


def test_a_frozen_transformer_is_a_fixed_feature():
    module = PopTFinetuning(small(), freeze_upstream=True, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    before = copy.deepcopy(module.model.state_dict())
    head = module.head.weight.clone()
    trainer = Trainer(max_epochs=2, **FAST)
    trainer.fit(module, data(mode="finetune", batch_size=20))
    assert all(torch.equal(value, before[name]) for name, value in module.model.state_dict().items())
    assert not torch.equal(module.head.weight, head)
    assert not module.train().model.training  # no dropout: the same feature every time
    assert module.head.training
    assert sum(len(g["params"]) for g in module.configure_optimizers().param_groups) == 2
    free = PopTFinetuning(small())
    assert free.train().model.training
    assert free.frozen == ()


def test_finetuning_starts_from_the_pretraining_and_reloads(tmp_path):
    pretraining = PopTPretraining(small(1))
    trainer = Trainer(max_epochs=1, limit_train_batches=1, default_root_dir=tmp_path, logger=False, **QUIET)
    trainer.fit(pretraining, data())
    path = str(tmp_path / "pretrained.ckpt")
    trainer.save_checkpoint(path)
    module = PopTFinetuning(small(2), checkpoint=path, optimizer=lambda p: torch.optim.AdamW(p, lr=0.0))
    start = module.model.input_encoding["in_proj"].weight.clone()
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, **QUIET)
    trainer.fit(module, data(mode="finetune", train_size=10, batch_size=10))
    for name, value in pretraining.model.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], value)
    assert not torch.equal(module.model.input_encoding["in_proj"].weight, start)
    # A fit that goes on from its own checkpoint does not go back to the pretraining.
    with torch.no_grad():
        module.model.cls_head.bias.fill_(5.0)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    resumed = PopTFinetuning(small(3), checkpoint=path, optimizer=lambda p: torch.optim.AdamW(p, lr=0.0))
    Trainer(max_epochs=2, logger=False, default_root_dir=tmp_path, **QUIET).fit(
        resumed, data(mode="finetune", train_size=10, batch_size=10), ckpt_path=tmp_path / "own.ckpt", weights_only=True
    )
    assert resumed.model.cls_head.bias.item() == 5.0
    again = PopTFinetuning.load_from_checkpoint(tmp_path / "own.ckpt", model=small(4))
    batch = batch_of(pretraining=False)
    torch.testing.assert_close(again.eval().predict_step(batch, 0), module.eval().predict_step(batch, 0))


def test_weights_from_the_authors_or_nowhere(tmp_path):
    source, target = small(1), small(2)
    extra = {
        "spec_prediction_head.output.bias": torch.zeros(3),
        "input_encoding.positional_encoding.pe": torch.zeros(2),
    }
    for content in ({"model": {**source.state_dict(), **extra}}, {**source.state_dict(), **extra}):
        torch.save(content, tmp_path / "weights.pth")
        load_pretrained(target, str(tmp_path / "weights.pth"))
        assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        load_pretrained(target, str(tmp_path / "nothing.ckpt"))
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"input_encoding.* is missing"):
        load_pretrained(target, str(tmp_path / "other.pth"))


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_tasks(task):
    module = PopTFinetuning(small(), task)
    trainer = Trainer(max_epochs=1, **FAST)
    trainer.fit(module, data(mode="finetune", batch_size=20))
    (tested,) = trainer.test(module, data(mode="finetune"), verbose=False)
    names = {"binary": {"test/auroc", "test/f1"}, "regression": {"test/mse", "test/r2"}}[task]
    assert set(tested) == {"test/loss", *names}
    prediction = module.predict_step(batch_of(pretraining=False), 0)
    assert prediction.shape == (8,)
    if task == "binary":
        assert ((prediction > 0) & (prediction < 1)).all()
    else:
        assert tested["test/mse"] == pytest.approx(tested["test/loss"], rel=1e-4)


@pytest.mark.bad_input
def test_unknown_task():
    with pytest.raises(ValueError, match="task"):
        PopTFinetuning(small(), "multiclass")


def test_modules_pickle():
    for module in (PopTPretraining(small()), PopTFinetuning(small(), freeze_upstream=True)):
        again = pickle.loads(pickle.dumps(module))
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in module.state_dict().items())
        assert again.frozen == module.frozen


# schedule


def test_the_schedule_gets_its_length_from_the_trainer():
    seen = []

    class Watch(PopTPretraining):
        def on_train_batch_start(self, batch, batch_idx) -> None:
            seen.append(self.optimizers().param_groups[0]["lr"])

    module = Watch(
        small(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
        lr_scheduler=lambda o: RampUp(o, warmup=0.5, gamma=0.9),
        lr_interval="step",
    )
    Trainer(max_steps=8, limit_val_batches=0, **FAST).fit(module, data(batch_size=10))
    assert seen == pytest.approx([0.5 * ramp_up_factor(step, 8, 0.5, 0.9) for step in range(8)])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert RampUp(optimizer, warmup=0.0).get_lr() == [1.0]
    with pytest.raises(ValueError, match="gamma"):
        RampUp(optimizer, gamma=2.0)
    with pytest.raises(ValueError, match="length of the run"):
        RampUp(optimizer).factor(3)


# baselines


def separable(n: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(2, (n,), generator=generator)
    x = torch.randn(n, 4, 3, generator=generator)
    x[:, 2, 1] += 6 * y
    x[:, 0] += 1.5 * y[:, None]
    return x, y


def test_channels_by_how_well_each_alone_tells_the_label():
    from sklearn.linear_model import Ridge
    from sklearn.metrics import roc_auc_score

    x, y = separable()
    order, score = rank_channels(x, y, folds=3)
    assert order[:2].tolist() == [2, 0]
    assert score[2] > 0.95
    for channel in range(4):
        output = torch.empty(60, dtype=torch.float64)
        for part in torch.arange(60).chunk(3):
            rest = torch.ones(60, dtype=torch.bool).index_fill(0, part, False)
            train = x[rest, channel].double()
            scale = (train - train.mean(0)).square().sum(0).mean()
            fitted = Ridge(alpha=float(scale)).fit(train, y[rest].double())
            output[part] = torch.from_numpy(fitted.predict(x[part, channel].double()))
        assert score[channel].item() == pytest.approx(roc_auc_score(y, output), abs=1e-6)
    for bad, message in (((x, y[:5]), "rows"), ((x, torch.zeros(60)), "both classes"), ((x, 2 * y), "0..1")):
        with pytest.raises(ValueError, match=message):
            rank_channels(*bad)


def test_concatenated_baselines():
    module = ConcatenatedDecoder(nn.Linear(48, 1))
    trainer = Trainer(max_epochs=1, **FAST)
    trainer.fit(module, data(mode="finetune", batch_size=20))
    batch = next(iter(data_loader()))
    torch.testing.assert_close(module.decode(batch), module.network(batch.x.flatten(1))[:, 0])
    with pytest.raises(ValueError, match="padding"):
        module.decode(batch._replace(pad_mask=torch.ones_like(batch.pad_mask)))


def data_loader():
    module = data(mode="finetune", batch_size=20)
    module.setup()
    return module.train_dataloader()


def test_logistic_regression_is_scikit_learns_and_travels_in_the_checkpoint(tmp_path):
    from sklearn.linear_model import LogisticRegression

    module, source = ConcatenatedLogistic(48, C=[0.1]), data(mode="finetune", persistence=0.5)
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, **QUIET)
    trainer.fit(module, source)
    x, y = source.train_set.recordings[0].embeddings[:60].flatten(1), source.train_set.labels
    theirs = LogisticRegression(C=0.1, max_iter=1000).fit(x.numpy(), y.long().numpy())
    batch = next(iter(source.test_dataloader()))
    expected = torch.as_tensor(theirs.decision_function(batch.x.flatten(1).numpy()))
    torch.testing.assert_close(module.decode(batch).double(), expected.double(), rtol=0, atol=0.02)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    again = ConcatenatedLogistic.load_from_checkpoint(tmp_path / "c.ckpt")
    assert torch.equal(again.decode(batch), module.decode(batch))
    with pytest.raises(ValueError, match="C must"):
        ConcatenatedLogistic(4, C=[])
