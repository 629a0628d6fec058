"""Reading files that others wrote, without running what is in them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["safe_unpickle"]

_BUILTINS = {
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "frozenset",
    "int",
    "list",
    "object",
    "set",
    "slice",
    "str",
    "tuple",
}
_NUMPY = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


def _permitted(module: str, name: str, allowed: Sequence[str]) -> bool:
    if "." in name:  # protocol 4 resolves dotted names attribute by attribute
        return False
    if "builtins" in allowed and (
        (module == "builtins" and name in _BUILTINS) or (module, name) == ("_codecs", "encode")
    ):
        return True
    if "numpy" in allowed and ((module, name) in _NUMPY or (module == "numpy.dtypes" and name.endswith("DType"))):
        return True
    if "scipy.sparse" in allowed and (module == "scipy.sparse" or module.startswith("scipy.sparse.")):
        return name.endswith(("_matrix", "_array"))
    return f"{module}.{name}" in allowed


def safe_unpickle(
    path: str | Path, allowed: Sequence[str] = ("builtins", "numpy", "scipy.sparse"), encoding: str = "latin1"
) -> Any:
    """Load a pickle that holds plain data only; anything that could run code is refused.

    Args:
        path: the file.
        allowed: what may occur besides None, numbers and strings: "builtins" (containers), "numpy" (arrays, scalars),
            "scipy.sparse" (matrices), and full names of further harmless classes, e.g. "collections.OrderedDict".
        encoding: of strings in pickles of Python 2; "latin1" also reads its arrays.

    Returns:
        The object.

    Raises:
        pickle.UnpicklingError: the file is no pickle, or holds something else; the message names it.
        FileNotFoundError: there is no such file.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if not _permitted(module, name, allowed):
                raise pickle.UnpicklingError(
                    f"{path} holds {module}.{name}, which is not plain data: it is not loaded."
                )
            return super().find_class(module, name)

    with Path(path).open("rb") as file:
        return Unpickler(file, encoding=encoding).load()
