"""What every method promises, tried on each by a configuration that needs no download.

A new method gets these tests by existing. One whose configuration has an expensive first stage (a teacher, a
pretraining) may shorten it for this file in ``tests/<slug>/contract.yaml``, which is stacked on top.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_methods.cli import MethodCLI, find_checkpoint, run, short_names

ROOT = Path(__file__).parents[1]
SHORT = [
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def needs_download(config: Path) -> bool:
    """Whether the data of a configuration have to be fetched first."""
    data = yaml.safe_load(config.read_text(encoding="utf-8")).get("data", {})
    data = {"class_path": data} if isinstance(data, str) else data
    module, _, name = short_names().get(data["class_path"], data["class_path"]).rpartition(".")
    plain = {key: value for key, value in data.get("init_args", {}).items() if "class_path" not in str(value)}
    return getattr(getattr(importlib.import_module(module), name)(**plain), "downloads", False)


def contract_config(slug: str) -> Path | None:
    """The method's configuration without a download: ``digits.yaml``, else the first by name."""
    configs = sorted((ROOT / "configs" / slug).glob("*.yaml"), key=lambda path: (path.name != "digits.yaml", path.name))
    return next((path for path in configs if path.name != "claim.yaml" and not needs_download(path)), None)


SLUGS = [path.parent.name for path in sorted((ROOT / "lightning_methods").glob("*/functional.py"))]


def arguments(slug: str, folder: Path, *more: str) -> list[str]:
    overlay = ROOT / "tests" / slug / "contract.yaml"
    stacked = ["--config", str(overlay)] if overlay.exists() else []
    return [
        "fit",
        "--config",
        str(contract_config(slug)),
        *stacked,
        *SHORT,
        f"--trainer.default_root_dir={folder}",
        *more,
    ]


def state(module: LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory):
    """Two epochs of each method, run once for all the tests that look at the result."""

    @cache
    def of(slug: str) -> tuple[MethodCLI, Path]:
        folder = tmp_path_factory.mktemp(slug)
        return run(arguments(slug, folder, "--trainer.max_epochs=2")), folder

    return of


@pytest.mark.parametrize("slug", SLUGS)
def test_it_has_a_configuration_without_a_download(slug):
    assert contract_config(slug) is not None


@pytest.mark.parametrize("slug", SLUGS)
@pytest.mark.xdist_group("contract")
def test_it_fits_and_tests(slug, fitted):
    cli, _ = fitted(slug)
    assert cli.trainer.global_step > 0
    assert cli.test_metrics
    finite = [name for name, value in cli.trainer.callback_metrics.items() if torch.isfinite(value).all()]
    assert finite, "nothing finite was logged"


def outputs(module: LightningModule, batch: Any) -> Any:
    """What the module says about a batch, without randomness."""
    module.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        if is_overridden("predict_step", module):
            return module.predict_step(batch, 0)
        return module(batch[0] if isinstance(batch, (tuple, list)) else batch)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_checkpoint_reloads_in_one_line_and_predicts_the_same(slug, fitted):
    cli, folder = fitted(slug)
    path = find_checkpoint(str(folder), "last")
    again = type(cli.model).load_from_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    mine = again.state_dict()
    for name, value in saved.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=0, equal_nan=True)
    left_out = [name for name in mine if name not in saved]
    assert all(name.startswith(again.checkpoint_excludes or ("-",)) for name in left_out)
    cli.model.load_state_dict(saved)  # the test may have loaded the best weights
    batch = next(iter(cli.datamodule.val_dataloader()))
    torch.testing.assert_close(outputs(again, batch), outputs(cli.model, batch), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_resumed_run_equals_the_uninterrupted_one_and_the_seed_decides(slug, fitted, tmp_path):
    whole, whole_folder = fitted(slug)
    run(arguments(slug, tmp_path, "--trainer.max_epochs=1", "--test_after_fit=false"))
    run(arguments(slug, tmp_path, "--trainer.max_epochs=2", "--test_after_fit=false", "--ckpt_path=last"))
    parts, one = (
        torch.load(find_checkpoint(str(folder), "last"), weights_only=True) for folder in (tmp_path, whole_folder)
    )
    assert parts["global_step"] == one["global_step"] == whole.trainer.global_step
    assert_same_state(one["state_dict"], parts["state_dict"])


@pytest.mark.parametrize("slug", SLUGS)
def test_bfloat16_autocast_stays_finite(slug, tmp_path):
    cli = run(arguments(slug, tmp_path, "--trainer.max_epochs=1", "--trainer.precision=bf16-mixed"))
    for name, value in cli.model.state_dict().items():
        assert not value.is_floating_point() or not torch.isnan(value).any(), name
    losses = {name: value for name, value in cli.trainer.callback_metrics.items() if name.startswith("train/loss")}
    assert all(torch.isfinite(value) for value in losses.values()), losses


class RanksAgree(Callback):
    """Fails unless all ranks end with the same parameters."""

    def on_train_end(self, trainer, pl_module) -> None:
        assert trainer.world_size == 2
        assert trainer.global_step > 0
        mine = torch.cat([p.detach().double().flatten() for p in pl_module.parameters()])
        for other in pl_module.all_gather(mine):
            torch.testing.assert_close(other, mine, rtol=0, atol=0)


@pytest.mark.parametrize("slug", SLUGS)
def test_two_processes_train_and_agree(slug, tmp_path):
    args = arguments(slug, tmp_path, "--trainer.max_epochs=1", "--test_after_fit=false")
    args += ["--trainer.devices=2", "--trainer.strategy=ddp_fork", "--trainer.use_distributed_sampler=true"]
    MethodCLI(args, trainer_defaults={"callbacks": [RanksAgree()]})  # trains in processes of its own


@pytest.mark.parametrize("slug", SLUGS)
def test_it_pickles_and_copies(slug, fitted):
    cli, _ = fitted(slug)
    for again in (pickle.loads(pickle.dumps(cli.model)), copy.deepcopy(cli.model)):
        assert_same_state(state(cli.model), state(again))


def public_modules() -> list[type]:
    """Every public LightningModule and Callback of the methods and the shared folders."""
    classes = set()
    for name, path in short_names().items():
        value = getattr(importlib.import_module(path.rpartition(".")[0]), name)
        if inspect.isclass(value) and issubclass(value, (LightningModule, Callback)):
            classes.add(value)
    return sorted(classes, key=lambda c: c.__qualname__)


def unused_arguments(constructor: Any) -> list[str]:
    """Arguments that a constructor never reads."""
    function = ast.parse(textwrap.dedent(inspect.getsource(constructor))).body[0]
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name != "self" and name not in read]


def test_every_constructor_argument_is_used():
    unused = {
        cls.__qualname__: names
        for cls in public_modules()
        if "__init__" in vars(cls) and (names := unused_arguments(cls.__init__))
    }
    assert not unused


def test_overlays_of_the_contract_are_for_methods_that_exist():
    for overlay in (ROOT / "tests").glob("*/contract.yaml"):
        assert overlay.parent.name in SLUGS
        assert isinstance(yaml.safe_load(overlay.read_text()), dict)
