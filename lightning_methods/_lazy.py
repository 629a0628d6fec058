"""Lazy packages: public names are listed once, under ``TYPE_CHECKING``, and imported on first use (PEP 562)."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def exports(file: str) -> dict[str, tuple[str, str]]:
    """Read the names that a package's ``if TYPE_CHECKING:`` block imports.

    Args:
        file: path of the ``__init__.py``.

    Returns:
        ``{public name: (module, name in that module)}``; the module relative to the package (with its leading dots).
    """
    names = {}
    for block in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for node in block.body:
                module = "." * node.level + (node.module or "")
                names.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
    return names


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` for a package from its ``TYPE_CHECKING`` imports.

    Args:
        package: the package's ``__name__``.
        file: the package's ``__file__``.
    """
    table = exports(file)

    def load(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = table[name]
        home = importlib.import_module(module, package)
        if module.strip(".") == "":  # `from . import part`
            value = importlib.import_module(f"{module}{original}", package)
        else:
            value = getattr(home, original)
        # Kept in the package, so that the second look-up is a plain attribute.
        importlib.import_module(package).__dict__[name] = value
        return value

    return load, lambda: sorted(table), sorted(table)
