from __future__ import annotations

import os

import pytest
import torch

from lightning_methods.core import cached_tensors, read_jsonl, write_jsonl


def test_json_lines_come_back(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    rows = [{"id": 1, "text": "größer"}, {"id": 2, "text": "a\nb"}]
    write_jsonl(path, rows)
    assert read_jsonl(path, required=("id", "text")) == rows
    assert path.read_text(encoding="utf-8").count("\n") == 2
    assert "größer" in path.read_text(encoding="utf-8")


def test_empty_lines_are_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": 2}')
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "line 1: not JSON"), ('{"a": 1}\n[1]', "line 2: expected an object, got list"), ('{"b": 1}', "a missing")],
)
def test_wrong_lines_are_named(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_jsonl(path, required=("a",))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_jsonl(path, [{"a": 2}, {"a": object()}])
    assert read_jsonl(path) == [{"a": 1}]
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_tensors_are_computed_once(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"x": torch.arange(6.0).view(2, 3).T, "y": torch.ones(2, dtype=torch.int64)}

    path = tmp_path / "cache" / "x.safetensors"
    first, second = cached_tensors(path, compute), cached_tensors(path, compute)
    assert len(calls) == 1
    for found in (first, second):
        assert torch.equal(found["x"], torch.arange(6.0).view(2, 3).T)
        assert found["y"].dtype == torch.int64
    assert os.listdir(path.parent) == ["x.safetensors"]
