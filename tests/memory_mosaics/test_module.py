from __future__ import annotations

import csv
import math

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.nn import functional as F

from datamodules import InContextDFADataModule, ThreeMoonsDataModule
from lightning_methods.memory_mosaics import (
    GPTLM,
    MemoryMosaicLM,
    MemoryMosaics,
    PositionLoss,
    ThreeMoons,
    ThreeMoonsMosaic,
)
from tests.ddp import assert_two_processes_agree


def language_model(**options) -> MemoryMosaics:
    torch.manual_seed(0)
    network = MemoryMosaicLM(11, 16, 2, 1, 8, attn_dropout=0, resid_dropout=0)
    return MemoryMosaics(network, **options)


def trainer(**options) -> Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", **{**quiet, "max_epochs": 1, **options})


def batch(seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(11, (rows, 12), generator=torch.Generator().manual_seed(seed))}


# which tokens count


def expected_loss(module: MemoryMosaics, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = module(ids)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def test_labels_are_aligned_with_the_inputs_and_shifted_inside():
    module, sample = language_model(), batch()
    ids = sample["input_ids"]
    torch.testing.assert_close(module.training_step(sample, 0), expected_loss(module, ids, ids))
    torch.testing.assert_close(module.training_step({**sample, "labels": ids}, 0), expected_loss(module, ids, ids))


def test_padding_and_ignored_labels_do_not_count():
    module, sample = language_model(), batch()
    ids = sample["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    labels = ids.clone()
    labels[1, :5] = -100
    expected = expected_loss(module, ids, labels.masked_fill(mask == 0, -100))
    found = module.training_step({"input_ids": ids, "attention_mask": mask, "labels": labels}, 0)
    torch.testing.assert_close(found, expected)


def test_a_pair_is_shifted_already():
    module = language_model()
    ids = batch()["input_ids"]
    found = module.training_step((ids[:, :-1], ids[:, 1:]), 0)
    expected = F.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found, expected)


def test_the_first_tokens_can_be_skipped():
    module = language_model(skip_tokens=5)
    ids = batch()["input_ids"]
    expected = F.cross_entropy(module(ids)[:, 5:-1].flatten(0, 1), ids[:, 6:].flatten())
    torch.testing.assert_close(module.training_step({"input_ids": ids}, 0), expected)


def test_logits_in_chunks_give_the_same_loss_and_gradient():
    whole, chunked = language_model(), language_model(logit_chunk=5)
    for module in (whole, chunked):
        module.training_step(batch(), 0).backward()
    for a, b in zip(whole.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_any_causal_model_will_do():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = GPTLM(11, 8, 2, 1, block_size=12, dropout=0)

        def forward(self, ids):
            return Output(self.inner(ids))

    module = MemoryMosaics(Wrapped())
    assert module(batch()["input_ids"]).shape == (4, 12, 11)
    assert module.predict_step(batch(), 0).exp().sum(dim=2).allclose(torch.ones(4, 12))


# optimisation


def test_only_matrices_decay():
    module = language_model(weight_decay=0.3)
    groups = module.configure_optimizers().param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    named = dict(module.named_parameters())
    assert len(decay) == len(named)  # the tied head is one parameter
    for name, p in named.items():
        assert decay[id(p)] == (0.3 if p.dim() >= 2 else 0), name


def test_every_parameter_learns():
    module = language_model()
    module.training_step(batch(), 0).backward()
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def _step(module: MemoryMosaics, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return module.training_step({"input_ids": ids, "attention_mask": mask}, 0)


def _build():
    ids = batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[:2, 6:] = 0  # the first process has half of the tokens
    return language_model(), _step, (ids, mask)


@pytest.mark.parametrize("sizes", [None, (1, 3)])
def test_two_processes_average_over_tokens(sizes):
    assert_two_processes_agree(_build, sizes)


# evaluation


def everything(data):
    data.setup("test")
    return next(iter(data.test_dataloader()))


def test_evaluation_averages_over_tokens(tmp_path):
    data = InContextDFADataModule(num_train=8, num_val=10, seq_len=20, batch_size=4)
    module = language_model(curve_length=19)
    run = trainer(default_root_dir=tmp_path, logger=True)
    found = run.test(module, data, verbose=False)[0]
    whole = everything(InContextDFADataModule(num_train=8, num_val=10, seq_len=20, batch_size=10))
    logits = module(whole["input_ids"])
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), whole["input_ids"][:, 1:], reduction="none")
    assert found["test/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert found["test/perplexity"] == pytest.approx(math.exp(found["test/loss"]), rel=1e-5)
    scored = whole["scored_mask"]
    legal = whole["legal_mask"].gather(2, logits.argmax(dim=2, keepdim=True))[..., 0]
    assert found["test/accuracy"] == pytest.approx(legal[scored].double().mean().item(), rel=1e-5)
    gap = (logits.softmax(dim=2) - whole["true_probs"]).abs().sum(dim=2)[scored].mean().item() / 2
    assert found["test/total_variation"] == pytest.approx(gap, rel=1e-5)
    rows = list(csv.DictReader(next(tmp_path.rglob("position_loss.csv")).open()))
    torch.testing.assert_close(torch.tensor([float(row["loss"]) for row in rows]), losses.mean(dim=0).detach())


def test_the_curve_keeps_its_length():
    metric = PositionLoss(2)
    metric.update(torch.tensor([[1.0, 2.0, 9.0]]), torch.ones(1, 3, dtype=torch.bool))
    metric.update(torch.tensor([[3.0]]), torch.ones(1, 1, dtype=torch.bool))
    assert metric.compute().tolist() == [2, 2]


# three moons


def test_errors_of_the_moons_are_clipped():
    module = ThreeMoons(ThreeMoonsMosaic(3, 2), clip=0.1)
    x = torch.randn(2, 8, 6)
    error = (module(x) - 0).abs().clamp(max=0.1)
    torch.testing.assert_close(module.training_step((x, torch.zeros_like(x)), 0), error.square().mean())


def test_the_error_between_the_longest_and_the_common_period():
    sizes = {"block_size": 60, "steps_per_epoch": 2, "num_val": 6}
    module = ThreeMoons(ThreeMoonsMosaic(1, 6))
    data = ThreeMoonsDataModule(batch_size=6, **sizes)
    found = trainer().test(module, data, verbose=False)[0]
    x, y = everything(data)
    error = (module(x) - y).abs()
    start, stop = data.before_lcm
    assert (start, stop) == (11, 20)  # 1.1 * 3 and 6 at 60 / 18 samples in a unit of time
    assert found["test/mae"] == pytest.approx(error.mean().item(), rel=1e-5)
    assert found["test/mae_before_lcm"] == pytest.approx(error[:, start:stop].mean().item(), rel=1e-5)


@pytest.mark.bad_input
def test_bad_input():
    with pytest.raises(ValueError, match="skip_tokens"):
        language_model(skip_tokens=-1)
    with pytest.raises(ValueError, match="clip"):
        ThreeMoons(ThreeMoonsMosaic(1, 6), clip=0)
