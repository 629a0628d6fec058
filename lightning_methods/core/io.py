"""Reading files that others wrote, without running what is in them; writing files whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["cached_tensors", "read_jsonl", "safe_unpickle", "write_jsonl"]

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


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    """A draft beside ``path`` that takes its place when the block ends well, so that no part of a file is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        umask = os.umask(0)  # mkstemp's files are for their owner alone; give the usual permissions
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_jsonl(path: str | Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a file of JSON lines: one object a line; empty lines are skipped.

    Args:
        path: the file, UTF-8.
        required: keys that every object must have.

    Returns:
        The objects, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object or lacks a key; the message names file, line and key.
    """
    rows = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}.")
            missing = [key for key in required if key not in row]
            if missing:
                raise ValueError(f"{path}, line {number}: {', '.join(missing)} missing; found {', '.join(row)}.")
            rows.append(row)
    return rows


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, whole or not at all: a failure or a kill leaves the file as it was.

    Args:
        path: the file; its folder is made.
        rows: the objects, one a line.
    """
    with _written_whole(Path(path)) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def cached_tensors(path: str | Path, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors from a safetensors file, computed and saved if it is not there.

    The name of the file has to say what the tensors depend on (a digest of the inputs): an existing file is trusted.
    Several processes may ask at once; each then computes, and the last one's whole file stays.

    Args:
        path: the file; its folder is made.
        compute: gives the tensors by name.

    Returns:
        The tensors on the CPU.
    """
    from safetensors.torch import load_file, save_file

    path = Path(path)
    if not path.is_file():
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in compute().items()}
        with _written_whole(path) as draft:
            save_file(tensors, draft)
    return load_file(path)
