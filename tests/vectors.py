"""Reader of the test vectors: inputs and right outputs of the key functions, in ``tests/vectors/<slug>.npz``."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

FOLDER = Path(__file__).parent / "vectors"


class Case(NamedTuple):
    """One case.

    Attributes:
        function: the function it is for; the case's number where the file names none.
        inputs: arguments by name; arrays are tensors, 0-d arrays python scalars, unicode arrays strings.
        outputs: right results by name, in the same form.
        number: the case's number in the file.
    """

    function: str
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    number: int

    def __repr__(self) -> str:
        return f"{self.number}-{self.function}"


def _value(array: np.ndarray) -> Any:
    if array.dtype.kind in "US":
        return array.item() if array.ndim == 0 else array.tolist()
    if array.ndim == 0:
        return array.item()
    return torch.from_numpy(np.ascontiguousarray(array))


def load_cases(slug: str, function: str | None = None) -> list[Case]:
    """Read the cases of a method, in order.

    The name of a case is ``caseN/kind``, else ``caseN/fn``, else ``caseN/in/fn``, else ``caseN/in/kind``, else N.

    Args:
        slug: the method.
        function: keep the cases of this function only.
    """
    grouped: dict[int, dict[str, Any]] = defaultdict(dict)
    with np.load(FOLDER / f"{slug}.npz", allow_pickle=False) as file:
        for key in file.files:
            case, _, rest = key.partition("/")
            grouped[int(case.removeprefix("case"))][rest] = _value(file[key])
    cases = []
    for number, values in sorted(grouped.items()):
        name_key = next((key for key in ("kind", "fn", "in/fn", "in/kind") if key in values), None)
        name = str(values.pop(name_key)) if name_key else str(number)
        inputs = {key[3:]: value for key, value in values.items() if key.startswith("in/")}
        outputs = {key[4:]: value for key, value in values.items() if key.startswith("out/")}
        cases.append(Case(name, inputs, outputs, number))
    return [case for case in cases if function in (None, case.function)]
