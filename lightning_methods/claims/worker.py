"""One job: a run with one seed. ``python -m lightning_methods.claims.worker FOLDER`` does FOLDER/job.json by hand."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["quiet_arguments", "work", "work_apart"]


def quiet_arguments(folder: Path, subcommand: str, seed: int) -> list[str]:
    """What every run of a claim gets last: its folder, its seed, curves in ``metrics.csv`` and no progress bar.

    Args:
        folder: the run's folder.
        subcommand: the command line's; only training is seeded by it and logged.
        seed: the seed.
    """
    return [
        f"--seed_everything={seed}",
        f"--trainer.default_root_dir={folder}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.name=",
        "--trainer.logger.version=" + ("" if subcommand == "fit" else subcommand),
    ]


def _numbers(metrics: Any) -> dict[str, float]:
    """The scalar metrics as floats."""
    numbers = {}
    for name, value in metrics.items():
        if getattr(value, "numel", lambda: 1)() == 1 and not isinstance(value, str):
            numbers[str(name)] = float(value)
    return numbers


def _run_command_line(arguments: list[str]) -> tuple[dict[str, float], str]:
    """Run the command line; what it tested, and the checkpoint it leaves."""
    import torch

    from ..cli import run

    torch.set_num_threads(1)
    cli = run(arguments)
    metrics = _numbers(cli.trainer.callback_metrics) | _numbers(getattr(cli, "test_metrics", None) or {})
    saved = cli.trainer.checkpoint_callback
    best, last = getattr(saved, "best_model_path", ""), getattr(saved, "last_model_path", "")
    return metrics, str(best or last or "")


def _call(path: str, arguments: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Call a function; the numbers it returns, and the path under the key "checkpoint" if it has one."""
    module, _, name = path.rpartition(".")
    result = dict(getattr(importlib.import_module(module), name)(**arguments))
    checkpoint = str(result.pop("checkpoint", ""))
    return _numbers(result), checkpoint


def work(folder: Path) -> None:
    """Do the job of a folder and leave ``result.json`` there; written at once, so that a part of it is never seen."""
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    start = time.perf_counter()
    if job["call"]:
        metrics, checkpoint = _call(job["call"], job["arguments"])
    else:
        last = quiet_arguments(folder, job["subcommand"], job["seed"])
        metrics, checkpoint = _run_command_line([job["subcommand"], *job["args"], *last])
    if not metrics:
        raise RuntimeError(f"the run {job['run']} logged no test metric.")
    result = {
        "fingerprint": job["fingerprint"],
        "metrics": {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())},
        "checkpoint": checkpoint,
        "seconds": time.perf_counter() - start,
    }
    draft = folder / "result.json.part"
    draft.write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    draft.replace(folder / "result.json")


def work_apart(folder: Path, root: Path, environment: dict[str, str]) -> None:
    """The main function of a worker process: do the job of a folder with the log in ``log.txt``.

    Args:
        folder: the run's folder.
        root: the folder to run in.
        environment: variables to set.
    """
    if hasattr(os, "setsid"):
        # A session of its own: Ctrl-C reaches the runner alone, and one signal ends a run with whatever it has started.
        os.setsid()
    with open(folder / "log.txt", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(environment)
    os.chdir(root)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
        # The server's imports have touched the GPU, which a forked process cannot use: start again from nothing.
        os.execv(sys.executable, [sys.executable, "-m", __name__, str(folder)])
    work(folder)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
