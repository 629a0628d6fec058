"""Callbacks that keep a network plastic, for any LightningModule: Self-Normalized Resets, beside it its competitors.

All of them act from outside: forward hooks (installed when the training starts, removed when it ends) watch the units,
and parameters change after the optimiser's step. What they remember is in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.checks import check_choice, check_range
from .competitors import ContinualBackprop, L2Init, L2Regularization, ReDo, ShrinkAndPerturb
from .functional import add_observation_, empirical_tail, geometric_tail, update_ages, update_thresholds
from .units import PlasticityMonitor, UnitResetCallback

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
