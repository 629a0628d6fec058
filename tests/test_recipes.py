"""Methods that act together in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_methods.cli import run

ROOT = Path(__file__).parents[1]
SHORT = [
    "--trainer.max_epochs=2",
    "--trainer.limit_train_batches=4",
    "--trainer.log_every_n_steps=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_gift_with_diffoci(tmp_path):
    """The penalty acts on the student of another method, and only its part of the loss differs."""
    config = str(ROOT / "configs/recipes/gift_with_diffoci.yaml")
    cli = run(["fit", "--config", config, *SHORT, f"--trainer.default_root_dir={tmp_path}"])
    assert "test/acc" in cli.test_metrics
    header = next(tmp_path.rglob("metrics.csv")).read_text().partition("\n")[0].split(",")
    assert {"train/DifFOCIRegularizer", "teacher/acc"} <= set(header)
    assert "training_step" not in vars(cli.model)


def test_long_tail_with_resets(tmp_path):
    """A plain classifier is adjusted outside of training only, and its units are watched."""
    config = str(ROOT / "configs/recipes/long_tail_with_resets.yaml")
    cli = run(["fit", "--config", config, *SHORT, f"--trainer.default_root_dir={tmp_path}"])
    assert "test/acc" in cli.test_metrics
    callbacks = {type(callback).__name__: callback for callback in cli.trainer.callbacks}
    adjustment = callbacks["LogitAdjustment"]
    assert torch.equal(adjustment._counts, cli.datamodule.class_counts)  # nobody gave them
    header = next(tmp_path.rglob("metrics.csv")).read_text().partition("\n")[0].split(",")
    assert any(name.startswith("snr/") for name in header), header
    x, _ = next(iter(cli.datamodule.test_dataloader()))
    cli.model.eval()
    with torch.no_grad():
        raw = cli.model(x)
    assert torch.equal(raw, cli.model.network(x))  # the hook is gone
    assert not torch.equal(adjustment.adjusted(raw).argmax(1), raw.argmax(1))
