"""The command line: LightningCLI for any LightningModule and any LightningDataModule, ours or the user's own.

``python train.py fit --config configs/gift/digits.yaml`` is stock LightningCLI in subclass mode. What is added:

* classes of this library go by their short names (``class_path: GIFT``) without being imported beforehand;
* runs are seeded, live in ``runs/<folder and name of the config>``, log to CSV and write ``last.ckpt`` every epoch;
* ``fit`` ends with a test of the best (or else the last) weights;
* ``--ckpt_path last`` and ``best`` find the checkpoint of an earlier run, also of one that was killed;
* ``test``, ``validate`` and ``predict`` build the model from the checkpoint's own hyper-parameters;
* mistakes end with a message that names the key and the nearest valid one.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from jsonargparse import set_loader
from jsonargparse._loaders_dumpers import get_loader
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from ._lazy import exports
from .core.callbacks import FiniteGuard, SeedEveryEpoch
from .core.checks import nearest

__all__ = ["MethodCLI", "main", "run"]

PACKAGES = ("lightning_methods", "datamodules")


# short names


@cache
def short_names() -> dict[str, str]:
    """The public classes and functions of this library by their short names, read without importing them."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        home = Path(__file__).parent.parent / package
        for init in sorted(home.rglob("__init__.py")):
            module = ".".join(init.parent.relative_to(home.parent).parts)
            for name, (source, _) in exports(str(init)).items():
                # A re-export (`from ..ssl import BYOL`) does not hide the home.
                if source.count(".") == len(source) - len(source.lstrip(".")) == 1 or name not in names:
                    names[name] = f"{module}.{name}"
    return names


def _expand(value: Any) -> Any:
    """Replace short names by import paths wherever a ``class_path`` stands."""
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    expanded = {key: _expand(item) for key, item in value.items()}
    path = expanded.get("class_path")
    if isinstance(path, str):
        expanded["class_path"] = short_names().get(path, path)
    return expanded


def _expand_argument(argument: str) -> str:
    """Expand the value of ``--model=GIFT``, ``--data=...``, ``--trainer.callbacks+=...`` and ``--x.class_path=...``."""
    match = re.fullmatch(r"(--(?:model|data|trainer\.callbacks\+?|trainer\.logger|\S+\.class_path)=)(\w+)", argument)
    return match[1] + short_names().get(match[2], match[2]) if match else argument


def _expand_arguments(arguments: Sequence[str]) -> list[str]:
    takes_class = re.compile(r"--(model|data|trainer\.callbacks\+?|trainer\.logger|\S+\.class_path)")
    expanded: list[str] = []
    for argument in arguments:
        follows = bool(expanded) and takes_class.fullmatch(expanded[-1]) is not None
        expanded.append(short_names().get(argument, argument) if follows else _expand_argument(argument))
    return expanded


# Lightning's own use of a torch function that newer releases rename.
warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")

set_loader("lightning_methods", lambda text: _expand(get_loader("yaml")(text)), exceptions=(yaml.YAMLError,))


# messages


class MethodArgumentParser(LightningArgumentParser):
    """LightningCLI's parser with short names and with a suggestion in every error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"parser_mode": "lightning_methods", **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and what was probably meant, without usage or traceback, and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        self.exit(2, f"error: {explain(message, self)}\n")


def explain(message: str, parser: LightningArgumentParser | None = None) -> str:
    """Reduce jsonargparse's message to what is wrong, and add the nearest valid key or class.

    Args:
        message: the original message, which lists every alternative of a type (also the ``None`` of ``T | None``).
        parser: the parser that raised it, for its keys.
    """
    noise = r"NoneType|Subtypes:|Given value|Does not validate against any|Errors:\s*$"
    lines = [re.sub(r"^(\s*)- ", r"\1", line) for line in message.splitlines() if not re.search(noise, line)]
    return "\n".join(line for line in lines if line.strip()) + _suggestion(message, parser)


def _suggestion(message: str, parser: LightningArgumentParser | None) -> str:
    owners = re.findall(r"class_path '([\w.]+)'", message)
    if unknown := re.findall(r"Option '([\w.]+)' is not accepted", message):
        if not owners:
            return nearest(unknown[-1], _keys(parser))
        keys = _constructor_arguments(owners[-1])
        return f".{nearest(unknown[-1], keys)} {owners[-1].rsplit('.', 1)[-1]} takes: {', '.join(keys)}."
    if unknown := re.findall(r"does not accept option '([\w.]+)'", message):
        keys = _keys(parser)
        # `trainr.max_epochs`: the first part is what is wrong; `trainer.max_epocs`: the whole key.
        head = unknown[-1].split(".")[0]
        return "." + (nearest(unknown[-1], keys) if head in keys else nearest(head, keys))
    if unknown := re.findall(r"has no attribute '(\w+)'|No module named '([\w.]+)'|import path string: (\w+)", message):
        return "." + nearest("".join(unknown[-1]).rsplit(".", 1)[-1], short_names())
    return ""


def _keys(parser: LightningArgumentParser | None) -> set[str]:
    """The keys that the parser and its subcommands take, and their first parts."""
    if parser is None:
        return set()
    subcommands = getattr(parser, "_subcommands_action", None)
    parsers = [parser, *(subcommands._name_parser_map.values() if subcommands else ())]
    keys = {action.dest for each in parsers for action in each._actions}
    return keys | {key.split(".")[0] for key in keys}


def _constructor_arguments(path: str) -> list[str]:
    """Names that the class or function at ``path`` takes, with what it passes on to its bases."""
    from jsonargparse._parameter_resolvers import get_signature_parameters
    from jsonargparse._util import import_object

    try:
        target = import_object(path)
        method = "__init__" if isinstance(target, type) else None
        return [parameter.name for parameter in get_signature_parameters(target, method)]
    except (ImportError, AttributeError, ValueError):
        return []


# running


class MethodCLI(LightningCLI):
    """LightningCLI in subclass mode with this library's defaults; see the module's docstring.

    Attributes:
        test_metrics: what the test logged, by name; empty unless a test ran.
    """

    def __init__(self, args: Sequence[str] | None = None, **kwargs: Any) -> None:
        self.test_metrics: dict[str, float] = {}
        self._arguments = _expand_arguments(sys.argv[1:] if args is None else args)
        self._in_process = args is not None
        defaults: dict[str, Any] = {
            "parser_class": MethodArgumentParser,
            "seed_everything_default": 0,
            "auto_configure_optimizers": False,
            "save_config_kwargs": {"overwrite": True},
        }
        super().__init__(args=self._arguments, **{**defaults, **kwargs})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments with the short names expanded."""
        self.config = parser.parse_args(args)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Build the whole parser of the subcommand that was named; the others need no more than their description."""
        named = [argument for argument in self._arguments if argument in self.subcommands()]
        if named and subcommand not in named:
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the switch for the test at the end of ``fit``."""
        parser.add_argument(
            "--test_after_fit",
            type=bool,
            default=True,
            help="Test the best weights (the last ones if nothing is monitored) when the fit is done.",
        )

    # where a run lives, and where its checkpoints are

    def _settings(self) -> Any:
        return self.config[self.config.subcommand] if self.config.get("subcommand") else self.config

    def _default_root(self) -> str:
        configs = self._settings().get("config") or []
        names = [Path(str(path)) for path in configs if path]
        main = next((path for path in names if path.parent.name != "trainer"), None)
        return (
            str(Path("runs", main.parent.name if main.parent.name != "configs" else "", main.stem)) if main else "runs"
        )

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint, and let its hyper-parameters build the model where nothing is trained."""
        settings = self._settings()
        trainer = settings.get("trainer")
        if trainer is not None and not trainer.get("default_root_dir"):
            trainer["default_root_dir"] = self._default_root()
        path = settings.get("ckpt_path")
        if path in ("last", "best") and trainer is not None:
            path = settings["ckpt_path"] = find_checkpoint(trainer["default_root_dir"], path)
            if path is None and self.config.subcommand != "fit":
                self.parser.error(f"there is no checkpoint under {trainer['default_root_dir']}: run `fit` first.")
            if path is None:
                print(f"No checkpoint under {trainer['default_root_dir']} yet: the run starts from the beginning.")
        if not path:
            return
        if not Path(path).is_file() and not Path(path).is_dir() and "://" not in str(path):
            self.parser.error(f"--ckpt_path {path}: there is no such checkpoint.")
        if self.config.subcommand != "fit" and Path(path).is_file():
            self._model_from_checkpoint(Path(path))

    def _model_from_checkpoint(self, path: Path) -> None:
        hparams = torch.load(path, weights_only=True, map_location="cpu").get("hyper_parameters", {})
        class_path = hparams.pop("_class_path", None)
        hparams.pop("_instantiator", None)
        if class_path is None:  # made in Python: it does not describe its networks
            return
        settings = self._settings()
        given = settings["model"].as_dict() if settings.get("model") else {}
        saved = {"class_path": class_path, "init_args": hparams}
        for key, (here, there) in differences(given, saved).items():
            print(f"model.{key}: {here!r} in the configuration, {there!r} in the checkpoint, which is used.")
        settings.pop("model", None)
        parser = self._parser(self.config.subcommand)
        self.config[self.config.subcommand] = parser.parse_object(
            {**{k: v for k, v in settings.as_dict().items() if k != "config"}, "model": saved}
        )

    # trainer

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the logger, the progress bar, ``last.ckpt`` and the two guards where the configuration has none."""
        config = self._get(self.config_init, "trainer")
        root = config["default_root_dir"]
        _check_writable(Path(root))
        callbacks = config["callbacks"] or []
        config["callbacks"] = callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        if config["enable_progress_bar"] is not False and not _has(callbacks, ProgressBar):
            callbacks.append(RichProgressBar())
        if config["enable_checkpointing"] is not False:
            _keep_last(callbacks)
        brought = self.model.configure_callbacks() or []
        own = [*callbacks, *(brought if isinstance(brought, (list, tuple)) else [brought])]
        callbacks += [guard() for guard in (SeedEveryEpoch, FiniteGuard) if not _has(own, guard)]
        if config["logger"] in (None, True):
            config["logger"] = _csv_logger(root, self._settings().get("ckpt_path"), self.subcommand)
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """A frozen network is in eval mode on purpose."""
        if getattr(self.model, "frozen", ()):
            warnings.filterwarnings("ignore", message="Found .* module.* in eval mode at the start of training")

    def after_fit(self) -> None:
        """Test the best weights, or the last ones."""
        trainer = self.trainer
        if not self._settings().get("test_after_fit") or trainer.interrupted or trainer.fast_dev_run:
            return
        source = self.model if self.datamodule is None else self.datamodule
        if not (is_overridden("test_dataloader", source) and is_overridden("test_step", self.model)):
            return
        monitored = any(c.monitor and c.best_model_path for c in trainer.checkpoint_callbacks if hasattr(c, "monitor"))
        self.test(self.model, self.datamodule, ckpt_path="best" if monitored else None)
        if trainer.is_global_zero:
            print(f"Run folder: {trainer.log_dir}")

    def test(self, model: Any, datamodule: Any = None, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Test and keep the metrics."""
        extra = {"weights_only": True, **kwargs} if ckpt_path else kwargs
        results = self.trainer.test(model, datamodule=datamodule, ckpt_path=ckpt_path, **extra)
        self.test_metrics = {name: value for result in results for name, value in result.items()}


def _has(callbacks: list[Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _keep_last(callbacks: list[Callback]) -> None:
    """Write ``last.ckpt`` every epoch: Lightning's ``save_last`` does so only when the monitored value improves."""
    checkpoints = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    if any(callback.save_last and not callback.monitor for callback in checkpoints):
        return
    for callback in checkpoints:
        callback.save_last = None
    last = ModelCheckpoint(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
    last._last_global_step_saved = -1  # or a run without optimiser steps (a scikit-learn baseline) would save nothing
    callbacks.append(last)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise PermissionError(f"the run folder {folder} cannot be written. Choose another: --trainer.default_root_dir.")


def find_checkpoint(root: str, which: str) -> str | None:
    """The newest ``last.ckpt`` under a run folder, or the best checkpoint that it knows of.

    Args:
        root: the run folder (``trainer.default_root_dir``).
        which: "last" or "best".

    Returns:
        The path, or None if there is none.
    """
    found = sorted(Path(root).glob("**/last*.ckpt"), key=lambda path: path.stat().st_mtime)
    if not found:
        return None
    if which == "last":
        return str(found[-1])
    states = torch.load(found[-1], weights_only=True, map_location="cpu").get("callbacks", {}).values()
    states = [state for state in states if isinstance(state, dict) and state.get("best_model_path")]
    best = [state["best_model_path"] for state in sorted(states, key=lambda state: state.get("monitor") is None)]
    return next((path for path in best if Path(path).is_file()), None)


def differences(given: dict[str, Any], saved: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The keys in which two nested configurations differ, with both values; keys of only one side do not count."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in given.keys() & saved.keys():
        here, there = given[key], saved[key]
        if isinstance(here, dict) and isinstance(there, dict):
            found.update(differences(here, there, f"{prefix}{key}."))
        elif (list(here) if isinstance(here, tuple) else here) != there:  # YAML has no tuples
            found[f"{prefix}{key}"] = (here, there)
    return found


def _csv_logger(root: str, ckpt_path: str | None, subcommand: str | None) -> CSVLogger:
    """A CSV logger in a new version folder, or in the folder of the run that is resumed, whose rows are kept."""
    resumed = Path(ckpt_path).parent.parent if subcommand == "fit" and ckpt_path else None
    if resumed is None or resumed.parent.absolute() != Path(root).absolute():
        return CSVLogger(root, name="")
    logger = CSVLogger(root, name="", version=resumed.name)
    metrics = resumed / "metrics.csv"
    if rank_zero_only.rank == 0 and metrics.is_file():
        rows = metrics.read_text(encoding="utf-8")
        metrics.unlink()  # the writer would delete it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "the folder is not empty": on purpose
            writer = logger.experiment
        metrics.write_text(rows, encoding="utf-8")
        writer.metrics_keys = rows.partition("\n")[0].strip().split(",")
    return logger


def run(args: Sequence[str]) -> MethodCLI:
    """Run a command from Python, as the shell would.

    Args:
        args: e.g. ``["fit", "--config", "configs/gift/digits.yaml", "--trainer.max_epochs=1"]``.

    Returns:
        The command line object with ``model``, ``datamodule``, ``trainer`` and ``test_metrics``.
    """
    return MethodCLI(list(args))


def main() -> None:
    """The command: an error in what the user gave ends with one line; ``LIGHTNING_METHODS_TRACEBACK=1`` shows where."""
    try:
        MethodCLI()
    except (ValueError, TypeError, FileNotFoundError, PermissionError, ModuleNotFoundError) as error:
        if os.environ.get("LIGHTNING_METHODS_TRACEBACK"):
            raise
        print(
            f"error: {explain(str(error))}\n(LIGHTNING_METHODS_TRACEBACK=1 shows where it was raised)", file=sys.stderr
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
