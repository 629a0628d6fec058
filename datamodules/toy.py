"""Generated problems that are a paper's own setting."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_methods.core.batches import GroupBatch
from lightning_methods.core.checks import check_choice, check_range

from .base import ArrayDataset, BaseDataModule

__all__ = ["SensitiveToyDataModule", "ToyDependenceDataModule"]


class _GeneratedTable(BaseDataModule):
    """Rows drawn once by ``seed``: training, validation, test; inputs standardised by the training rows."""

    def __init__(
        self, n: int, n_val: int, n_test: int, standardize: bool, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        for name, value in (("n", n), ("n_val", n_val), ("n_test", n_test)):
            check_range(name, value, 2)
        self.counts = {"train": n, "val": n_val, "test": n_test}
        self.standardize = standardize
        self._drawn: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Inputs [n, p], targets [n] and extras of ``n`` rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement draw.")

    def load_split(self, split: str) -> ArrayDataset:
        """A part of the rows."""
        if self._drawn is None:
            generator = torch.Generator().manual_seed(self.seed)
            self._drawn = self.draw(sum(self.counts.values()), generator)
        x, y, extras = self._drawn
        names = list(self.counts)
        start = sum(self.counts[name] for name in names[: names.index(split)])
        rows = slice(start, start + self.counts[split])
        dataset = ArrayDataset(x[rows], y[rows], num_classes=0, extras={k: v[rows] for k, v in extras.items()})
        return dataset.replace(batch_type=GroupBatch) if extras else dataset

    def fit_transforms(self, train: ArrayDataset) -> None:
        """Standardise all parts with the mean and deviation of the training rows."""
        if not self.standardize:
            return
        rows = train.source[train.indices]
        mean, std = rows.mean(dim=0), rows.std(dim=0)
        self._parts = {
            name: part.replace(source=(part.source - mean) / torch.where(std > 0, std, 1))
            for name, part in self._parts.items()
        }


class ToyDependenceDataModule(_GeneratedTable):
    """Regression on a few of many variables: which ones does the target depend on?

    The kinds, with standard normal x and noise e of deviation ``noise``:

    * "sin3": y = sin x1 + sin x2 + sin x3 + e;
    * "product": y = x1 x2 + sin(x1 x3) + e;
    * "xor": y = sign(x1) sign(x2) |x3| + e, where x1 or x2 alone says nothing;
    * "sines": y = sin u + e with a hidden u ~ N(0, 9), and the 240 variables a sin(b u + c) + e_abc for a in 2 values
      in [.1, 2], b in 15 in [.1, 2], c in 4 in [-1, 1].

    Batches are ``(x, y)``, float32 [B, p] and [B]; by default all rows at once. Inputs are standardised.

    Args:
        kind: the problem.
        n: training rows.
        p: number of variables, at least 3; None is 10. "sines" has 240.
        noise: deviation of the noise; None is 0.05, and 0.1 for "sines".
        n_val: validation rows.
        n_test: test rows.
        standardize: scale the inputs to mean 0 and variance 1 with the statistics of the training rows.
        **kwargs: arguments of :class:`BaseDataModule`; ``seed`` draws the data, ``batch_size`` is None by default.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        kind: Literal["sin3", "product", "xor", "sines"] = "sin3",
        n: int = 1000,
        p: int | None = None,
        noise: float | None = None,
        n_val: int = 300,
        n_test: int = 400,
        standardize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(n, n_val, n_test, standardize, **kwargs)
        check_choice("kind", kind, ("sin3", "product", "xor", "sines"))
        if kind == "sines" and p not in (None, 240):
            raise ValueError(f"kind='sines' has 240 variables, got p={p}.")
        if p is not None:
            check_range("p", p, 3)
        if noise is not None:
            check_range("noise", noise, 0)
        self.kind = kind
        self.p = (240 if kind == "sines" else 10) if p is None else p
        self.noise = (0.1 if kind == "sines" else 0.05) if noise is None else noise

    @property
    def num_features(self) -> int:
        """Number of variables p."""
        return self.p

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Draw the variables, then the noise."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        if self.kind == "sines":
            u = 3 * normal(n, 1)
            grid = torch.cartesian_prod(torch.linspace(0.1, 2, 4), torch.linspace(0.1, 2, 15), torch.linspace(-1, 1, 4))
            a, b, c = grid.T
            x = a * torch.sin(b * u + c) + self.noise * normal(n, 240)
            return x, u[:, 0].sin() + self.noise * normal(n), {}
        x = normal(n, self.p)
        x1, x2, x3 = x[:, 0], x[:, 1], x[:, 2]
        y = {
            "sin3": x1.sin() + x2.sin() + x3.sin(),
            "product": x1 * x2 + torch.sin(x1 * x3),
            "xor": x1.sign() * x2.sign() * x3.abs(),
        }[self.kind]
        return x, y + self.noise * normal(n), {}


class SensitiveToyDataModule(_GeneratedTable):
    """Regression with a sensitive attribute that two variables repeat.

    S ~ Bernoulli(1/2), x1 and x4 .. xp standard normal, x2 = S + proxy_noise * N, x3 = S + proxy_noise * N, and
    y = 1.5 S + sin(1.5 x1) + noise * N. Only x1 says something about y that S does not.

    Batches are :class:`~lightning_methods.core.GroupBatch` with S as the group, int64 [B]; by default all rows at once.
    Inputs are standardised.

    Args:
        n: training rows.
        p: number of variables, at least 3.
        noise: deviation of the target's noise.
        proxy_noise: deviation of the proxies' noise.
        n_val: validation rows.
        n_test: test rows.
        standardize: scale the inputs to mean 0 and variance 1 with the statistics of the training rows.
        **kwargs: arguments of :class:`BaseDataModule`; ``seed`` draws the data, ``batch_size`` is None by default.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        n: int = 300,
        p: int = 6,
        noise: float = 0.1,
        proxy_noise: float = 0.3,
        n_val: int = 300,
        n_test: int = 300,
        standardize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(n, n_val, n_test, standardize, **kwargs)
        check_range("p", p, 3)
        check_range("noise", noise, 0)
        check_range("proxy_noise", proxy_noise, 0)
        self.p = p
        self.noise = noise
        self.proxy_noise = proxy_noise

    @property
    def num_features(self) -> int:
        """Number of variables p."""
        return self.p

    def draw(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Draw the attribute, the variables, then the noise."""
        s = torch.randint(0, 2, (n,), generator=generator)
        x = torch.randn(n, self.p, generator=generator)
        x[:, 1:3] = s[:, None] + self.proxy_noise * x[:, 1:3]
        y = 1.5 * s + torch.sin(1.5 * x[:, 0]) + self.noise * torch.randn(n, generator=generator)
        return x, y, {"group": s}
