"""Every config parses and builds its model and data; those without a download run; every claim can be planned.

A data module says with the attribute ``downloads`` whether its files have to be fetched first, or put there by hand.
Without it, a config runs as it stands and so it is run here.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_methods.claims.definition import find_claims, load_claim, plan
from lightning_methods.cli import MethodCLI, _expand_arguments

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs"
CONFIGS = sorted(
    str(path.relative_to(FOLDER))
    for path in FOLDER.rglob("*.yaml")
    if path.name != "claim.yaml" and path.parent.name != "trainer"
)
OVERLAYS = sorted(path.name for path in (FOLDER / "trainer").glob("*.yaml"))
CLAIMS = find_claims(ROOT)
SMALL = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.strategy=auto",
    "--trainer.num_nodes=1",
    "--trainer.precision=32-true",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


class Built(MethodCLI):
    """The command line up to the point where the run would start."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": LightningCLI.subcommands()["fit"]}

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class Parsed(MethodCLI):
    """The command line up to the point where model and data would be built."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


@cache
def parser(subcommand: str) -> Any:
    """The command line's parser; made once, because that takes longer than parsing."""
    toy = "tests.claims_toy_module"
    return Parsed([subcommand, f"--model={toy}.ToyRegression", f"--data={toy}.ToyData"]).parser


def parse(arguments: list[str]) -> Any:
    return parser(arguments[0]).parse_args(_expand_arguments(arguments))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def fetches_weights(value: Any) -> bool:
    """Whether a config takes pretrained weights from the network."""
    if isinstance(value, list):
        return any(map(fetches_weights, value))
    if not isinstance(value, dict):
        return isinstance(value, str) and value.endswith("from_pretrained")
    by_name = isinstance(value.get("model"), str) and "/" in value["model"]  # model: meta-llama/Meta-Llama-3-8B
    return by_name or value.get("pretrained") is True or any(map(fetches_weights, value.values()))


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, tmp_path: Path):
    path = FOLDER / name
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# "), "the first line says what the config is"
    arguments = ["fit", "--config", str(path), f"--trainer.default_root_dir={tmp_path}", *SMALL]
    if fetches_weights(yaml.safe_load(text)):
        parse(arguments)
        return
    cli = Built([*arguments, "--trainer.fast_dev_run=true"])
    if getattr(cli.datamodule, "downloads", False):
        return
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.state.finished
    if is_overridden("test_step", cli.model) and is_overridden("test_dataloader", cli.datamodule):
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlay(name: str, tmp_path: Path):
    base = tmp_path / "base.yaml"
    base.write_text("model: tests.claims_toy_module.ToyRegression\ndata: tests.claims_toy_module.ToyData\n")
    parse(["fit", "--config", str(base), "--config", str(FOLDER / "trainer" / name)])


@pytest.mark.parametrize("slug", CLAIMS)
def test_claim(slug: str, tmp_path: Path):
    """The claim's file is well-formed, and the arguments of each of its runs are those of its config."""
    claim = load_claim(CLAIMS[slug], ROOT)
    assert len(claim.seeds) >= 3
    weights = tmp_path / "weights.ckpt"
    weights.touch()
    for job in plan(claim, seeds=claim.seeds[:1]):
        checkpoints = dict.fromkeys(job.needs, str(weights))
        if job.call is None:
            parse([job.subcommand, *job.fill(job.args, checkpoints)])
            continue
        module, _, name = job.call.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(**job.fill(job.arguments, checkpoints))
