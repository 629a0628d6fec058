"""Tables of outcomes: which model answered which question rightly. Readers, and a generator with known truth."""

from __future__ import annotations

import csv
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.checks import check_range, check_shape

__all__ = ["Outcomes", "read_model_embeddings", "read_outcomes", "read_question_embeddings", "synthetic_outcomes"]


@dataclass
class Outcomes:
    """Outcomes of M models on N questions.

    Attributes:
        model_names: [M].
        questions: the texts; empty where they are not known. [N]
        question_keys: what the source calls the questions, e.g. their ``prompt_id``. [N]
        correct: 1 where the model was right, int8 [M, N]; 0 where it is not observed.
        observed: which outcomes are known, bool [M, N].
        split: 0 train, 1 validation, 2 test, int64 [N]; None where the source has no split.
        benchmark_names: [K].
        benchmark: which benchmark a question is from, int64 [N] in 0..K-1; None where the source does not say.
        embeddings: of the questions, float [N, D]; None before they are computed.
        probability: the true probability of being right, float [M, N], where the data are generated.
        communities: members of known communities of models, bool [M] by name.
    """

    model_names: list[str]
    questions: list[str]
    question_keys: list[str]
    correct: Tensor
    observed: Tensor
    split: Tensor | None = None
    benchmark_names: list[str] = field(default_factory=list)
    benchmark: Tensor | None = None
    embeddings: Tensor | None = None
    probability: Tensor | None = None
    communities: dict[str, Tensor] = field(default_factory=dict)

    def accuracy(self, rows: Tensor) -> Tensor:
        """Every model's mean accuracy over these questions that it was observed on, float64 [M]; NaN without any."""
        observed = self.observed[:, rows].double()
        return (self.correct[:, rows] * observed).sum(dim=1) / observed.sum(dim=1)


# files


_ALIASES = {
    "question": ("prompt_id", "question_id"),
    "text": ("prompt", "question"),
    "model": ("model_id",),
    "name": ("model_name", "model"),
    "label": ("label", "correct"),
    "benchmark": ("category", "benchmark"),
    "split": ("split",),
}
_SPLITS = {"train": 0, "val": 1, "validation": 1, "dev": 1, "test": 2}


def _columns(header: Sequence[str], path: Path) -> dict[str, int]:
    """Position of every column that is known."""
    names = [name.strip().lstrip("\ufeff").lower() for name in header]
    found = {}
    for role, aliases in _ALIASES.items():
        match = next((alias for alias in aliases if alias in names), None)
        if match is not None:
            found[role] = names.index(match)
    missing = []
    if "question" not in found and "text" not in found:
        missing.append("prompt_id or prompt")
    if "model" not in found and "name" not in found:
        missing.append("model_id or model_name")
    if "label" not in found:
        missing.append("label")
    if missing:
        raise ValueError(f"{path}: the columns {', '.join(missing)} are missing; found {', '.join(names)}.")
    return found


def _sort_key(key: str) -> tuple[int, float, str]:
    """Numbers in their order, then words in theirs."""
    try:
        return 0, float(key), key
    except ValueError:
        return 1, 0.0, key


def _label(text: str, path: Path, line: int) -> int:
    if text in ("0", "1"):
        return int(text)
    try:
        value = float(text)
    except ValueError:
        value = {"true": 1.0, "false": 0.0}.get(text.strip().lower(), math.nan)
    if value not in (0.0, 1.0):
        raise ValueError(f"{path}, line {line}: label must be 0 or 1, got {text!r}.")
    return int(value)


class _Numbers(dict):
    """A number for every new key, in order of appearance."""

    def __missing__(self, key: str) -> int:
        self[key] = len(self)
        return self[key]


def read_outcomes(
    files: str | Path | Sequence[str | Path] | dict[str, str | Path], question_order: str | Path | None = None
) -> Outcomes:
    """Read csv files with one row per pair of a model and a question.

    Columns: ``label`` (0/1), ``prompt_id`` or ``prompt`` (both where there are both), ``model_id`` or ``model_name``,
    and where they exist ``category`` (the benchmark) and ``split`` (train, val, test). Other columns do not matter. A
    pair that occurs more than once is right if it was right once. Models are numbered by their sorted ids over the
    training part (over everything without one); rows of other models are left out, with a warning.

    Args:
        files: one or several files, or files by split: ``{"train": ..., "val": ..., "test": ...}``.
        question_order: a file with the column ``prompt`` whose row number is the ``prompt_id``, for texts that the
            other files lack.

    Returns:
        The outcomes, with questions in order of appearance.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: columns are missing, a label is neither 0 nor 1, or a file is empty.
    """
    if isinstance(files, dict):
        given = [(Path(path), _SPLITS[name]) for name, path in files.items()]
    else:
        given = [(Path(path), None) for path in ([files] if isinstance(files, (str, Path)) else files)]
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # questions may be longer than csv's limit
    questions, models, benchmarks = _Numbers(), _Numbers(), _Numbers()
    texts: list[str] = []
    names: dict[int, str] = {}
    benchmark_of, split_of = array("q"), array("q")
    rows, columns, labels, parts = array("q"), array("q"), array("b"), array("b")
    for path, file_split in given:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise ValueError(f"{path} is empty.")
            at = _columns(header, path)
            key_at = at.get("question", at.get("text"))
            model_at = at.get("model", at.get("name"))
            for row in reader:
                if not row:
                    continue
                question = questions[row[key_at]]
                split = file_split
                if split is None and "split" in at:
                    split = _SPLITS.get(row[at["split"]].strip().lower())
                    if split is None:
                        raise ValueError(
                            f"{path}, line {reader.line_num}: split must be train, val or test, "
                            f"got {row[at['split']]!r}."
                        )
                if question == len(texts):
                    texts.append(row[at["text"]] if "text" in at else "")
                    benchmark_of.append(benchmarks[row[at["benchmark"]]] if "benchmark" in at else -1)
                    split_of.append(-1 if split is None else split)
                model = models[row[model_at]]
                if model not in names:
                    names[model] = row[at["name"]] if "name" in at else f"model {row[model_at]}"
                rows.append(model)
                columns.append(question)
                labels.append(_label(row[at["label"]], path, reader.line_num))
                parts.append(split_of[question])
    if not rows:
        raise ValueError(f"{', '.join(str(path) for path, _ in given)}: there are no rows.")
    if question_order is not None:
        _fill_texts(texts, list(questions), Path(question_order))
    return _assemble(questions, texts, models, names, benchmarks, benchmark_of, split_of, rows, columns, labels, parts)


def _fill_texts(texts: list[str], keys: list[str], path: Path) -> None:
    """Texts that are missing, from a file in the order of the questions' ids."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        at = _position_of_text(next(reader, []), path)
        order = [row[at] for row in reader if row]
    for position, key in enumerate(keys):
        if not texts[position] and key.isdigit() and int(key) < len(order):
            texts[position] = order[int(key)]


def _position_of_text(header: Sequence[str], path: Path) -> int:
    names = [name.strip().lower() for name in header]
    if "prompt" not in names:
        raise ValueError(f"{path}: the column prompt is missing; found {', '.join(names)}.")
    return names.index("prompt")


def _assemble(
    questions: dict[str, int],
    texts: list[str],
    models: dict[str, int],
    names: dict[int, str],
    benchmarks: dict[str, int],
    benchmark_of: array,
    split_of: array,
    rows: array,
    columns: array,
    labels: array,
    parts: array,
) -> Outcomes:
    """The table from its pairs."""
    model, question = torch.tensor(rows), torch.tensor(columns)
    label, part = torch.tensor(labels, dtype=torch.int8), torch.tensor(parts)
    has_split = len(split_of) > 0 and min(split_of) >= 0
    trained = model[part == 0].unique() if has_split else torch.arange(len(models))
    known = set(trained.tolist())
    order = sorted((key for key, number in models.items() if number in known), key=_sort_key)
    if len(order) < len(models):
        import warnings

        left_out = [names[number] for number in models.values() if number not in known]
        warnings.warn(f"models without a training row are left out: {', '.join(left_out)}.", stacklevel=3)
    new = torch.full((len(models),), -1)
    new[torch.tensor([models[key] for key in order], dtype=torch.int64)] = torch.arange(len(order))
    kept = new[model] >= 0
    position = new[model[kept]], question[kept]
    shape = (len(order), len(questions))
    right = torch.zeros(shape, dtype=torch.int32).index_put(position, label[kept].int(), accumulate=True)
    observed = torch.zeros(shape, dtype=torch.bool)
    observed[position] = True
    has_benchmark = len(benchmark_of) > 0 and min(benchmark_of) >= 0
    return Outcomes(
        model_names=[names[models[key]] for key in order],
        questions=texts if all(texts) else [],
        question_keys=list(questions),
        correct=(right > 0).to(torch.int8),
        observed=observed,
        split=torch.tensor(split_of) if has_split else None,
        benchmark_names=list(benchmarks) if has_benchmark else [],
        benchmark=torch.tensor(benchmark_of) if has_benchmark else None,
    )


def _only_tensor(value: Any, path: Path) -> Tensor:
    """The tensor in what a file holds: itself, or the only one in a dictionary."""
    if isinstance(value, dict):
        tensors = [item for item in value.values() if isinstance(item, Tensor)]
        value = tensors[0] if len(tensors) == 1 else value
    if not isinstance(value, Tensor) or value.dim() != 2:
        raise ValueError(f"{path} must hold one matrix, got {type(value).__name__}.")
    return value.detach().float()


def read_question_embeddings(path: str | Path, question_keys: Sequence[str] | None = None) -> Tensor:
    """Read the published ``question_embeddings.pth``: row i belongs to the question with ``prompt_id`` i.

    Args:
        path: the file; nothing in it is run.
        question_keys: ``prompt_id`` of the wanted questions; None for all rows in order.

    Returns:
        float32 [N, D].

    Raises:
        ValueError: not one matrix, or a question is not a row of it.
    """
    path = Path(path)
    table = _only_tensor(torch.load(path, map_location="cpu", weights_only=True), path)
    if question_keys is None:
        return table
    wrong = next((key for key in question_keys if not key.isdigit() or int(key) >= len(table)), None)
    if wrong is not None:
        raise ValueError(f"{path} has {len(table)} rows; there is none for the question {wrong!r}.")
    return table[torch.tensor([int(key) for key in question_keys], dtype=torch.int64)]


def read_model_embeddings(path: str | Path) -> Tensor:
    """Read published model embeddings (``optimal_mf_model_embeddings.pth``): row i is the model with the i-th id.

    Args:
        path: a file with one matrix, alone or in a dictionary, or a whole set of weights of the authors' code; nothing
            in it is run.

    Returns:
        float32 [M, d].

    Raises:
        ValueError: there is no such matrix.
    """
    path = Path(path)
    value = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("P.weight", "model_embedding.weight"):
        if isinstance(value, dict) and name in value:
            return value[name].detach().float()
    return _only_tensor(value, path)


# generated


def synthetic_outcomes(
    num_models: int = 40,
    num_families: int = 5,
    num_questions: int = 1600,
    num_benchmarks: int | None = None,
    question_dim: int = 64,
    num_demands: int = 6,
    seed: int = 0,
) -> Outcomes:
    """Outcomes of models with latent skills on questions with latent demands, where the truth is known.

    A question has demands z ~ N(0, I) and the embedding ``normalize(z A + 0.3 n)``. With benchmarks the demands are
    drawn around a centre of each benchmark, ``z = centre + 0.7 n``. A model has the skills ``0.8 family + 0.5 own`` and
    an ability ``0.6 n``, and it is right with probability ``sigmoid(1.5 (ability + 1.8 skills . z / sqrt(K) + 0.2))``.

    Args:
        num_models: M.
        num_families: models m, m + families, ... share a family.
        num_questions: N, over all benchmarks.
        num_benchmarks: None for no benchmarks.
        question_dim: D.
        num_demands: K, number of latent demands.
        seed: of everything.

    Returns:
        The outcomes with ``embeddings``, ``probability`` and the families as ``communities``.

    Raises:
        ValueError: a number is out of range.
    """
    check_range("num_models", num_models, 2)
    check_range("num_families", num_families, 1, num_models)
    check_range("num_questions", num_questions, 1)
    check_range("question_dim", question_dim, 1)
    check_range("num_demands", num_demands, 1)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    demands, benchmark = normal(num_questions, num_demands), None
    if num_benchmarks is not None:
        check_range("num_benchmarks", num_benchmarks, 1, num_questions)
        benchmark = torch.arange(num_questions) % num_benchmarks
        demands = normal(num_benchmarks, num_demands)[benchmark] + 0.7 * demands
    mixing = normal(num_demands, question_dim) / num_demands**0.5
    embeddings = torch.nn.functional.normalize(demands @ mixing + 0.3 * normal(num_questions, question_dim), dim=1)
    family = torch.arange(num_models) % num_families
    skills = 0.8 * normal(num_families, num_demands)[family] + 0.5 * normal(num_models, num_demands)
    ability = 0.6 * normal(num_models, 1)
    probability = (1.5 * (ability + 1.8 * skills @ demands.T / num_demands**0.5 + 0.2)).sigmoid()
    correct = torch.rand(num_models, num_questions, generator=generator) < probability
    return Outcomes(
        model_names=[f"family{int(f)}-model{m}" for m, f in enumerate(family)],
        questions=[],
        question_keys=[str(question) for question in range(num_questions)],
        correct=correct.to(torch.int8),
        observed=torch.ones_like(correct),
        benchmark_names=[f"benchmark{i}" for i in range(num_benchmarks or 0)],
        benchmark=benchmark,
        embeddings=embeddings,
        probability=probability,
        communities={f"family{f}": family == f for f in range(num_families)},
    )


def outcomes_of_tensors(
    correct: Tensor,
    question_embeddings: Tensor,
    observed: Tensor | None = None,
    benchmark: Tensor | None = None,
    model_names: Sequence[str] | None = None,
    benchmark_names: Sequence[str] | None = None,
    split: Tensor | None = None,
) -> Outcomes:
    """Outcomes from tensors that are there already.

    Args:
        correct: 0/1 [M, N].
        question_embeddings: [N, D].
        observed: which outcomes are known, [M, N]; None: all.
        benchmark: int [N].
        model_names: [M].
        benchmark_names: by number.
        split: 0 train, 1 validation, 2 test, [N].

    Raises:
        ValueError: shapes do not fit, or an outcome is neither 0 nor 1.
    """
    sizes = check_shape("correct", correct, "models questions")
    models, questions = sizes["models"], sizes["questions"]
    check_shape("question_embeddings", question_embeddings, "questions dim", questions=questions)
    observed = torch.ones(models, questions, dtype=torch.bool) if observed is None else observed.bool()
    check_shape("observed", observed, "models questions", **sizes)
    if not ((correct == 0) | (correct == 1))[observed].all():
        raise ValueError("correct must hold 0 and 1 only.")
    for name, value in (("benchmark", benchmark), ("split", split)):
        if value is not None:
            check_shape(name, value, "questions", questions=questions)
    names = [f"model{m}" for m in range(models)] if model_names is None else list(model_names)
    if len(names) != models:
        raise ValueError(f"model_names must have {models} names, got {len(names)}.")
    if benchmark is not None and benchmark_names is None:
        benchmark_names = [str(number) for number in range(int(benchmark.max()) + 1)]
    return Outcomes(
        model_names=names,
        questions=[],
        question_keys=[str(question) for question in range(questions)],
        correct=torch.where(observed, correct, 0).to(torch.int8),
        observed=observed,
        split=None if split is None else split.long(),
        benchmark_names=list(benchmark_names or []),
        benchmark=None if benchmark is None else benchmark.long(),
        embeddings=question_embeddings.float(),
    )
