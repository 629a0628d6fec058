"""Language models under evaluation: tables of which model answered which question rightly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_methods.core.batches import CorrectnessBatch
from lightning_methods.core.checks import check_choice, check_range, nearest
from lightning_methods.core.io import read_jsonl
from lightning_methods.embed_llm.data import (
    Outcomes,
    outcomes_of_tensors,
    read_outcomes,
    read_question_embeddings,
    synthetic_outcomes,
)
from lightning_methods.lidr.data import language_prompt

from .base import ArrayDataset, BaseDataModule, _count, stratified_parts

__all__ = ["CorrectnessMatrixDataModule", "MGSMDataModule", "OutcomeTable", "XAlpacaEvalDataModule"]


class OutcomeTable(NamedTuple):
    """The outcomes on the questions of one split.

    Attributes:
        question_embeddings: float [N, D].
        correct: 1 where the model was right, int8 [M, N].
        observed: which outcomes are known, bool [M, N].
        question_ids: number of each question over all splits, int64 [N].
    """

    question_embeddings: Tensor
    correct: Tensor
    observed: Tensor
    question_ids: Tensor


class CorrectnessMatrixDataModule(BaseDataModule):
    """Pairs of a language model and a question, with whether the model was right.

    Batches are :class:`~lightning_methods.core.CorrectnessBatch`; training pairs are shuffled, pairs of validation and
    test come question by question. Splits are of *questions*: no question is in two of them. The sources:

    * "synthetic": models with latent skills, questions with latent demands
      (:func:`~lightning_methods.embed_llm.synthetic_outcomes`), drawn by ``seed``; no download;
    * "embedllm": the authors' set (``RZ412/EmbedLLM`` on Hugging Face: 112 models, 36054 questions of ten benchmarks):
      ``train.csv``, ``val.csv``, ``test.csv`` and, where they are, ``question_order.csv`` (texts by ``prompt_id``) and
      ``question_embeddings.pth`` (the published embeddings) in ``root``. ``download`` fetches them, about 3.4 GB;
    * "csv": your own table, ``root/csv``, one row per pair; see :func:`~lightning_methods.embed_llm.read_outcomes` for
      the columns. A column ``split`` is kept to, otherwise questions are split at random;
    * "tensors": ``correct`` [M, N], ``question_embeddings`` [N, D] and, optionally, ``observed`` [M, N], ``benchmark``
      int [N], ``split`` [N] (0 train, 1 val, 2 test), ``model_names``, ``benchmark_names``; a dictionary, or the name
      of a safetensors file in ``root`` with the tensors of these names.

    Texts are embedded once by a Hugging Face encoder; the result is kept under ``root/embeddings``.

    Sizes (``train_size``, ``val_size``, ``test_size``) count questions, or are shares of them; by default 80/10/10,
    with the benchmarks in proportion. Where the source has its own splits a size keeps that many of one.

    Args:
        source: where the outcomes are from.
        root: folder of the files.
        encoder: name or folder of the text encoder, for "embedllm" and "csv".
        normalize: scale embeddings to norm 1.
        pooling: of the encoder's hidden states: "mean", "first" or "last".
        max_length: tokens of a question at most.
        encode_batch_size: questions that are embedded at a time.
        published_embeddings: take ``question_embeddings.pth`` if it is there, for "embedllm".
        num_train_questions: train on a random subset of this many training questions, the same first ones for any
            number; None for all.
        held_out_benchmarks: their questions are in no training or validation set. They are the test set instead.
        csv: name of the file, for "csv".
        tensors: see above, for "tensors".
        num_models: number of models, for "synthetic".
        num_families: families of similar models, for "synthetic".
        num_questions: number of questions, for "synthetic".
        num_benchmarks: benchmarks with demands of their own, for "synthetic"; None for none.
        embedding_dim: size of the question embeddings, for "synthetic".
        batch_size: pairs in a batch.
        **kwargs: further arguments of :class:`BaseDataModule`.

    Attributes:
        outcomes: everything that was read, :class:`~lightning_methods.embed_llm.Outcomes`.

    Raises:
        ValueError: an option is out of range, an unknown benchmark, or a column is missing for what is asked.
        FileNotFoundError: a file is missing; the message says where it comes from and goes to.
    """

    available_splits: tuple[str, ...] = ("train",)
    default_val_size: int | float = 0.1
    default_test_size: int | float = 0.1

    def __init__(
        self,
        source: Literal["synthetic", "embedllm", "csv", "tensors"] = "synthetic",
        root: str = "data/embedllm",
        encoder: str = "sentence-transformers/all-mpnet-base-v2",
        normalize: bool = True,
        pooling: Literal["mean", "first", "last"] = "mean",
        max_length: int | None = 384,
        encode_batch_size: int = 64,
        published_embeddings: bool = True,
        num_train_questions: int | None = None,
        held_out_benchmarks: Sequence[str] = (),
        csv: str = "outcomes.csv",
        tensors: dict[str, Any] | str | None = None,
        num_models: int = 40,
        num_families: int = 5,
        num_questions: int = 1600,
        num_benchmarks: int | None = None,
        embedding_dim: int = 64,
        batch_size: int | None = 2048,
        **kwargs: Any,
    ) -> None:
        super().__init__(root=root, batch_size=batch_size, **kwargs)
        check_choice("source", source, ("synthetic", "embedllm", "csv", "tensors"))
        check_choice("pooling", pooling, ("mean", "first", "last"))
        if num_train_questions is not None:
            check_range("num_train_questions", num_train_questions, 1)
            if self.train_size is not None:
                raise ValueError("num_train_questions and train_size say the same; give one of them.")
        if source == "tensors" and tensors is None:
            raise ValueError("source='tensors' needs tensors: a dictionary, or the name of a safetensors file.")
        if isinstance(held_out_benchmarks, str):
            raise ValueError(f"held_out_benchmarks must be a list of names, got {held_out_benchmarks!r}.")
        self.source = source
        self.encoder = encoder
        self.normalize = normalize
        self.pooling = pooling
        self.max_length = max_length
        self.encode_batch_size = encode_batch_size
        self.published_embeddings = published_embeddings
        self.num_train_questions = num_train_questions
        self.held_out_benchmarks = list(held_out_benchmarks)
        self.csv = csv
        self.tensors = tensors
        self.generated = {
            "num_models": num_models,
            "num_families": num_families,
            "num_questions": num_questions,
            "num_benchmarks": num_benchmarks,
            "question_dim": embedding_dim,
        }
        self.downloads = source in ("embedllm", "csv") or isinstance(tensors, str)
        self._outcomes: Outcomes | None = None
        self._questions: dict[str, Tensor] | None = None

    # files

    def fetch(self) -> None:
        """Download the authors' files that are not there yet."""
        root = Path(self.root)
        if self.source != "embedllm" or all((root / f"{name}.csv").is_file() for name in ("train", "val", "test")):
            return
        from huggingface_hub import snapshot_download

        files = ["train.csv", "val.csv", "test.csv", "question_order.csv", "question_embeddings.pth"]
        snapshot_download("RZ412/EmbedLLM", repo_type="dataset", local_dir=root, allow_patterns=files)

    def prepare_data(self) -> None:
        """Download, if asked, and embed the questions, so that the other processes find the result."""
        super().prepare_data()
        _ = self.outcomes

    def _file(self, name: str) -> Path:
        path = Path(self.root) / name
        if path.is_file():
            return path
        if self.source == "embedllm":
            raise FileNotFoundError(
                f"{path} is missing: fetch it from https://huggingface.co/datasets/RZ412/EmbedLLM into {self.root}, or "
                "set download=True."
            )
        raise FileNotFoundError(f"{path} is missing: put your file there, or give its name and root.")

    def _read(self) -> Outcomes:
        if self.source == "synthetic":
            return synthetic_outcomes(**self.generated, seed=self.seed)
        if self.source == "tensors":
            given = self.tensors
            if isinstance(given, str):
                from safetensors.torch import load_file

                given = load_file(self._file(given))
            return outcomes_of_tensors(**given)
        if self.source == "csv":
            outcomes = read_outcomes(self._file(self.csv))
        else:
            order = Path(self.root) / "question_order.csv"
            files = {name: self._file(f"{name}.csv") for name in ("train", "val", "test")}
            outcomes = read_outcomes(files, order if order.is_file() else None)
        published = Path(self.root) / "question_embeddings.pth"
        if self.source == "embedllm" and self.published_embeddings and published.is_file():
            outcomes.embeddings = read_question_embeddings(published, outcomes.question_keys)
            return outcomes
        if not outcomes.questions:
            raise ValueError(f"the texts of the questions are missing: the files in {self.root} have no column prompt.")
        from lightning_methods.text.encode import encode_texts

        outcomes.embeddings = encode_texts(
            outcomes.questions,
            self.encoder,
            pooling=self.pooling,
            normalize=self.normalize,
            batch_size=self.encode_batch_size,
            max_length=self.max_length,
            cache=Path(self.root) / "embeddings",
        )
        return outcomes

    @property
    def outcomes(self) -> Outcomes:
        """What was read, with the embeddings of the questions; read on first use."""
        if self._outcomes is None:
            outcomes = self._read()
            for name in self.held_out_benchmarks:
                if outcomes.benchmark is None:
                    raise ValueError(
                        "held_out_benchmarks needs to know the benchmark of every question: the data have no column "
                        "category or benchmark (tensors: no entry benchmark)."
                    )
                if name not in outcomes.benchmark_names:
                    known = outcomes.benchmark_names
                    raise ValueError(
                        f"there is no benchmark {name!r}.{nearest(name, known)} Known: {', '.join(known)}."
                    )
            self._outcomes = outcomes
        return self._outcomes

    # what modules ask

    @property
    def num_models(self) -> int:
        """Number of models, M."""
        return len(self.outcomes.model_names)

    @property
    def question_dim(self) -> int:
        """Size of the question embeddings, D."""
        return self.outcomes.embeddings.shape[1]

    @property
    def model_names(self) -> list[str]:
        """The models' names, by their number."""
        return self.outcomes.model_names

    @property
    def communities(self) -> dict[str, Tensor]:
        """Members of the known communities, bool [M] by name: the families of the synthetic models."""
        return self.outcomes.communities

    @property
    def question_encoder(self) -> dict[str, Any]:
        """How texts became embeddings; empty where they were embeddings from the start."""
        if self.source not in ("embedllm", "csv"):
            return {}
        return {
            "name": self.encoder,
            "pooling": self.pooling,
            "normalize": self.normalize,
            "max_length": self.max_length,
        }

    @property
    def benchmark_accuracy(self) -> dict[str, Tensor]:
        """Every model's mean accuracy over all questions of each benchmark, float64 [M] by name."""
        outcomes = self.outcomes
        if outcomes.benchmark is None:
            return {}
        return {
            name: outcomes.accuracy((outcomes.benchmark == number).nonzero().flatten())
            for number, name in enumerate(outcomes.benchmark_names)
        }

    @property
    def held_out_accuracy(self) -> dict[str, Tensor]:
        """:attr:`benchmark_accuracy` of the benchmarks that training leaves out."""
        return {name: self.benchmark_accuracy[name] for name in self.held_out_benchmarks}

    def table(self, split: Literal["train", "val", "test"]) -> OutcomeTable:
        """The outcomes on the questions of a split, before any modifier."""
        check_choice("split", split, ("train", "val", "test"))
        rows = self.split_questions[split]
        outcomes = self.outcomes
        return OutcomeTable(outcomes.embeddings[rows], outcomes.correct[:, rows], outcomes.observed[:, rows], rows)

    # splits

    @property
    def split_questions(self) -> dict[str, Tensor]:
        """Numbers of the questions of "train", "val" and "test", int64 in ascending order."""
        if self._questions is None:
            self._questions = self._split_questions()
        return self._questions

    def _split_questions(self) -> dict[str, Tensor]:
        outcomes = self.outcomes
        total = len(outcomes.question_keys)
        held_out = torch.zeros(total, dtype=torch.bool)
        for name in self.held_out_benchmarks:
            held_out |= outcomes.benchmark == outcomes.benchmark_names.index(name)
        if outcomes.split is None:
            train, val, test = self._drawn((~held_out).nonzero().flatten())
        else:
            parts = ((~held_out & (outcomes.split == number)).nonzero().flatten() for number in range(3))
            train, val, test = parts
            val, test = self._kept("val_size", val, self.val_size), self._kept("test_size", test, self.test_size)
        if self.held_out_benchmarks:
            test = held_out.nonzero().flatten()
        train = self._subset(train)
        if len(test) == 0:
            test = val
        if len(val) == 0:
            val = test
        return {"train": train, "val": val, "test": test}

    def _strata(self, rows: Tensor) -> Tensor:
        benchmark = self.outcomes.benchmark
        return torch.zeros(len(rows), dtype=torch.int64) if benchmark is None else benchmark[rows]

    def _drawn(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Training, validation and test questions at random."""
        n = len(rows)
        wanted = {
            "test": 0 if self.held_out_benchmarks else self.test_size,
            "val": self.val_size,
        }
        defaults = {"test": self.default_test_size, "val": self.default_val_size}
        counts = [_count(defaults[name] if size is None else size, n) for name, size in wanted.items()]
        if sum(counts) >= n:
            raise ValueError(
                f"val_size={self.val_size} and test_size={self.test_size} leave none of {n} questions to train on."
            )
        test, val, train = stratified_parts(self._strata(rows), counts, seed=self.seed)
        return rows[train], rows[val], rows[test]

    def _kept(self, name: str, rows: Tensor, size: int | float | None) -> Tensor:
        """Part of one of the source's own splits."""
        if size is None:
            return rows
        count = _count(size, len(rows))
        if count > len(rows):
            raise ValueError(f"{name}={size} exceeds the {len(rows)} questions of that split.")
        return rows[stratified_parts(self._strata(rows), [count], seed=self.seed)[0]]

    def _subset(self, rows: Tensor) -> Tensor:
        """As many of the training questions as were asked for."""
        if self.num_train_questions is None and self.train_size is None:
            return rows
        count = self.num_train_questions or _count(self.train_size, len(rows))
        if count > len(rows):
            raise ValueError(f"{count} training questions were asked, but there are {len(rows)}.")
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
        return rows[order[:count].sort().values]

    def _split(self) -> dict[str, ArrayDataset]:
        return {name: self._pairs(rows) for name, rows in self.split_questions.items()}

    def load_split(self, split: str) -> ArrayDataset:
        """The pairs on the questions of a split."""
        return self._pairs(self.split_questions[split])

    def _pairs(self, rows: Tensor) -> ArrayDataset:
        """All observed pairs on these questions, question by question; the embeddings are one table for all of them."""
        outcomes = self.outcomes
        column, model = outcomes.observed[:, rows].T.nonzero().unbind(dim=1)
        question = rows[column]
        labels = outcomes.correct[model, question].long()
        extras = {"model_ids": model, "labels": labels, "question_ids": question}
        return ArrayDataset(
            outcomes.embeddings, labels, 2, indices=question, extras=extras, batch_type=CorrectnessBatch
        )

    def _with_transform(self, dataset: ArrayDataset, training: bool) -> ArrayDataset:
        """The one view of a question is its embedding."""
        made = super()._with_transform(dataset, training)
        views = {"question_embeddings" if name == "x" else name: view for name, view in made.transforms.items()}
        return made.replace(transforms=views)


# prompts to answer


class _Prompts(LightningDataModule):
    """Prompts of several languages for ``test`` and ``predict``; a batch is a dictionary of lists."""

    downloads = True

    def __init__(self, languages: Sequence[str], root: str, batch_size: int, limit: int | None) -> None:
        super().__init__()
        if not languages:
            raise ValueError("languages must name at least one language.")
        check_range("batch_size", batch_size, 1)
        if limit is not None:
            check_range("limit", limit, 1)
        self.languages = list(languages)
        self.root = str(root)
        self.batch_size = batch_size
        self.limit = limit
        self.rows: list[dict[str, str]] = []

    def read(self, language: str) -> list[dict[str, str]]:
        """The rows of one language."""
        raise NotImplementedError(f"{type(self).__name__} must implement read.")

    def file(self, language: str) -> Path:
        """The file of a language.

        Raises:
            FileNotFoundError: there is none.
        """
        for name in (f"{language}.jsonl", f"{language}.json"):
            if (Path(self.root) / name).is_file():
                return Path(self.root) / name
        raise FileNotFoundError(f"there is no {language}.jsonl in {self.root}. {self.where}")

    where = ""

    def setup(self, stage: str | None = None) -> None:
        """Read the files; a second call changes nothing."""
        if not self.rows:
            self.rows = [row for language in self.languages for row in self.read(language)[: self.limit]]

    def _loader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=self.batch_size, collate_fn=_columns)

    def test_dataloader(self) -> DataLoader:
        """All prompts, language by language."""
        return self._loader()

    def predict_dataloader(self) -> DataLoader:
        """All prompts, language by language."""
        return self._loader()


def _columns(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


MGSM_LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")


class MGSMDataModule(_Prompts):
    """MGSM: 250 arithmetic problems, the same in each language.

    A batch is a dictionary of lists: ``id``, ``language``, ``prompt``, ``answer`` (the right number) and ``dataset``.

    Files are ``<root>/<language>.jsonl`` with ``{"query": problem, "response": number}`` in each line.

    Args:
        languages: codes of bn, de, en, es, fr, ja, ru, sw, te, th, zh.
        source: "jsonl", or "hf" for ``juletxara/mgsm`` on the Hugging Face hub (needs ``datasets``).
        root: folder of the files, or of the hub's cache.
        wrap: name the language in the prompt and ask for an answer in it, as in training on arithmetic.
        batch_size: prompts in a batch.
        limit: the first so many problems of each language; None for all.

    Raises:
        ValueError: an unknown language or source.
        FileNotFoundError: a file is missing (in ``setup``).
    """

    where = "It holds one {'query', 'response'} a line; source='hf' fetches juletxara/mgsm instead."

    def __init__(
        self,
        languages: list[str] = ["en", "es", "ru", "de", "fr"],  # noqa: B006 - a tuple would not parse as a list
        source: Literal["jsonl", "hf"] = "jsonl",
        root: str = "data/mgsm",
        wrap: bool = True,
        batch_size: int = 16,
        limit: int | None = None,
    ) -> None:
        super().__init__(languages, root, batch_size, limit)
        check_choice("source", source, ("jsonl", "hf"))
        for language in languages:
            check_choice("languages", language, MGSM_LANGUAGES)
        self.source = source
        self.wrap = wrap

    def _problems(self, language: str) -> list[tuple[str, str]]:
        if self.source == "jsonl":
            rows = read_jsonl(self.file(language), required=("query", "response"))
            return [(str(row["query"]), str(row["response"])) for row in rows]
        try:
            from datasets import load_dataset
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "source='hf' needs the package datasets: pip install 'lightning-methods[text]'.", name="datasets"
            ) from error
        rows = load_dataset("juletxara/mgsm", language, split="test", cache_dir=self.root)
        return [(row["question"], str(row["answer_number"])) for row in rows]

    def read(self, language: str) -> list[dict[str, str]]:
        """The problems of one language."""
        return [
            {
                "id": f"{language}-{number}",
                "language": language,
                "prompt": language_prompt(problem, language) if self.wrap else problem,
                "answer": answer,
                "dataset": "mgsm",
            }
            for number, (problem, answer) in enumerate(self._problems(language))
        ]


class XAlpacaEvalDataModule(_Prompts):
    """X-AlpacaEval: 805 instructions, the same in each language, for a judge to compare the answers to.

    A batch is a dictionary of lists: ``id``, ``language``, ``prompt`` and ``dataset``.

    Files are ``<root>/<language>.jsonl`` with ``{"id", "dataset", "instruction"}`` in each line, or a JSON list of
    these in ``<language>.json``.

    Args:
        languages: codes, e.g. of ar, de, en, es, fr, it, ja, ko, ru, th, zh.
        root: folder of the files.
        batch_size: prompts in a batch.
        limit: the first so many instructions of each language; None for all.

    Raises:
        ValueError: no language, or a line without one of the keys (in ``setup``).
        FileNotFoundError: a file is missing (in ``setup``).
    """

    where = "It is part of ZNLP/Language-Imbalance-Driven-Rewarding on GitHub."

    def __init__(
        self,
        languages: list[str] = ["en", "es", "ru", "de", "fr"],  # noqa: B006
        root: str = "data/x_alpaca_eval",
        batch_size: int = 16,
        limit: int | None = None,
    ) -> None:
        super().__init__(languages, root, batch_size, limit)

    def read(self, language: str) -> list[dict[str, str]]:
        """The instructions of one language."""
        keys = ("id", "dataset", "instruction")
        path = self.file(language)
        if path.suffix == ".jsonl":
            rows = read_jsonl(path, required=keys)
        else:
            rows = json.loads(path.read_text(encoding="utf-8"))
            for number, row in enumerate(rows):
                if any(key not in row for key in keys):
                    raise ValueError(f"{path}, entry {number}: expected {', '.join(keys)}; found {', '.join(row)}.")
        return [
            {
                "id": str(row["id"]),
                "language": language,
                "prompt": row["instruction"],
                "dataset": str(row["dataset"]),
            }
            for row in rows
        ]
