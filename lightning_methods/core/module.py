"""The base of every LightningModule of this library, and the plain classifier that is everybody's baseline."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from .callbacks import FiniteGuard, SeedEveryEpoch
from .checks import check_choice, check_range

__all__ = ["Classifier", "MethodModule", "feature_dim"]


def feature_dim(encoder: nn.Module, given: int | None = None) -> int:
    """Width of an encoder's features: the given number, else ``encoder.num_features`` (timm, and our networks).

    Raises:
        ValueError: neither is there.
    """
    found = given if given is not None else getattr(encoder, "num_features", None)
    if not isinstance(found, int):
        raise ValueError(
            f"the number of features of {type(encoder).__name__} is not known: it has no attribute `num_features`; "
            "give the width explicitly (feature_dim or num_features)."
        )
    return found


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint may carry the value and load it with ``weights_only=True``."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (bool, int, float, str))


def _constructor_arguments(instance: Any, frame: Any) -> dict[str, Any]:
    """What the constructors of an instance were called with, from the base's frame up to that of its class."""
    outermost = inspect.unwrap(type(instance).__init__).__code__
    found: dict[str, Any] = {}
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is instance:
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            found.update({name: frame.f_locals[name] for name in names})
            if code is outermost:
                break
        frame = frame.f_back
    return found


def _constructor_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor and of those that it hands ``**kwargs`` to; the class's own win."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters
            found = {**parameters, **found}
            if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return found


class _Default:
    """Stands in a pickle for a constructor's default factory (usually a lambda, which pickle refuses)."""

    def __init__(self, parameter: str) -> None:
        self.parameter = parameter


class MethodModule(LightningModule):
    """What every method shares: optimiser and scheduler factories, one-line reload, frozen networks, exact resume.

    * ``configure_optimizers`` builds the optimiser over the trainable parameters and steps the scheduler every epoch
      or every step. A scheduler with an attribute ``total_steps`` that is None gets the run's length.
    * Hyper-parameters are stored so that ``Class.load_from_checkpoint(path)`` works. A checkpoint made by the command
      line keeps the ``class_path`` of the injected networks and rebuilds them. In Python, networks and factories are
      left out of the hyper-parameters (they would be pickled): ``load_from_checkpoint(path, network=...)``.
    * Two callbacks come with every module: :class:`~lightning_methods.core.SeedEveryEpoch` and
      :class:`~lightning_methods.core.FiniteGuard`.

    Subclasses call ``super().__init__(optimizer, lr_scheduler, lr_interval)`` first and then assign their networks.

    Args:
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        lr_interval: whether the scheduler steps at the end of an "epoch" or after every "step".

    Attributes:
        frozen: names of submodules that take no gradient, stay in eval mode and never reach the optimiser.
        checkpoint_excludes: prefixes of the state that checkpoints leave out, e.g. ``("teacher.",)``; they may be
            missing when a checkpoint is loaded.
    """

    frozen: ClassVar[tuple[str, ...]] = ()
    checkpoint_excludes: tuple[str, ...] = ()

    def __init__(
        self,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        check_choice("lr_interval", lr_interval, ("epoch", "step"))
        self.optimizer_factory = optimizer
        self.lr_scheduler_factory = lr_scheduler
        self.lr_interval = lr_interval
        self._save_arguments(inspect.currentframe())

    def _save_arguments(self, frame: Any) -> None:
        given = _given_hyperparameters.get()
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        if given is not None and given.get("_class_path", path).rsplit(".", 1)[-1] == type(self).__name__:
            self.save_hyperparameters()  # the command line's own configuration: plain by construction
            return
        arguments = _constructor_arguments(self, frame)
        accepted = inspect.signature(type(self).__init__).parameters  # a base may take what the class does not
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in accepted.values()):
            arguments = {name: value for name, value in arguments.items() if name in accepted}
        self._set_hparams({name: value for name, value in arguments.items() if _is_plain(value)})
        self._hparams_name = "kwargs"
        self._hparams_initial = type(self.hparams)(self.hparams)

    # frozen networks

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.frozen and isinstance(value, nn.Module):
            value.requires_grad_(False).eval()
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> MethodModule:
        """Set the mode of everything but the frozen networks, which stay in eval mode."""
        super().train(mode)
        for name in self.frozen:
            network = getattr(self, name, None)
            if network is not None:
                network.eval()
        return self

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the optimiser gets: those that take a gradient, outside of the frozen networks."""
        prefixes = tuple(f"{name}." for name in self.frozen)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and not name.startswith(prefixes):
                yield parameter

    # optimisation

    def configure_optimizers(self) -> Any:
        """One optimiser over the trainable parameters, with the scheduler at its interval."""
        optimizer = self.optimizer_factory(list(self.trainable_parameters()))
        if self.lr_scheduler_factory is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler_config(self.lr_scheduler_factory(optimizer))}

    def scheduler_config(self, scheduler: Any) -> dict[str, Any]:
        """Lightning's description of a scheduler: interval, monitored value, length of the run."""
        if getattr(scheduler, "total_steps", 0) is None:
            by_step = self.lr_interval == "step"
            scheduler.total_steps = self.trainer.estimated_stepping_batches if by_step else self.trainer.max_epochs
        config = {"scheduler": scheduler, "interval": self.lr_interval}
        if hasattr(scheduler, "monitor"):
            config["monitor"] = scheduler.monitor
        return config

    def configure_callbacks(self) -> list[Callback]:
        """The callbacks that make a run resumable and its failures readable."""
        attached = self._trainer.callbacks if self._trainer is not None else []
        return [guard() for guard in (SeedEveryEpoch, FiniteGuard) if not any(type(c) is guard for c in attached)]

    # checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the excluded state out."""
        if self.checkpoint_excludes:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: v for k, v in state.items() if not k.startswith(self.checkpoint_excludes)}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state; under ``strict`` only the excluded prefixes may be missing.

        Raises:
            RuntimeError: keys are missing or unexpected, or shapes differ.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [key for key in result.missing_keys if not key.startswith(self.checkpoint_excludes)]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"the state does not fit {type(self).__name__}: missing {missing or 'nothing'}, "
                f"unexpected {result.unexpected_keys or 'nothing'}."
            )
        return result

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Rebuild the module from a checkpoint, weights-only by default (see Lightning's method of this name).

        Raises:
            TypeError: the checkpoint was made in Python, so its networks have to be given again.
        """
        kwargs.setdefault("weights_only", True)
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except TypeError as error:
            if "required positional argument" not in str(error) and "required keyword-only argument" not in str(error):
                raise
            raise TypeError(
                f"{error}. The checkpoint was not made by the command line and does not describe its networks: "
                f"give them again, {cls.__name__}.load_from_checkpoint(path, <network>=...)."
            ) from None

    # pickling

    def __getstate__(self) -> dict[str, Any]:
        """Replace default factories, which are lambdas and cannot be pickled, by the name of their argument."""
        defaults = {
            id(parameter.default): name
            for name, parameter in _constructor_parameters(type(self)).items()
            if inspect.isfunction(parameter.default)
        }
        state = super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__
        return {
            key: _Default(defaults[id(value)]) if inspect.isfunction(value) and id(value) in defaults else value
            for key, value in state.items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put the default factories back."""
        parameters = _constructor_parameters(type(self))
        super().__setstate__(
            {key: parameters[v.parameter].default if isinstance(v, _Default) else v for key, v in state.items()}
        )


class Classifier(MethodModule):
    """Cross-entropy classifier: every comparison's baseline and the base of methods that change only the loss.

    Batches are ``(x, y)`` or anything with the fields ``x`` and ``y``. Logs ``train/loss``, ``train/acc``,
    ``val/loss``, ``val/acc``, ``test/loss``, ``test/acc``.

    Args:
        network: returns logits, [B, ...] -> [B, num_classes].
        num_classes: number of classes, at least 2.
        optimizer: makes the optimiser from parameters.
        lr_scheduler: makes the scheduler from the optimiser.
        label_smoothing: share of the target spread over all classes, in [0, 1).
        lr_interval: whether the scheduler steps every "epoch" or every "step".
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerCallable = lambda params: torch.optim.AdamW(params, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        label_smoothing: float = 0.0,
        lr_interval: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval)
        check_range("num_classes", num_classes, 2)
        check_range("label_smoothing", label_smoothing, 0, 1, high_open=True)
        self.network = network
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        for stage in ("train", "val", "test"):
            setattr(self, f"{stage}_acc", MulticlassAccuracy(num_classes, average="micro"))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, [B, num_classes]."""
        return self.network(x)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of class indices [B], or of class probabilities [B, num_classes]."""
        return F.cross_entropy(logits, y, label_smoothing=self.label_smoothing)

    @staticmethod
    def inputs_and_target(batch: Any) -> tuple[Tensor, Tensor]:
        """``x`` and ``y`` of a batch, by name where it has names."""
        return (batch.x, batch.y) if hasattr(batch, "y") else (batch[0], batch[1])

    def _evaluate(self, batch: Any, stage: str) -> Tensor:
        x, y = self.inputs_and_target(batch)
        logits = self(x)
        loss = self.loss(logits, y)
        accuracy = getattr(self, f"{stage}_acc")
        accuracy(logits, y)
        options = {"batch_size": len(y), "on_step": False, "on_epoch": True}
        self.log(f"{stage}/loss", loss, prog_bar=stage == "train", sync_dist=stage != "train", **options)
        self.log(f"{stage}/acc", accuracy, prog_bar=True, **options)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of the batch."""
        return self._evaluate(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Class probabilities, [B, num_classes]."""
        x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, (tuple, list)) else batch
        return self(x).softmax(dim=-1)
