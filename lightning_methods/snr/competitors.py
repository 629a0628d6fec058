"""What the method is compared with: other resets on the same base, and callbacks that act on all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ..core import distributed
from ..core.checks import check_choice, check_range
from ..core.random import make_generator
from .functional import INITS, fresh_layer, keep_mean_output_, normalized_scores, outgoing_magnitude
from .units import UnitResetCallback, own_state, refuse_sharding

__all__ = ["ContinualBackprop", "L2Init", "L2Regularization", "ReDo", "ShrinkAndPerturb"]


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


class _ParameterCallback(Callback):
    """Base of the callbacks that act on all trainable parameters."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse sharded parameters."""
        if stage == "fit":
            refuse_sharding(trainer, pl_module, type(self).__name__)


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
        self._names: dict[int, str] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the parameters, or take what the checkpoint remembered."""
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._restored is None:
            self._initial = {name: p.detach().clone() for name, p in parameters.items()}
        else:
            known = dict(pl_module.named_parameters())
            if not set(parameters) <= set(self._restored) <= set(known):
                raise ValueError("the checkpoint's L2Init remembers other parameters than this model has.")
            self._initial = {name: value.to(known[name].device) for name, value in self._restored.items()}
            self._restored = None
        self._names = {id(p): name for name, p in pl_module.named_parameters()}

    def origin(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The initial parameters; what was frozen so far is remembered before its first step."""
        names = [self._names[id(p)] for p in parameters]
        for name, parameter in zip(names, parameters, strict=True):
            if name not in self._initial:
                self._initial[name] = parameter.detach().clone()
        return [self._initial[name] for name in names]

    def state_dict(self) -> dict[str, Any]:
        """The initial parameters."""
        return {} if self._initial is None else {"initial": dict(self._initial)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the initial parameters until the training starts."""
        self._restored = state_dict.get("initial")

    def __getstate__(self) -> dict[str, Any]:
        return {**own_state(self), "_names": {}}


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
            drawn = fresh_layer(module, self.init, make_generator(self.seed, trainer.global_step, index))
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
