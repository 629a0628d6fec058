"""The base of the callbacks that watch a network's units, and the one that only watches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ..core import distributed
from ..core.checks import check_choice, check_range
from ..core.hooks import submodule
from ..core.layers import NORMS, find_layer_pairs
from ..core.random import make_generator
from .functional import INITS, any_positive, check_optimizer_state, check_reset, reset_at_, units_of

__all__ = ["PlasticityMonitor", "UnitResetCallback", "WatchedLayer", "own_state", "refuse_sharding"]

RELU_LIKE = {"relu", "relu6", "relu_", "threshold"}


class WatchedLayer(NamedTuple):
    """A layer whose units are watched.

    Attributes:
        name: the producer's name.
        producer: Linear or Conv.
        norm: the normalisation between producer and consumers.
        consumers: every layer that reads the units.
        observed: the module whose output decides firing: the producer, or the normalisation before the non-linearity.
        activation: the non-linearity.
        units: number of units.
        start: position of the first unit among all watched units.
    """

    name: str
    producer: nn.Module
    norm: nn.Module | None
    consumers: tuple[nn.Module, ...]
    observed: nn.Module
    activation: Callable[[Tensor], Tensor]
    units: int
    start: int

    @property
    def rows(self) -> slice:
        """Where the layer's units are among all watched units."""
        return slice(self.start, self.start + self.units)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that a reset changes."""
        return (self.producer, *self.consumers, *(() if self.norm is None else (self.norm,)))


def _nothing(*args: Any) -> None:
    """What a copy of a hook is."""


class _Hook:
    """A forward hook that belongs to one module: a deep copy or a pickle of the module carries an inert one."""

    def __init__(self, callback: UnitResetCallback, index: int) -> None:
        self.callback = callback
        self.index = index

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        # In a backward pass this is activation checkpointing, which runs the forward once more.
        if self.callback.watching and module.training and torch._C._current_graph_task_id() == -1:
            self.callback.see(self.index, output.detach())

    def __deepcopy__(self, memo: dict) -> Callable:
        return _nothing

    def __reduce__(self) -> Any:
        return getattr, (_Nothing, "hook")


class _Nothing:
    hook = staticmethod(_nothing)


def own_state(callback: Callback) -> dict[str, Any]:
    """A callback's attributes without what the trainer hangs on it, which leads to the module and the trainer."""
    return {name: value for name, value in callback.__dict__.items() if name not in ("log", "log_dict")}


def refuse_sharding(trainer: Trainer, pl_module: LightningModule, who: str) -> None:
    """Raise where parameters are spread over processes: single rows cannot be changed there.

    Raises:
        NotImplementedError: FSDP, DeepSpeed, tensor parallelism.
    """
    from torch.distributed.tensor import DTensor

    sharded = any(
        base.__name__ in {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"}
        for base in type(trainer.strategy).__mro__
    )
    if sharded or any(isinstance(p, DTensor) for p in pl_module.parameters()):
        raise NotImplementedError(
            f"{who} changes single rows and columns of parameters, which {type(trainer.strategy).__name__} spreads "
            "over processes. Use DDP or one device."
        )


def _by_units(z: Tensor, layer: WatchedLayer) -> Tensor:
    """A layer's output as a view [examples, units, positions]."""
    if isinstance(layer.producer, nn.Linear):
        return z.reshape(-1, layer.units, 1)
    if z.shape[1] != layer.units:  # a normalisation after the flatten: blocks of positions
        return z.unflatten(1, (layer.units, -1))
    return z.flatten(2)


class UnitResetCallback(Callback):
    """Base of the callbacks that watch units and reset some of them after an optimiser step.

    It works with any LightningModule, automatic or manual optimisation, gradient accumulation and DDP. Units are those
    of Linear and Conv layers that feed another one. With a normalisation between, its output decides whether a unit
    fires. The state of all layers is one packed vector, so a step costs one reduction per layer, vector work, and one
    wait for the device (every ``check_every_n_steps`` optimiser steps).

    Logs at every epoch's end ``<prefix>/resets`` (so far in this fit) and ``<prefix>/dead_fraction`` (share of the
    watched units that have not fired during the last ``dead_after`` examples).

    A subclass says which units are to be reset: :meth:`make_state`, :meth:`observe`, :meth:`select`,
    :meth:`after_reset`.

    With ``torch.compile`` the hooks break the graph at the watched layers; the numbers stay the same. A compiled
    network that was trained before this fit does not see new hooks unless
    ``torch._dynamo.config.skip_nnmodule_hook_guards = False``. Parameters that are sharded over processes (FSDP,
    DeepSpeed) are refused.

    Args:
        layers: pairs (producer, consumer) of names as in ``named_modules()``, from input to output. Instead of one
            consumer a list may be given, with all layers that read the units and the normalisation between, if there is
            one. None takes what :func:`~lightning_methods.core.layers.find_layer_pairs` can prove. The non-linearity of
            named layers is taken to be ReLU.
        init: distribution of new incoming weights: "module" (the layer's own ``reset_parameters``) or "lecun_normal".
        seed: seed of the new weights, together with the step and the layer.
        check_every_n_steps: optimiser steps between two looks at which units are due.
        dead_after: examples of silence after which a unit counts as dead in the log.

    Attributes:
        total_resets: resets so far.
        resets_per_layer: resets so far by layer.
        watched: the layers, while training.

    Raises:
        ValueError: an argument outside its range; while training starts: names that do not exist, layers that do not
            fit together, nothing to watch, an optimiser whose state cannot be reset by entries.
        NotImplementedError: parameters are sharded over processes.
    """

    prefix = "units"

    def __init__(
        self,
        layers: Sequence[tuple[str, str | list[str]]] | None = None,
        init: Literal["module", "lecun_normal"] = "module",
        seed: int = 0,
        check_every_n_steps: int = 1,
        dead_after: int = 1000,
    ) -> None:
        check_choice("init", init, INITS)
        check_range("check_every_n_steps", check_every_n_steps, 1)
        check_range("dead_after", dead_after, 1)
        for entry in layers or ():
            if len(entry) != 2 or not isinstance(entry[0], str):
                raise ValueError(f"layers must hold pairs (producer, consumer or list of consumers), got {entry!r}.")
        self.layers = None if layers is None else [(entry[0], entry[1]) for entry in layers]
        self.init = init
        self.seed = seed
        self.check_every_n_steps = check_every_n_steps
        self.dead_after = dead_after
        self.watched: list[WatchedLayer] = []
        self.state: dict[str, Tensor] = {}
        self.resets_per_layer: dict[str, int] = {}
        self.steps = 0
        self.watching = False
        self._fired: list[Tensor | None] = []
        self._examples: list[int] = []
        self._handles: list[Any] = []
        self._restored: dict[str, Any] | None = None
        self._global_step = 0
        self._state_checked = False

    # what subclasses define

    def make_state(self, units: int, device: torch.device) -> dict[str, Tensor]:
        """Further state of all watched units, [units, ...] each."""
        return {}

    def observe(self, index: int, z: Tensor) -> None:
        """Look at a layer's output in a forward pass, before the non-linearity.

        Args:
            index: of the layer in ``watched``.
            z: [examples, units, positions], without gradient.
        """

    def after_batch(self, fired: Tensor, examples: int | Tensor) -> None:
        """Take note of a batch (micro-batch under accumulation).

        Args:
            fired: units that fired for any example on any rank, bool [units].
            examples: examples that each unit has seen, on all ranks.
        """

    def select(self) -> Tensor | None:
        """The units to reset after an optimiser step, bool [units]; None if nothing is due."""
        return None

    def before_reset(self, index: int, rows: Tensor) -> None:
        """Do something to a layer before the units at ``rows`` are reset."""

    def after_reset(self, mask: Tensor) -> None:
        """Take note of the units that were reset, bool [units]."""

    def after_step(self) -> None:
        """Take note of an optimiser step, after its resets."""

    # results

    @property
    def total_resets(self) -> int:
        """Resets so far in this fit."""
        return sum(self.resets_per_layer.values())

    @property
    def dead_fraction(self) -> float:
        """Share of the watched units that have not fired during the last ``dead_after`` examples."""
        silence = self.state.get("silence")
        return 0.0 if silence is None or not len(silence) else float((silence >= self.dead_after).double().mean())

    # life in a fit

    @property
    def state_key(self) -> str:
        """Under which name the state is in a checkpoint; callbacks on other layers have another one."""
        return self._generate_state_key(layers=self.layers)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse sharded parameters before anything is built."""
        if stage == "fit":
            refuse_sharding(trainer, pl_module, type(self).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers, make or restore the state, install the hooks."""
        refuse_sharding(trainer, pl_module, type(self).__name__)
        self._remove_hooks()
        self.watched = self._find(pl_module)
        units = sum(layer.units for layer in self.watched)
        device = self.watched[0].producer.weight.device
        self.steps = 0
        self.resets_per_layer = {layer.name: 0 for layer in self.watched}
        self.state = {"silence": torch.zeros(units, dtype=torch.long, device=device), **self.make_state(units, device)}
        self._restore(device)
        self._state_checked = False
        self._global_step = trainer.global_step
        self._clear()
        for index, layer in enumerate(self.watched):
            self._handles.append(layer.observed.register_forward_hook(_Hook(self, index)))

    def _find(self, pl_module: LightningModule) -> list[WatchedLayer]:
        found: list[WatchedLayer] = []

        def add(
            name: str, producer: nn.Module, norm: Any, consumers: Iterable[nn.Module], observed: Any, act: Any
        ) -> None:
            start = found[-1].start + found[-1].units if found else 0
            layer = WatchedLayer(name, producer, norm, tuple(consumers), observed, act, units_of(producer), start)
            check_reset(producer, layer.consumers, norm, [])
            found.append(layer)

        if self.layers is not None:
            for name, readers in self.layers:
                modules = [submodule(pl_module, r) for r in ([readers] if isinstance(readers, str) else readers)]
                norms = [module for module in modules if isinstance(module, NORMS)]
                consumers = [module for module in modules if not isinstance(module, NORMS)]
                if len(norms) > 1 or not consumers:
                    raise ValueError(
                        f"layer {name!r} must have at least one consumer and at most one norm, got {readers}."
                    )
                producer = submodule(pl_module, name)
                norm = norms[0] if norms else None
                if any(not p.requires_grad for p in producer.parameters()):
                    raise ValueError(f"layer {name!r} is frozen; resetting its units has no meaning.")
                add(name, producer, norm, consumers, norm or producer, torch.relu)
        else:
            for pair in find_layer_pairs(pl_module):
                if not pair.producer.weight.requires_grad or not pair.consumer.weight.requires_grad:
                    continue  # frozen teachers and momentum copies
                act = pair.activation
                kind = getattr(act, "__name__", type(act).__name__).lower()
                if kind not in RELU_LIKE and not _acts(pair.norm):
                    warnings.warn(
                        f"{type(self).__name__}: the units of {pair.name!r} pass through {kind if act else 'nothing'}, "
                        "not ReLU: below zero they are not exactly silent, so 'dead' is not well defined.",
                        stacklevel=2,
                    )
                observed = pair.norm if pair.norm is not None and pair.norm_first else pair.producer
                add(pair.name, pair.producer, pair.norm, [pair.consumer], observed, act or torch.relu)
        if not found:
            raise ValueError(
                f"{type(self).__name__} found no layers to watch in {type(pl_module).__name__}. Name them: "
                "layers=[(producer, consumer), ...] with names as in named_modules()."
            )
        return found

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to watch."""
        self.watching = True

    def see(self, index: int, z: Tensor) -> None:
        """What the hook of a layer calls: note which units fire, in one reduction over the activation."""
        layer = self.watched[index]
        examples = z.shape[0]
        z = _by_units(z, layer)
        fired = any_positive(z, (0, 2))
        before = self._fired[index]
        self._fired[index] = fired if before is None else before | fired
        self._examples[index] += examples
        self.observe(index, z)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Age the units, and after an optimiser step reset those that are due."""
        self.watching = False
        silence = self.state["silence"]
        parts = [
            silence.new_zeros(layer.units, dtype=torch.bool) if fired is None else fired
            for layer, fired in zip(self.watched, self._fired, strict=True)
        ]
        fired = distributed.any_over_ranks(torch.cat(parts))
        examples = self._examples_of_units()
        self.state["silence"] = torch.where(fired, 0, silence + examples)
        self.after_batch(fired, examples)
        self._clear()
        if trainer.global_step == self._global_step:  # gradients are still accumulating
            return
        self._global_step = trainer.global_step
        self.steps += 1
        if not self._state_checked:
            self._check_optimizers(trainer)
        if self.steps % self.check_every_n_steps == 0:
            mask = self.select()
            if mask is not None:
                self._reset(trainer, mask)
        self.after_step()

    def _examples_of_units(self) -> int | Tensor:
        """Examples that the units have seen in this batch: a number if all layers have seen the same on one process."""
        if distributed.world_size() == 1 and len(set(self._examples)) == 1:
            return self._examples[0]
        device = self.state["silence"].device
        counts = distributed.sum_over_ranks(torch.tensor(self._examples, device=device), grad=False)
        return counts.repeat_interleave(
            torch.tensor([layer.units for layer in self.watched], device=device), output_size=len(self.state["silence"])
        )

    def _check_optimizers(self, trainer: Trainer) -> None:
        for layer in self.watched:
            check_optimizer_state(trainer.optimizers, (p for m in layer.modules for p in m.parameters(recurse=False)))
        self._state_checked = True

    def _reset(self, trainer: Trainer, mask: Tensor) -> None:
        """Reset from input to output; the copy to the host is the step's only wait for the device."""
        due = mask.cpu()
        if not due.any():
            return
        for index, layer in enumerate(self.watched):
            rows = due[layer.rows].nonzero().flatten()
            if not len(rows):
                continue
            self.resets_per_layer[layer.name] += len(rows)
            rows = rows.to(mask.device, non_blocking=True)
            self.before_reset(index, rows)
            generator = make_generator(self.seed, trainer.global_step, index)
            reset_at_(
                layer.producer,
                layer.consumers,
                rows,
                trainer.optimizers,
                init=self.init,
                generator=generator,
                norm=layer.norm,
            )
        self.after_reset(mask)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log."""
        pl_module.log(f"{self.prefix}/resets", float(self.total_resets))
        pl_module.log(f"{self.prefix}/dead_fraction", self.dead_fraction)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hooks."""
        self._remove_hooks()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the hooks."""
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self.watching = False
        self.watched = []

    def _clear(self) -> None:
        self._fired = [None] * len(self.watched)
        self._examples = [0] * len(self.watched)

    # checkpoints and copies

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        if not self.state:
            return {}
        return {
            "state": dict(self.state),
            "resets_per_layer": dict(self.resets_per_layer),
            "steps": self.steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the training starts."""
        self._restored = state_dict or None

    def _restore(self, device: torch.device) -> None:
        if self._restored is None:
            return
        saved, self._restored = self._restored, None
        if list(saved["resets_per_layer"]) != list(self.resets_per_layer):
            raise ValueError(
                f"the checkpoint's {type(self).__name__} watched the layers {list(saved['resets_per_layer'])}, this "
                f"one watches {list(self.resets_per_layer)}."
            )
        self.resets_per_layer = dict(saved["resets_per_layer"])
        self.steps = saved["steps"]
        for name, value in saved["state"].items():
            if name in self.state and self.state[name].shape != value.shape and self.state[name].numel():
                raise ValueError(
                    f"the checkpoint's {name} of {type(self).__name__} has shape {list(value.shape)}, expected "
                    f"{list(self.state[name].shape)}: resume with the arguments of the interrupted run."
                )
            self.state[name] = value.to(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**own_state(self), "_handles": [], "watched": [], "watching": False, "_fired": [], "_examples": []}


def _acts(norm: nn.Module | None) -> bool:
    """Whether a normalisation has its ReLU inside (timm's BatchNormAct2d)."""
    return any(type(part).__name__.lower() in RELU_LIKE for part in norm.children()) if norm is not None else False


class PlasticityMonitor(UnitResetCallback):
    """Watch the units without resetting any: what a run without intervention is compared by.

    Logs ``plasticity/dead_fraction``, ``plasticity/weight_norm`` (squared norm of all trainable parameters) and
    ``plasticity/grad_norm`` (of the gradient at the optimiser's steps, mean over the epoch).

    Args:
        layers: see :class:`UnitResetCallback`.
        dead_after: examples of silence after which a unit counts as dead.
    """

    prefix = "plasticity"

    def __init__(self, layers: Sequence[tuple[str, str | list[str]]] | None = None, dead_after: int = 1000) -> None:
        super().__init__(layers, dead_after=dead_after)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Log the gradient's norm."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.nn.utils.get_total_norm(gradients)
            pl_module.log(f"{self.prefix}/grad_norm", norm, on_step=False, on_epoch=True, batch_size=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of dead units and the parameters' norm."""
        pl_module.log(f"{self.prefix}/dead_fraction", self.dead_fraction)
        norm = torch.nn.utils.get_total_norm([p.detach() for p in pl_module.parameters() if p.requires_grad])
        pl_module.log(f"{self.prefix}/weight_norm", norm.square())

    def _check_optimizers(self, trainer: Trainer) -> None:
        self._state_checked = True  # nothing is reset, so any optimiser will do
