from __future__ import annotations

import csv
import itertools
import os

import pytest
import torch
from safetensors.torch import save_file

from datamodules import CorrectnessMatrixDataModule
from lightning_methods.core import CorrectnessBatch
from lightning_methods.embed_llm import (
    read_model_embeddings,
    read_outcomes,
    read_question_embeddings,
    synthetic_outcomes,
)
from lightning_methods.text import encode_texts, save_tiny

WORDS = [f"w{i}" for i in range(30)]
MODELS = {7: "zeta", 100: "alpha", 23: "beta"}  # ids are neither contiguous nor in the order of the names
BENCHMARKS = ("mmlu", "gsm8k")


def label(question: int, model: int) -> int:
    return (question * 7 + model) % 3 % 2


def write(path, header, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def question_text(question: int) -> str:
    return f'{WORDS[question]}, "quoted"\nand w{question % 5}'


@pytest.fixture
def published(tmp_path):
    """The files of RZ412/EmbedLLM, small: prompts 0..19, of which 16 train."""
    parts = {"train": range(16), "val": (16, 17), "test": (18, 19)}
    for name, prompts in parts.items():
        rows = [
            (
                prompt,
                question_text(prompt),
                model,
                MODELS[model],
                BENCHMARKS[prompt % 2],
                prompt % 2,
                label(prompt, model),
            )
            for prompt in prompts
            for model in MODELS
        ]
        header = ("prompt_id", "prompt", "model_id", "model_name", "category", "category_id", "label")
        write(tmp_path / f"{name}.csv", header, rows)
    write(tmp_path / "question_order.csv", ("prompt",), [(question_text(prompt),) for prompt in range(20)])
    torch.save(torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), tmp_path / "question_embeddings.pth")
    return tmp_path


# the readers


def test_published_files(published):
    data = CorrectnessMatrixDataModule(source="embedllm", root=str(published), batch_size=1000, download=False)
    assert data.downloads
    data.prepare_data()
    data.setup("fit")
    assert data.model_names == ["zeta", "beta", "alpha"]  # by id: 7, 23, 100
    assert (data.num_models, data.question_dim, data.num_classes) == (3, 6, 2)
    table = torch.load(published / "question_embeddings.pth", weights_only=True)
    for loader, prompts in (
        (data.train_dataloader(), range(16)),
        (data.val_dataloader(), (16, 17)),
        (data.test_dataloader(), (18, 19)),
    ):
        (batch,) = loader
        assert isinstance(batch, CorrectnessBatch)
        assert batch.model_ids.dtype == batch.labels.dtype == batch.question_ids.dtype == torch.int64
        seen = set()
        for model, embedding, right, question in zip(*batch, strict=True):
            prompt = int(data.outcomes.question_keys[question])
            seen.add((int(model), prompt))
            assert torch.equal(embedding, table[prompt])
            assert int(right) == label(prompt, (7, 23, 100)[model])
        assert seen == set(itertools.product(range(3), prompts))
        assert len(batch.labels) == len(seen)
    expected = torch.tensor([[label(p, m) for p in range(1, 20, 2)] for m in (7, 23, 100)]).double().mean(dim=1)
    torch.testing.assert_close(data.benchmark_accuracy["gsm8k"], expected)
    assert data.question_encoder["name"] == "sentence-transformers/all-mpnet-base-v2"


def test_training_pairs_are_shuffled_and_evaluation_is_not(published):
    data = CorrectnessMatrixDataModule(source="embedllm", root=str(published), batch_size=1000, download=False)
    data.setup("fit")
    loader = data.train_dataloader()
    (first,), (second,) = loader, loader
    assert not torch.equal(first.question_ids, second.question_ids)
    assert not torch.equal(first.question_ids, first.question_ids.sort().values)
    (val,) = data.val_dataloader()
    assert torch.equal(val.question_ids, val.question_ids.sort().values)


def test_texts_are_embedded_once(published, monkeypatch):
    folder = save_tiny(published / "encoder", "encoder", words=WORDS, width=8)
    options = {"source": "embedllm", "root": str(published), "encoder": folder, "published_embeddings": False}
    data = CorrectnessMatrixDataModule(**options, download=False, max_length=None)
    data.setup("fit")
    assert data.question_dim == 8
    expected = encode_texts([question_text(prompt) for prompt in range(20)], folder)
    torch.testing.assert_close(data.outcomes.embeddings, expected)
    assert len(os.listdir(published / "embeddings")) == 1
    monkeypatch.setattr("lightning_methods.text.models.load_model", lambda *args, **kwargs: pytest.fail("again"))
    again = CorrectnessMatrixDataModule(**options, download=False, max_length=None)
    assert torch.equal(again.outcomes.embeddings, data.outcomes.embeddings)


def test_texts_may_be_in_the_order_file_alone(published):
    for name in ("train", "val", "test"):
        with open(published / f"{name}.csv", newline="") as file:
            rows = list(csv.reader(file))
        write(published / f"{name}.csv", [rows[0][0], *rows[0][2:]], [[row[0], *row[2:]] for row in rows[1:]])
    files = {name: published / f"{name}.csv" for name in ("train", "val", "test")}
    assert read_outcomes(files).questions == []
    outcomes = read_outcomes(files, published / "question_order.csv")
    assert outcomes.questions == [question_text(prompt) for prompt in range(20)]


def test_missing_files_say_where_from(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"huggingface.co/datasets/RZ412/EmbedLLM"):
        CorrectnessMatrixDataModule(source="embedllm", root=str(tmp_path), download=False).setup("fit")
    with pytest.raises(FileNotFoundError, match=r"outcomes\.csv is missing"):
        CorrectnessMatrixDataModule(source="csv", root=str(tmp_path)).setup("fit")


def test_files_that_are_there_are_not_fetched(published, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: pytest.fail("fetched"))
    CorrectnessMatrixDataModule(source="embedllm", root=str(published)).prepare_data()


def test_only_what_is_needed_is_fetched(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: calls.append((args, kwargs)))
    CorrectnessMatrixDataModule(source="embedllm", root=str(tmp_path)).fetch()
    ((args, kwargs),) = calls
    assert args == ("RZ412/EmbedLLM",)
    assert kwargs["repo_type"] == "dataset"
    assert "train_x.pth" not in kwargs["allow_patterns"]  # 20 GB that nobody needs


def test_an_own_table(tmp_path):
    """Names and texts alone, pairs that are missing, one that comes twice."""
    rows = [
        ("what?", "b", "1"),
        ("what?", "a", "0"),
        ("why?", "a", "1.0"),
        ("why?", "a", "0"),
        ("how?", "b", "False"),
    ]
    write(tmp_path / "outcomes.csv", ("question", "model", "correct"), rows)
    outcomes = read_outcomes(tmp_path / "outcomes.csv")
    assert outcomes.model_names == ["a", "b"]
    assert outcomes.questions == ["what?", "why?", "how?"]
    assert outcomes.correct.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert outcomes.observed.tolist() == [[True, True, False], [True, False, True]]
    assert outcomes.split is None
    assert outcomes.benchmark is None
    accuracy = outcomes.accuracy(torch.arange(3))
    assert accuracy.tolist() == [0.5, 0.5]


def test_a_split_column_is_kept_to_and_unknown_models_are_left_out(tmp_path):
    rows = [(q, m, (q + m) % 2, ("train", "train", "val", "test")[q % 4]) for q in range(12) for m in range(3)]
    rows += [(3, 99, 1, "test")]
    write(tmp_path / "t.csv", ("prompt", "model_id", "label", "split"), rows)
    with pytest.warns(UserWarning, match="model 99"):
        outcomes = read_outcomes(tmp_path / "t.csv")
    assert outcomes.model_names == ["model 0", "model 1", "model 2"]
    assert outcomes.split.tolist() == [0, 0, 1, 2] * 3
    assert outcomes.observed.all()


@pytest.mark.parametrize(
    ("header", "rows", "match"),
    [
        (("prompt", "label"), [("a", 1)], "model_id or model_name are missing; found prompt, label"),
        (("model_id", "label"), [(0, 1)], "prompt_id or prompt are missing"),
        (("prompt", "model_id"), [("a", 0)], "label are missing"),
        (("prompt", "model_id", "label"), [("a", 0, 1), ("b", 0, 2)], "line 3: label must be 0 or 1, got '2'"),
        (("prompt", "model_id", "label"), [("a", 0, "")], "label must be 0 or 1"),
        (("prompt", "model_id", "label", "split"), [("a", 0, 1, "rest")], "split must be train, val or test"),
        (("prompt", "model_id", "label"), [], "there are no rows"),
    ],
)
def test_wrong_tables_are_named(tmp_path, header, rows, match):
    write(tmp_path / "t.csv", header, rows)
    with pytest.raises(ValueError, match=match):
        read_outcomes(tmp_path / "t.csv")


def test_published_matrices(tmp_path):
    table = torch.randn(4, 3)
    torch.save(table, tmp_path / "q.pth")
    assert torch.equal(read_question_embeddings(tmp_path / "q.pth"), table)
    assert torch.equal(read_question_embeddings(tmp_path / "q.pth", ["3", "0"]), table[[3, 0]])
    with pytest.raises(ValueError, match="none for the question '4'"):
        read_question_embeddings(tmp_path / "q.pth", ["4"])
    forms = (table, torch.nn.Parameter(table), {"weight": table}, {"P.weight": table, "Q.weight": table[:2]})
    for form in forms:
        torch.save(form, tmp_path / "p.pth")
        assert torch.equal(read_model_embeddings(tmp_path / "p.pth"), table)
    torch.save({"a": table, "b": table}, tmp_path / "p.pth")
    with pytest.raises(ValueError, match="must hold one matrix"):
        read_model_embeddings(tmp_path / "p.pth")


# splits


def test_the_default_needs_no_download_and_splits_questions():
    data = CorrectnessMatrixDataModule(num_questions=200)
    assert not data.downloads
    data.setup("fit")
    parts = data.split_questions
    assert [len(parts[name]) for name in ("train", "val", "test")] == [160, 20, 20]
    assert len(torch.cat(list(parts.values())).unique()) == 200
    assert (data.num_models, data.question_dim) == (40, 64)
    assert len(data.train_set) == 160 * 40
    other = CorrectnessMatrixDataModule(num_questions=200, seed=1)
    assert not torch.equal(other.split_questions["test"], parts["test"])


def test_the_same_first_training_questions_for_any_number():
    def train(number):
        return set(
            CorrectnessMatrixDataModule(num_questions=200, num_train_questions=number).split_questions["train"].tolist()
        )

    assert len(train(10)) == 10
    assert train(10) < train(50) < train(None)
    whole = CorrectnessMatrixDataModule(num_questions=200)
    assert torch.equal(
        CorrectnessMatrixDataModule(num_questions=200, num_train_questions=10).split_questions["val"],
        whole.split_questions["val"],
    )


def test_held_out_benchmarks_are_the_test(published):
    data = CorrectnessMatrixDataModule(
        source="embedllm", root=str(published), held_out_benchmarks=["gsm8k"], download=False
    )
    data.setup("fit")
    benchmark = data.outcomes.benchmark
    for name, number in (("train", 0), ("val", 0), ("test", 1)):
        assert (benchmark[data.split_questions[name]] == number).all()
    assert len(data.split_questions["test"]) == 10  # whichever split they were in
    assert set(data.held_out_accuracy) == {"gsm8k"}
    drawn = CorrectnessMatrixDataModule(
        num_questions=100, num_benchmarks=5, held_out_benchmarks=["benchmark2", "benchmark4"], val_size=0
    )
    assert [len(rows) for rows in drawn.split_questions.values()] == [60, 40, 40]


def test_tensors(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "correct": torch.randint(2, (3, 20), generator=generator),
        "question_embeddings": torch.randn(20, 5, generator=generator),
        "observed": torch.rand(3, 20, generator=generator) > 0.3,
        "split": torch.arange(20) % 3,
        "benchmark": torch.arange(20) % 4,
    }
    save_file(tensors, tmp_path / "table.safetensors")
    for given in (tensors, "table.safetensors"):
        data = CorrectnessMatrixDataModule(source="tensors", root=str(tmp_path), tensors=given, batch_size=None)
        data.setup("fit")
        (batch,) = data.test_dataloader()
        pairs = (tensors["observed"] & (tensors["split"] == 2)).T.nonzero()
        assert torch.equal(torch.stack([batch.question_ids, batch.model_ids], dim=1), pairs)
        assert torch.equal(batch.labels, tensors["correct"][batch.model_ids, batch.question_ids])
        assert torch.equal(batch.question_embeddings, tensors["question_embeddings"][batch.question_ids])
        assert list(data.benchmark_accuracy) == ["0", "1", "2", "3"]
        assert data.question_encoder == {}


def test_the_generator_draws_what_it_says():
    outcomes = synthetic_outcomes(num_models=30, num_families=3, num_questions=3000, seed=4)
    torch.testing.assert_close(outcomes.embeddings.norm(dim=1), torch.ones(3000))
    frequency = outcomes.correct.double().mean(dim=1)
    torch.testing.assert_close(frequency, outcomes.probability.double().mean(dim=1), rtol=0, atol=0.04)
    skills = outcomes.probability.logit().T  # models of a family agree on questions
    agreement = torch.corrcoef(skills.T)
    family = torch.stack(list(outcomes.communities.values())).long().argmax(dim=0)
    same = family[:, None] == family
    assert agreement[same].mean() > agreement[~same].mean() + 0.3
    again = synthetic_outcomes(num_models=30, num_families=3, num_questions=3000, seed=4)
    assert torch.equal(again.correct, outcomes.correct)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"source": "table"}, "source must be one of"),
        ({"num_train_questions": 0}, "num_train_questions"),
        ({"num_train_questions": 5, "train_size": 0.5}, "say the same"),
        ({"source": "tensors"}, "needs tensors"),
        ({"pooling": "max"}, "pooling must be one of"),
        ({"held_out_benchmarks": "gsm8k"}, "must be a list of names"),
        ({"splits": "train+val"}, "splits must be one of"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ValueError, match=match):
        CorrectnessMatrixDataModule(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_questions": 100, "num_train_questions": 90}, "90 training questions were asked, but there are 80"),
        ({"num_questions": 100, "val_size": 50, "test_size": 50}, "leave none of 100 questions"),
        ({"held_out_benchmarks": ["mmlu"]}, "no column category or benchmark"),
        ({"num_benchmarks": 2, "held_out_benchmarks": ["benchmark7"]}, "Did you mean"),
        ({"num_models": 1, "num_families": 1}, "num_models"),
        (
            {"source": "tensors", "tensors": {"correct": torch.ones(2, 3), "question_embeddings": torch.ones(4, 2)}},
            "question_embeddings must have shape",
        ),
        (
            {
                "source": "tensors",
                "tensors": {"correct": 2 * torch.ones(2, 3), "question_embeddings": torch.ones(3, 2)},
            },
            "correct must hold 0 and 1",
        ),
    ],
)
def test_bad_data(options, match):
    with pytest.raises(ValueError, match=match):
        CorrectnessMatrixDataModule(**options).setup("fit")
