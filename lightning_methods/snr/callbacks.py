"""Callbacks that keep a network plastic, for any LightningModule: unit resets and their competitors.

All of them act from outside: forward hooks (installed when the training starts, removed when it ends) watch the units,
and parameters change after the optimiser's step. What they remember is in the checkpoint.
"""

from __future__ import annotations

import hashlib
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
from .functional import (
    INITS,
    add_observation_,
    any_positive,
    check_optimizer_state,
    check_reset,
    empirical_tail,
    fresh_layer,
    geometric_tail,
    keep_mean_output_,
    normalized_scores,
    outgoing_magnitude,
    reset_at_,
    units_of,
    update_ages,
    update_thresholds,
)

__all__ = [
    "ContinualBackprop",
    "L2Init",
    "L2Regularization",
    "PlasticityMonitor",
    "ReDo",
    "SelfNormalizedResets",
    "ShrinkAndPerturb",
    "UnitResetCallback",
]

ESTIMATORS = ("histogram", "empirical", "geometric")
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


def _own_state(callback: Callback) -> dict[str, Any]:
    """A callback's attributes without what the trainer hangs on it, which leads to the module and the trainer."""
    return {name: value for name, value in callback.__dict__.items() if name not in ("log", "log_dict")}


def _refuse_sharding(trainer: Trainer, pl_module: LightningModule, who: str) -> None:
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


def _generator(*parts: Any) -> torch.Generator:
    """A CPU generator decided by the parts: equal on all ranks, the same after a resume."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


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
            _refuse_sharding(trainer, pl_module, type(self).__name__)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers, make or restore the state, install the hooks."""
        _refuse_sharding(trainer, pl_module, type(self).__name__)
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
            generator = _generator(self.seed, trainer.global_step, index)
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
        return {**_own_state(self), "_handles": [], "watched": [], "watching": False, "_fired": [], "_examples": []}


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


class SelfNormalizedResets(UnitResetCallback):
    """Reset a unit when it has been silent for longer than its own inter-firing times make plausible (SNR).

    A unit's age a is the number of examples since it last fired, tau its threshold; it is reset when ``a >= tau``.
    Three estimators of the (1 - eta) percentile of its inter-firing times:

    * "histogram" (the authors' code): counts of the ages at firing; every ``update_every_n_steps`` tau moves to their
      percentile, or is expanded where that lies beyond tau, and the counts start anew.
    * "empirical": the percentile of the last ``window`` inter-firing times of the unit.
    * "geometric": the inter-firing time is geometric with the unit's running mean.

    The last two know a unit after ``min_observations`` firings; before that, tau is ``initial_threshold``. They forget
    a unit's past when it is reset. All respect ``min_threshold`` and ``max_threshold``.

    Ages count examples, in steps of the (global) batch. On sequences an example is a whole sequence: a unit fires if it
    does at any position.

    Source: Farias and Jozefiak, Self-Normalized Resets for Plasticity in Continual Learning (2025), Algorithm 1.

    Args:
        eta: rejection level in (0, 1): the tail, that is 1 minus the percentile.
        layers: see :class:`UnitResetCallback`.
        estimator: "histogram", "empirical" or "geometric".
        initial_threshold: tau at the start, in examples.
        max_threshold: largest tau.
        min_threshold: smallest tau.
        expansion_factor: growth of tau where the percentile is not below it.
        update_every_n_steps: optimiser steps between two updates of tau ("histogram").
        histogram_bin: examples in a bin; None takes the size of the first batch on all ranks, which loses nothing while
            batches have that size. 1 keeps every age apart and needs ``units * max_threshold * 4`` bytes.
        init: see :class:`UnitResetCallback`.
        seed: see :class:`UnitResetCallback`.
        check_every_n_steps: see :class:`UnitResetCallback`.
        window: inter-firing times that are kept ("empirical").
        min_observations: firings after which a unit is known ("empirical", "geometric").
        dead_after: see :class:`UnitResetCallback`.

    Raises:
        ValueError: eta outside (0, 1), thresholds that are not in order, an unknown estimator; see also
            :class:`UnitResetCallback`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[SelfNormalizedResets(eta=0.05)], logger=False, accelerator="cpu")
    """

    prefix = "snr"

    def __init__(
        self,
        eta: float = 0.02,
        layers: Sequence[tuple[str, str | list[str]]] | None = None,
        estimator: Literal["histogram", "empirical", "geometric"] = "histogram",
        initial_threshold: int = 20000,
        max_threshold: int = 20000,
        min_threshold: int = 100,
        expansion_factor: float = 2.0,
        update_every_n_steps: int = 10000,
        histogram_bin: int | None = None,
        init: Literal["module", "lecun_normal"] = "module",
        seed: int = 0,
        check_every_n_steps: int = 1,
        window: int = 1000,
        min_observations: int = 10,
        dead_after: int = 1000,
    ) -> None:
        super().__init__(layers, init, seed, check_every_n_steps, dead_after)
        check_range("eta", eta, 0, 1, low_open=True, high_open=True)
        check_choice("estimator", estimator, ESTIMATORS)
        check_range("min_threshold", min_threshold, 1)
        check_range("max_threshold", max_threshold, min_threshold)
        check_range("initial_threshold", initial_threshold, 1, max_threshold)
        check_range("expansion_factor", expansion_factor, 1)
        check_range("update_every_n_steps", update_every_n_steps, 1)
        check_range("window", window, 1)
        check_range("min_observations", min_observations, 1)
        if histogram_bin is not None:
            check_range("histogram_bin", histogram_bin, 1)
        self.eta = eta
        self.estimator = estimator
        self.initial_threshold = initial_threshold
        self.max_threshold = max_threshold
        self.min_threshold = min_threshold
        self.expansion_factor = expansion_factor
        self.update_every_n_steps = update_every_n_steps
        self.histogram_bin = histogram_bin
        self.window = window
        self.min_observations = min_observations
        self._bin = histogram_bin

    def make_state(self, units: int, device: torch.device) -> dict[str, Tensor]:
        """Ages, and what the estimator keeps."""
        self._bin = self.histogram_bin
        zeros = torch.zeros(units, dtype=torch.long, device=device)
        state = {"ages": zeros}
        if self.estimator == "histogram":
            state["thresholds"] = torch.full_like(zeros, self.initial_threshold)
            # Its size is known with the first batch.
            state["histogram"] = torch.zeros(0, 0, dtype=torch.int32, device=device)
            return state
        state["observations"] = zeros.clone()
        if self.estimator == "empirical":
            state["window"] = torch.full((units, self.window), -1, dtype=torch.int32, device=device)
        else:
            state["silent_steps"] = zeros.clone()
            state["total"] = zeros.clone()
        return state

    def state_dict(self) -> dict[str, Any]:
        """The base's state, with the width of a bin."""
        state = super().state_dict()
        return {**state, "bin": self._bin} if state else state

    def _restore(self, device: torch.device) -> None:
        if self._restored is not None:
            self._bin = self._restored["bin"]
        super()._restore(device)

    def after_batch(self, fired: Tensor, examples: int | Tensor) -> None:
        """Count the inter-firing times of the units that fired, and age the others."""
        state = self.state
        ages = state["ages"]
        if self.estimator == "histogram":
            if not state["histogram"].numel():
                if self._bin is None:
                    self._bin = max(int(examples if isinstance(examples, int) else examples.max()), 1)
                state["histogram"] = ages.new_zeros(len(ages), self.max_threshold // self._bin + 1, dtype=torch.int32)
            add_observation_(state["histogram"], ages, fired, self._bin)
        elif self.estimator == "empirical":
            place = (state["observations"] % self.window)[:, None]
            # From one firing to the next: consecutive firings are one batch apart.
            time = (ages + examples).to(torch.int32)[:, None]
            old = state["window"].gather(1, place)
            state["window"].scatter_(1, place, torch.where(fired[:, None], time, old))
            state["observations"] = state["observations"] + fired
        else:
            seen = examples > 0 if isinstance(examples, int) else (examples > 0).long()
            steps = state["silent_steps"] + seen
            state["total"] = state["total"] + fired * steps
            state["silent_steps"] = torch.where(fired, 0, steps)
            state["observations"] = state["observations"] + fired
        state["ages"], _ = update_ages(fired, ages, examples)

    def select(self) -> Tensor:
        """The units whose silence is beyond their percentile."""
        state = self.state
        ages = state["ages"]
        if self.estimator == "histogram":
            return ages >= state["thresholds"]
        known = state["observations"] >= self.min_observations
        if self.estimator == "empirical":
            tail = empirical_tail(ages, state["window"])
        else:
            tail = geometric_tail(state["silent_steps"], state["total"].double() / state["observations"].clamp_min(1))
        dead = (tail <= self.eta) & (ages >= self.min_threshold)
        return torch.where(known, dead, ages >= self.initial_threshold) | (ages >= self.max_threshold)

    def after_reset(self, mask: Tensor) -> None:
        """A reset ends the silence: counted as an observation by the histogram, a fresh start for the others."""
        state = self.state
        if self.estimator == "histogram":
            add_observation_(state["histogram"], state["ages"], mask, self._bin)
        else:
            state["observations"] = state["observations"].masked_fill(mask, 0)
            if self.estimator == "empirical":
                state["window"].masked_fill_(mask[:, None], -1)
            else:
                state["total"] = state["total"].masked_fill(mask, 0)
                state["silent_steps"] = state["silent_steps"].masked_fill(mask, 0)
        state["ages"] = state["ages"].masked_fill(mask, 0)

    def after_step(self) -> None:
        """Update the thresholds when it is time."""
        if self.estimator != "histogram" or self.steps % self.update_every_n_steps:
            return
        state = self.state
        state["thresholds"] = update_thresholds(
            state["histogram"],
            state["thresholds"],
            percentile=1 - self.eta,
            expansion_factor=self.expansion_factor,
            min_threshold=self.min_threshold,
            max_threshold=self.max_threshold,
            bin_width=self._bin,
        )
        state["histogram"].zero_()


class _ActivationCallback(UnitResetCallback):
    """Base of those that look at activations: sums of h and |h| over the micro-batches of an optimiser step."""

    def make_state(self, units: int, device: torch.device) -> dict[str, Tensor]:
        self._sums: list[Tensor | None] = [None] * len(self.watched)
        self._counts = [0] * len(self.watched)
        return {}

    def _due(self) -> bool:
        """Whether the activations of the coming step are needed."""
        return True

    def observe(self, index: int, z: Tensor) -> None:
        """Add up the activations and their magnitudes."""
        if not self._due():
            return
        layer = self.watched[index]
        # A module that works in place must not touch what the network goes on with.
        h = layer.activation(z.clone() if getattr(layer.activation, "inplace", False) else z)
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        sums = torch.stack([h.abs().sum(dim=(0, 2)), h.sum(dim=(0, 2))])
        before = self._sums[index]
        self._sums[index] = sums if before is None else before + sums
        self._counts[index] += z.shape[0] * z.shape[2]

    def _means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means of |h| and of h over all ranks since the last step, and whether the unit's layer was used, [units]."""
        device = self.state["silence"].device
        sums = [
            torch.zeros(2, layer.units, device=device) if part is None else part
            for layer, part in zip(self.watched, self._sums, strict=True)
        ]
        counts = [
            torch.full((1, layer.units), float(count), device=device, dtype=part.dtype)
            for layer, count, part in zip(self.watched, self._counts, sums, strict=True)
        ]
        packed = torch.cat([torch.cat(sums, dim=1), torch.cat(counts, dim=1)])
        packed = distributed.sum_over_ranks(packed, grad=False)
        self._sums = [None] * len(self.watched)
        self._counts = [0] * len(self.watched)
        magnitude, mean = packed[:2] / packed[2].clamp_min(1)
        return magnitude, mean, packed[2] > 0


class ReDo(_ActivationCallback):
    """Reset dormant units every ``period`` steps: those whose activation is small relative to their layer's.

    Score ``s_i = E|h_i| / mean_k E|h_k|`` on the batch of that step; units with ``s_i <= tau`` are reset.

    Source: Sokar et al., The Dormant Neuron Phenomenon in Deep Reinforcement Learning (2023).

    Args:
        period: optimiser steps between two rounds of resets.
        tau: threshold of the score, at least 0; 0 takes units that were silent for the whole batch.
        layers: see :class:`UnitResetCallback`.
        init: see :class:`UnitResetCallback`.
        seed: see :class:`UnitResetCallback`.
        dead_after: see :class:`UnitResetCallback`.
    """

    prefix = "redo"

    def __init__(
        self,
        period: int = 1000,
        tau: float = 0.0,
        layers: Sequence[tuple[str, str | list[str]]] | None = None,
        init: Literal["module", "lecun_normal"] = "module",
        seed: int = 0,
        dead_after: int = 1000,
    ) -> None:
        super().__init__(layers, init, seed, dead_after=dead_after)
        check_range("period", period, 1)
        check_range("tau", tau, 0)
        self.period = period
        self.tau = tau

    def _due(self) -> bool:
        return (self.steps + 1) % self.period == 0

    def select(self) -> Tensor | None:
        """The dormant units, when it is time."""
        if self.steps % self.period:
            return None
        magnitude, _, used = self._means()
        return used & torch.cat([normalized_scores(magnitude[layer.rows]) <= self.tau for layer in self.watched])


class ContinualBackprop(_ActivationCallback):
    """Replace a small share of the mature units with the lowest utility at every step (continual backprop, CBP).

    Utility is a running mean of ``|h_i| * sum_k |W_out[k, i]|``. Every step a layer may replace ``replacement_rate``
    times its mature units; the fraction is carried over. Before a unit's outgoing weights become zero, its mean
    contribution goes into the consumer's bias.

    Source: Dohare et al., Loss of plasticity in deep continual learning (2024).

    Args:
        replacement_rate: share of the mature units that is replaced per step, in [0, 1].
        decay: of the running means, in [0, 1).
        maturity: steps that a new unit is left alone.
        layers: see :class:`UnitResetCallback`.
        init: see :class:`UnitResetCallback`.
        seed: see :class:`UnitResetCallback`.
        dead_after: see :class:`UnitResetCallback`.
    """

    prefix = "cbp"

    def __init__(
        self,
        replacement_rate: float = 1e-4,
        decay: float = 0.99,
        maturity: int = 100,
        layers: Sequence[tuple[str, str | list[str]]] | None = None,
        init: Literal["module", "lecun_normal"] = "module",
        seed: int = 0,
        dead_after: int = 1000,
    ) -> None:
        super().__init__(layers, init, seed, dead_after=dead_after)
        check_range("replacement_rate", replacement_rate, 0, 1)
        check_range("decay", decay, 0, 1, high_open=True)
        check_range("maturity", maturity, 0)
        self.replacement_rate = replacement_rate
        self.decay = decay
        self.maturity = maturity

    def make_state(self, units: int, device: torch.device) -> dict[str, Tensor]:
        """Utilities, mean activations, ages in steps, and each layer's carried fraction."""
        super().make_state(units, device)
        largest = max(layer.units for layer in self.watched)
        # Position of every unit in a padded [layers, largest] table, so that all layers are ranked at once.
        self._place = torch.cat([torch.arange(n.units) + i * largest for i, n in enumerate(self.watched)]).to(device)
        self._table = (len(self.watched), largest)
        return {
            "utility": torch.zeros(units, device=device),
            "mean_activation": torch.zeros(units, device=device),
            "unit_steps": torch.zeros(units, dtype=torch.long, device=device),
            "carried": torch.zeros(len(self.watched), dtype=torch.float64, device=device),
        }

    def _in_table(self, values: Tensor, fill: float) -> Tensor:
        return values.new_full(self._table, fill).flatten().index_copy(0, self._place, values).view(self._table)

    def select(self) -> Tensor:
        """Update the utilities; the lowest of the mature units, as many as each layer has saved up for."""
        state = self.state
        magnitude, mean, used = self._means()
        outgoing = torch.cat(
            [sum(outgoing_magnitude(consumer, n.units) for consumer in n.consumers) for n in self.watched]
        )
        state["unit_steps"] = state["unit_steps"] + used
        for name, value in (("utility", magnitude * outgoing), ("mean_activation", mean)):
            state[name] = torch.where(used, torch.lerp(value, state[name], self.decay), state[name])
        mature = used & (state["unit_steps"] > self.maturity)
        eligible = self._in_table(mature, False)
        carried = state["carried"] + self.replacement_rate * eligible.sum(dim=1)
        number = carried.floor()
        utility = state["utility"] / self._correction()
        ranks = (
            self._in_table(torch.where(mature, utility, torch.inf), torch.inf)
            .argsort(dim=1, stable=True)
            .argsort(dim=1)
        )
        chosen = eligible & (ranks < number[:, None])
        state["carried"] = carried - chosen.sum(dim=1)
        return chosen.flatten()[self._place]

    def _correction(self) -> Tensor:
        return 1 - self.decay ** self.state["unit_steps"].clamp_min(1).float()

    def before_reset(self, index: int, rows: Tensor) -> None:
        """Keep the mean of what the units gave to the next layer."""
        layer = self.watched[index]
        mean = (self.state["mean_activation"] / self._correction())[layer.rows]
        kept = torch.zeros_like(mean).index_copy(0, rows, mean[rows])
        for consumer in layer.consumers:
            keep_mean_output_(consumer, kept)

    def after_reset(self, mask: Tensor) -> None:
        """New units start from nothing."""
        for name in ("utility", "mean_activation", "unit_steps"):
            self.state[name] = self.state[name].masked_fill(mask, 0)


# regularisers


class _ParameterCallback(Callback):
    """Base of the callbacks that act on all trainable parameters."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse sharded parameters."""
        if stage == "fit":
            _refuse_sharding(trainer, pl_module, type(self).__name__)


class L2Regularization(_ParameterCallback):
    """Add ``strength * sum theta^2`` to the loss, as its gradient ``2 * strength * theta`` before the optimiser's step.

    With adaptive optimisers this is L2 regularisation, not decoupled weight decay. All parameters take part.

    Args:
        strength: at least 0.
    """

    def __init__(self, strength: float = 1e-3) -> None:
        check_range("strength", strength, 0)
        self.strength = strength

    def origin(self, parameters: list[nn.Parameter]) -> list[Tensor] | None:
        """The point that parameters are drawn to; None is zero."""
        return None

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Add the penalty's gradient."""
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not held or self.strength == 0:
            return
        gradients = [p.grad for p in held]
        torch._foreach_add_(gradients, held, alpha=2 * self.strength)
        origin = self.origin(held)
        if origin is not None:
            torch._foreach_add_(gradients, origin, alpha=-2 * self.strength)


class L2Init(L2Regularization):
    """Add ``strength * sum (theta - theta_0)^2`` to the loss, theta_0 being the parameters when the training started.

    Source: Kumar et al., Maintaining Plasticity in Continual Learning via Regenerative Regularization (2023).

    Args:
        strength: at least 0.
    """

    def __init__(self, strength: float = 1e-3) -> None:
        super().__init__(strength)
        self._initial: dict[str, Tensor] | None = None
        self._restored: dict[str, Tensor] | None = None
        self._by_parameter: dict[int, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the parameters, or take what the checkpoint remembered."""
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._restored is None:
            self._initial = {name: p.detach().clone() for name, p in parameters.items()}
        else:
            if set(self._restored) != set(parameters):
                raise ValueError("the checkpoint's L2Init remembers other parameters than this model has.")
            self._initial = {name: self._restored[name].to(p.device) for name, p in parameters.items()}
            self._restored = None
        self._by_parameter = {id(p): self._initial[name] for name, p in parameters.items()}

    def origin(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The initial parameters."""
        return [self._by_parameter[id(p)] for p in parameters]

    def state_dict(self) -> dict[str, Any]:
        """The initial parameters."""
        return {} if self._initial is None else {"initial": dict(self._initial)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the initial parameters until the training starts."""
        self._restored = state_dict.get("initial")

    def __getstate__(self) -> dict[str, Any]:
        return {**_own_state(self), "_by_parameter": {}}


class ShrinkAndPerturb(_ParameterCallback):
    """After every step ``theta <- shrink * theta + noise * theta_fresh``, with a fresh draw of the initialisation.

    Every module that can re-initialise itself takes part (``reset_parameters``); parameters that no such module has are
    shrunk only.

    Source: Ash and Adams, On Warm-Starting Neural Network Training (2020); per step as in the authors' comparison.

    Args:
        shrink: factor of the parameters, in (0, 1], close to 1.
        noise: factor of the fresh draw, at least 0.
        every_n_steps: optimiser steps between two applications.
        init: "module" or "lecun_normal".
        seed: seed of the draws, together with the step and the module.
    """

    def __init__(
        self,
        shrink: float = 0.9999,
        noise: float = 1e-4,
        every_n_steps: int = 1,
        init: Literal["module", "lecun_normal"] = "module",
        seed: int = 0,
    ) -> None:
        check_range("shrink", shrink, 0, 1, low_open=True)
        check_range("noise", noise, 0)
        check_range("every_n_steps", every_n_steps, 1)
        check_choice("init", init, INITS)
        self.shrink = shrink
        self.noise = noise
        self.every_n_steps = every_n_steps
        self.init = init
        self.seed = seed
        self.steps = 0
        self._restored: int | None = None
        self._global_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self.steps = self._restored or 0
        self._restored = None
        self._global_step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shrink and perturb after an optimiser step."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self.steps += 1
        if self.steps % self.every_n_steps:
            return
        torch._foreach_mul_([p for p in pl_module.parameters() if p.requires_grad], self.shrink)
        if self.noise == 0:
            return
        done: set[int] = set()
        targets, fresh = [], []
        for index, module in enumerate(pl_module.modules()):
            own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
            if not own or not hasattr(module, "reset_parameters"):
                continue
            drawn = fresh_layer(module, self.init, _generator(self.seed, trainer.global_step, index))
            for name, parameter in own.items():
                if id(parameter) not in done:
                    done.add(id(parameter))
                    targets.append(parameter)
                    fresh.append(drawn[name])
        if targets:
            torch._foreach_add_(targets, fresh, alpha=self.noise)

    def state_dict(self) -> dict[str, Any]:
        """The steps so far."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the steps until the training starts."""
        self._restored = state_dict.get("steps")
