"""What a claim expects: an inequality between runs, read without running code, and its verdict over paired seeds."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ClaimError", "Expression", "Verdict", "t_interval", "unknown", "verdict"]


class ClaimError(ValueError):
    """A claim file, or what was asked of a claim, is wrong; the message says where and what was expected."""


def unknown(what: str, name: Any, names: Any) -> ClaimError:
    """The error for a name that is not among the known ones: it shows the nearest and all of them."""
    from ..core.checks import nearest  # torch is only needed once something is wrong

    known = sorted(map(str, names))
    return ClaimError(f"unknown {what} {str(name)!r}.{nearest(name, known)} Known: {', '.join(known) or 'none'}.")


# `run:metric`: metrics have slashes of their own, so a division by or of a metric has spaces around its slash.
_REFERENCE = re.compile(r"\b([A-Za-z_]\w*):([\w@%.]+(?:/[\w@%.]+)*)")
_ARITHMETIC: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "max": max, "min": min}
_COMPARISONS: dict[type, tuple[str, Callable[[float, float], bool]]] = {
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
}


class Expression:
    """One inequality between runs, for example ``gift - kl > 0.10`` or ``cdc:test/ece <= 0.7 * fixed:test/ece``.

    It is brought to the form *difference (comparison) margin*: the terms that name runs are on the left, the constant
    terms on the right. A name stands for the run's value of the default metric, ``run:metric`` for that of another one.
    Known are ``+ - * / **``, parentheses, ``abs``, ``min`` and ``max``, and exactly one of ``> >= < <=``.

    >>> rule = Expression("gift - 0.1 > kl", metric="test/acc")
    >>> rule.margin, rule.comparison, sorted(rule.references)
    (0.1, '>', [('gift', 'test/acc'), ('kl', 'test/acc')])
    >>> round(rule.difference({("gift", "test/acc"): 0.74, ("kl", "test/acc"): 0.56}), 2)
    0.18

    Args:
        text: the inequality.
        metric: what a run's name alone stands for; None if every name has its metric.

    Raises:
        ClaimError: the text is not such an inequality.
    """

    def __init__(self, text: str, metric: str | None = None) -> None:
        self.text = text
        self._names: dict[str, tuple[str, str]] = {}
        tree = self._parse(text)
        self.comparison, self._compare = _COMPARISONS[type(tree.ops[0])]
        self._metric = metric
        for node in (tree.left, tree.comparators[0]):
            self._check(node)
        if not self._names:
            raise ClaimError(f"the expectation {text!r} names no run.")
        terms = [*self._terms(tree.left, 1), *self._terms(tree.comparators[0], -1)]
        self._difference = [(sign, node) for sign, node in terms if self._has_run(node)]
        constant = sum(sign * self._value(node, {}) for sign, node in terms if not self._has_run(node))
        self.margin = -constant if constant else 0.0

    def _parse(self, text: str) -> ast.Compare:
        def placeholder(match: re.Match[str]) -> str:
            name = f"_reference_{len(self._names)}"
            self._names[name] = (match[1], match[2])
            return name

        try:
            tree = ast.parse(_REFERENCE.sub(placeholder, text).strip(), mode="eval").body
        except SyntaxError as error:
            raise ClaimError(f"the expectation {text!r} cannot be read: {error.msg}.") from None
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _COMPARISONS:
            raise ClaimError(f"the expectation {text!r} must have exactly one comparison out of > >= < <=.")
        return tree

    def _check(self, node: ast.AST) -> None:
        """Let arithmetic on runs and numbers through, and nothing else."""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            operands: list[ast.expr] = []
        elif isinstance(node, ast.Name):
            self._name(node.id)
            operands = []
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            operands = [node.left, node.right]
        elif isinstance(node, ast.UnaryOp) and type(node.op) in _ARITHMETIC:
            operands = [node.operand]
        elif self._is_function(node):
            operands = node.args
        else:
            raise ClaimError(
                f"the expectation {self.text!r} has {ast.unparse(node)!r}, which is not arithmetic: known are names of "
                "runs, run:metric, numbers, + - * / **, parentheses, abs, min and max."
            )
        for operand in operands:
            self._check(operand)

    def _name(self, name: str) -> None:
        if name in self._names:
            return
        if self._metric is None:
            raise ClaimError(f"in {self.text!r} the run {name} has no metric: write {name}:test/acc.")
        self._names[name] = (name, self._metric)

    @staticmethod
    def _is_function(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
            return False
        return node.func.id in _FUNCTIONS and (len(node.args) == 1) == (node.func.id == "abs") and bool(node.args)

    def _terms(self, node: ast.AST, sign: int) -> Iterator[tuple[int, ast.AST]]:
        """Split a sum into its signed terms."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            yield from self._terms(node.left, sign)
            yield from self._terms(node.right, sign if isinstance(node.op, ast.Add) else -sign)
        elif isinstance(node, ast.UnaryOp):
            yield from self._terms(node.operand, sign if isinstance(node.op, ast.UAdd) else -sign)
        else:
            yield sign, node

    def _has_run(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self._names for part in ast.walk(node))

    def _value(self, node: ast.AST, values: dict[tuple[str, str], float]) -> float:
        if isinstance(node, ast.Constant):
            return float(node.value)
        if isinstance(node, ast.Name):
            return values[self._names[node.id]]
        if isinstance(node, ast.Call):
            return _FUNCTIONS[node.func.id](*(self._value(argument, values) for argument in node.args))
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        try:
            return _ARITHMETIC[type(node.op)](*(self._value(operand, values) for operand in operands))
        except (ZeroDivisionError, OverflowError):
            return math.nan

    @property
    def references(self) -> set[tuple[str, str]]:
        """The (run, metric) pairs that it speaks of."""
        return set(self._names.values())

    def difference(self, values: dict[tuple[str, str], float]) -> float:
        """The left side once the constants have gone to the right, for one seed's value of every (run, metric)."""
        return sum((sign * self._value(node, values) for sign, node in self._difference), 0.0)

    def clears(self, value: float) -> bool:
        """Whether a number is on the right side of the margin; NaN never is."""
        return self._compare(value, self.margin)


@dataclass
class Verdict:
    """How an expectation came out.

    Attributes:
        expression: the inequality as written.
        metric: the metric or metrics that it looks at.
        values: the difference for every seed.
        mean: their mean.
        low: lower end of the 95 % t interval of the mean; NaN with fewer than two seeds.
        high: upper end.
        margin: what the difference is compared to.
        holds: whether the whole interval (with ``every_seed``: every single seed) clears the margin.
        every_seed: which of the two rules it is.
    """

    expression: str
    metric: str
    values: list[float]
    mean: float
    low: float
    high: float
    margin: float
    holds: bool
    every_seed: bool = False


def t_interval(values: list[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean of a sample with its t interval.

    >>> [round(x, 3) for x in t_interval([0.1, 0.2, 0.3])]
    [0.2, -0.048, 0.448]

    Returns:
        mean, low, high; the ends are NaN with fewer than two values.
    """
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    from scipy.stats import t  # takes a second to import

    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = float(t.ppf((1 + level) / 2, n - 1)) * error
    return mean, mean - half, mean + half


def verdict(expression: Expression, values: list[dict[tuple[str, str], float]], every_seed: bool = False) -> Verdict:
    """Pair the seeds and judge.

    Args:
        expression: the inequality.
        values: for every seed, the value of every (run, metric) that the inequality refers to.
        every_seed: ask it of every seed instead of the mean's interval.
    """
    differences = [expression.difference(seed) for seed in values]
    mean, low, high = t_interval(differences)
    judged = differences if every_seed else [low, high]
    metrics = sorted({metric for _, metric in expression.references})
    return Verdict(
        expression=expression.text,
        metric=", ".join(metrics),
        values=differences,
        mean=mean,
        low=low,
        high=high,
        margin=expression.margin,
        holds=bool(judged) and all(map(expression.clears, judged)),
        every_seed=every_seed,
    )
