"""Long-tailed training sets: class counts, which samples to keep, and samplers that rebalance. Torch only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightning_methods.core.checks import check_choice, check_range
from lightning_methods.core.random import make_generator

__all__ = [
    "ClassBalancedSampler",
    "PowerSampler",
    "ProgressivelyBalancedSampler",
    "SquareRootSampler",
    "class_counts",
    "imbalanced_class_counts",
    "long_tail_indices",
]


def imbalanced_class_counts(
    num_classes: int,
    max_count: int,
    imbalance_factor: float,
    profile: Literal["exp", "step", "balanced"] = "exp",
    rounding: Literal["floor", "round"] = "floor",
) -> list[int]:
    """Training samples of each class in a long-tailed set, the most frequent class first.

    "exp": ``n_k = max_count * f^(k / (K - 1))``. "step": the first ``K // 2`` classes have ``max_count`` samples, the
    others ``max_count * f``. "balanced": all have ``max_count``. No class is left without a sample.

    Source: Cao et al., "Learning Imbalanced Datasets with Label-Distribution-Aware Margin Loss", NeurIPS 2019; with
    "floor" the counts of the usual long-tailed CIFAR (10 847 images of CIFAR-100 at a factor of .01).

    Args:
        num_classes: K.
        max_count: samples of the most frequent class.
        imbalance_factor: f, the smallest count over the largest, in (0, 1]; an "imbalance ratio" of 100 is 0.01.
        profile: "exp", "step" or "balanced".
        rounding: "floor", or "round" to the nearest integer.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> imbalanced_class_counts(10, 100, 0.02)
        [100, 64, 41, 27, 17, 11, 7, 4, 3, 2]
    """
    check_range("num_classes", num_classes, 1)
    check_range("max_count", max_count, 1)
    check_range("imbalance_factor", imbalance_factor, 0, 1, low_open=True)
    check_choice("profile", profile, ("exp", "step", "balanced"))
    check_choice("rounding", rounding, ("floor", "round"))
    k = num_classes
    if k == 1 or profile == "balanced":
        sizes = [float(max_count)] * k
    elif profile == "exp":
        sizes = [max_count * imbalance_factor ** (rank / (k - 1.0)) for rank in range(k)]
    else:
        sizes = [float(max_count)] * (k // 2) + [max_count * imbalance_factor] * (k - k // 2)
    to_int = int if rounding == "floor" else round
    return [max(to_int(size), 1) for size in sizes]


def class_counts(targets: Tensor, num_classes: int) -> Tensor:
    """Samples of each class, int64 [num_classes]; unknown labels (negative) are not counted.

    Raises:
        ValueError: a target is not below ``num_classes``.
    """
    targets = torch.as_tensor(targets)
    if targets.numel() and int(targets.max()) >= num_classes:
        raise ValueError(f"targets must be below num_classes={num_classes}, got {int(targets.max())}.")
    return torch.bincount(targets[targets >= 0], minlength=num_classes)


def long_tail_indices(
    targets: Tensor,
    class_counts: Sequence[int] | Tensor,
    seed: int | None = None,
    class_order: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Rows of a set that make it long-tailed: of each class the first ``n_k``, class after class.

    Args:
        targets: class indices int64 [N]; negative ones are never chosen.
        class_counts: n_k, how many samples of each class, [K].
        seed: None takes the first samples of each class in the set's order, as the papers do; a number takes them in
            a random order by this seed.
        class_order: the rank of each class, a permutation of 0 .. K-1: class k gets ``class_counts[class_order[k]]``
            samples. None: class k has rank k.

    Returns:
        Rows, int64 [sum of n_k].

    Raises:
        ValueError: a class has fewer samples than asked for, or ``class_order`` is no permutation.

    Example:
        >>> long_tail_indices(torch.tensor([1, 0, 0, 1, 1, 0]), [2, 1])
        tensor([1, 2, 0])
    """
    targets = torch.as_tensor(targets).long()
    wanted = torch.as_tensor(class_counts).long()
    k = len(wanted)
    if class_order is not None:
        ranks = torch.as_tensor(class_order).long()
        if not torch.equal(ranks.sort().values, torch.arange(k)):
            raise ValueError(f"class_order must be a permutation of 0..{k - 1}, got {ranks.tolist()}.")
        wanted = wanted[ranks]
    if (wanted < 0).any():
        raise ValueError(f"class_counts must not be negative, got {wanted.tolist()}.")
    rows = (targets >= 0).nonzero().flatten()
    if rows.numel() and int(targets.max()) >= k:
        raise ValueError(f"targets must be below the {k} classes of class_counts, got {int(targets.max())}.")
    if seed is not None:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    rows = rows[torch.argsort(targets[rows], stable=True)]
    there = torch.bincount(targets[rows], minlength=k)
    if (there < wanted).any():
        short = int((there < wanted).nonzero()[0])
        raise ValueError(f"{wanted[short]} samples of class {short} were asked, but there are {there[short]}.")
    position = torch.arange(len(rows)) - (there.cumsum(0) - there)[targets[rows]]
    return rows[position < wanted[targets[rows]]]


class PowerSampler(Sampler[int]):
    """Draws a class with probability proportional to ``n_k^power``, then a sample of it, with replacement.

    A sample of class y so has the weight ``n_y^(power - 1)``: 1 is instance-balanced, 1/2 square-root, 0
    class-balanced. What is drawn depends on the seed and the epoch only. In several processes every rank draws the same
    list and takes its share: every ``world_size``-th, from ``rank`` on. Leave rank and world size alone where Lightning
    wraps the sampler.

    Source: Kang et al., "Decoupling Representation and Classifier for Long-Tailed Recognition", ICLR 2020.

    Args:
        targets: class indices [N]; samples without a label (negative) are never drawn.
        power: exponent of the class sizes.
        num_samples: draws per epoch over all ranks; None for N. Rounded up to a multiple of ``world_size``.
        seed: seed of the draws.
        rank: index of this process.
        world_size: number of processes.

    Raises:
        ValueError: there is no labeled sample, or a number is out of range.
    """

    def __init__(
        self,
        targets: Tensor | Sequence[int],
        power: float = 1.0,
        num_samples: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        targets = torch.as_tensor(targets)
        if targets.dim() != 1 or targets.is_floating_point():
            raise ValueError(f"targets must be class indices [N], got {targets.dtype} {list(targets.shape)}.")
        known = (targets >= 0).nonzero().flatten()
        if not len(known):
            raise ValueError("targets must have at least one label.")
        check_range("power", power)
        check_range("world_size", world_size, 1)
        check_range("rank", rank, 0, world_size - 1)
        if num_samples is not None:
            check_range("num_samples", num_samples, 1)
        self.power = power
        self.num_samples = len(targets) if num_samples is None else num_samples
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        _, stratum = targets[known].unique(return_inverse=True)
        self._rows = known[torch.argsort(stratum, stable=True)]
        self._sizes = torch.bincount(stratum)
        self._starts = self._sizes.cumsum(0) - self._sizes

    def set_epoch(self, epoch: int) -> None:
        """Fix the epoch of the next pass."""
        self.epoch = epoch

    def _balanced(self, power: float) -> Tensor:
        weights = self._sizes.double().pow(power)
        return weights / weights.sum()

    def class_probabilities(self) -> Tensor:
        """Probability of each class that is present, in the order of the labels, float64."""
        return self._balanced(self.power)

    def __len__(self) -> int:
        return math.ceil(self.num_samples / self.world_size)

    def __iter__(self) -> Iterator[int]:
        generator = make_generator(self.seed, "class sampler", self.epoch)
        n = len(self) * self.world_size
        drawn = torch.multinomial(self.class_probabilities(), n, replacement=True, generator=generator)
        within = (torch.rand(n, generator=generator, dtype=torch.float64) * self._sizes[drawn]).long()
        rows = self._rows[self._starts[drawn] + within.minimum(self._sizes[drawn] - 1)]
        return iter(rows[self.rank :: self.world_size].tolist())


class ClassBalancedSampler(PowerSampler):
    """Draws a class uniformly among those that are present, then a sample of it; see :class:`PowerSampler`.

    Args:
        targets: class indices [N].
        num_samples: draws per epoch; None for N.
        seed: seed of the draws.
        rank: index of this process.
        world_size: number of processes.

    Example:
        >>> sampler = ClassBalancedSampler([0] * 990 + [1] * 10)
        >>> rows = torch.tensor(list(sampler))
        >>> 400 < (rows >= 990).sum() < 600
        tensor(True)
    """

    def __init__(
        self,
        targets: Tensor | Sequence[int],
        num_samples: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(targets, 0.0, num_samples, seed, rank, world_size)


class SquareRootSampler(PowerSampler):
    """Draws classes in proportion to the root of their size; see :class:`PowerSampler`.

    Args:
        targets: class indices [N].
        num_samples: draws per epoch; None for N.
        seed: seed of the draws.
        rank: index of this process.
        world_size: number of processes.
    """

    def __init__(
        self,
        targets: Tensor | Sequence[int],
        num_samples: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(targets, 0.5, num_samples, seed, rank, world_size)


class ProgressivelyBalancedSampler(PowerSampler):
    """From instance-balanced to class-balanced: class probabilities ``(1 - t/T) q_1 + (t/T) q_0`` in epoch t.

    Args:
        targets: class indices [N].
        num_epochs: T; from then on it is class-balanced.
        **kwargs: ``num_samples``, ``seed``, ``rank``, ``world_size`` of :class:`PowerSampler`.
    """

    def __init__(self, targets: Tensor | Sequence[int], num_epochs: int, **kwargs: Any) -> None:
        super().__init__(targets, **kwargs)
        check_range("num_epochs", num_epochs, 1)
        self.num_epochs = num_epochs

    def class_probabilities(self) -> Tensor:
        """Probability of each class that is present in this epoch."""
        share = min(self.epoch / self.num_epochs, 1.0)
        return (1 - share) * self._balanced(1.0) + share * self._balanced(0.0)
