"""Time to build the command line, ours against a bare LightningCLI on the same run."""

from __future__ import annotations

import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_methods.cli import MethodCLI

CONFIG = """
model:
  class_path: lightning_methods.core.Classifier
  init_args:
    num_classes: 10
    network: {class_path: lightning_methods.nn.SmallConvNet, init_args: {num_classes: 10}}
data: {class_path: datamodules.DigitsDataModule}
trainer: {accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}
"""


class Bare(LightningCLI):
    """A bare LightningCLI up to the run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Ours(MethodCLI):
    """Our command line up to the run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.mark.parametrize("cli", [Ours, Bare])
def test_start(benchmark, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    (tmp_path / "run.yaml").write_text(CONFIG)
    benchmark.group = "start of the command line"
    benchmark.pedantic(lambda: cli(args=["fit", "--config", "run.yaml"]), rounds=5, warmup_rounds=1)
