"""A run that is killed in the middle of an epoch, and the same command with ``--ckpt_path last``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_methods.cli import MethodCLI, find_checkpoint, run

ROOT = Path(__file__).parents[1]


class Kill(Callback):
    """SIGKILL in the middle of the second epoch: nothing can be cleaned up."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def command(folder: Path, *more: str) -> list[str]:
    return [
        "fit",
        "--config",
        str(ROOT / "configs/recipes/gift_with_diffoci.yaml"),
        "--trainer.max_epochs=3",
        "--trainer.limit_train_batches=3",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--test_after_fit=false",
        f"--trainer.default_root_dir={folder}",
        *more,
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the run to be killed is forked")
def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    run(command(tmp_path / "whole"))
    child = os.fork()
    if child == 0:
        MethodCLI(command(tmp_path / "killed"), trainer_defaults={"callbacks": [Kill()]})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    before = torch.load(find_checkpoint(str(tmp_path / "killed"), "last"), weights_only=True)
    assert before["epoch"] == 0
    run(command(tmp_path / "killed", "--ckpt_path=last"))
    whole, resumed = (
        torch.load(find_checkpoint(str(tmp_path / name), "last"), weights_only=True) for name in ("whole", "killed")
    )
    assert whole["global_step"] == resumed["global_step"] == 9
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], value, rtol=0, atol=0)
