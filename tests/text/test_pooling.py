from __future__ import annotations

import pytest
import torch

from lightning_methods.text.pooling import pool_hidden, position_ids


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two texts of three and two tokens, with garbage at the padding."""
    rows = [torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[7.0, 8], [9, 10]])]
    ids = [torch.tensor([4, 9, 5]), torch.tensor([9, 9])]
    hidden = torch.full((2, 4, 2), torch.nan)
    mask, tokens = torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), 9)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(4 - len(row), 4)
        hidden[i, where], mask[i, where], tokens[i, where] = row, 1, ids[i]
    return hidden, mask, tokens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [("first", [[1, 2], [7, 8]]), ("last", [[5, 6], [9, 10]]), ("mean", [[3, 4], [8, 9]])],
)
def test_modes(side, mode, expected):
    hidden, mask, _ = padded(side)
    for kind in (mask, mask.bool(), mask.float()):
        assert pool_hidden(hidden, kind, mode).tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_source_token_is_a_real_one(side):
    hidden, mask, ids = padded(side)
    assert pool_hidden(hidden, mask, "source_token", 9, ids).tolist() == [[3, 4], [7, 8]]


def test_gradient_reaches_real_tokens_alone():
    hidden, mask, _ = padded("left")
    hidden = hidden.nan_to_num(0).requires_grad_()
    pool_hidden(hidden, mask).sum().backward()
    assert torch.equal(hidden.grad[..., 0], mask / mask.sum(dim=1, keepdim=True))


def test_a_mean_of_half_precision_is_single():
    assert pool_hidden(torch.ones(1, 2, 3).bfloat16(), torch.ones(1, 2)).dtype == torch.float32


def test_positions():
    mask = torch.tensor([[False, True, True], [True, True, False]])
    assert position_ids(mask).tolist() == [[0, 0, 1], [0, 1, 1]]


@pytest.mark.bad_input
def test_bad_input():
    hidden, mask, ids = padded("left")
    for call, match in (
        (lambda: pool_hidden(hidden, mask, "max"), "mode must be one of"),
        (lambda: pool_hidden(hidden, mask[:, 1:]), "mask must have shape"),
        (lambda: pool_hidden(hidden[0], mask), "hidden must have shape"),
        (lambda: pool_hidden(hidden, 0 * mask), "text 0 has no real token"),
        (lambda: pool_hidden(hidden, mask, "source_token", 4), "needs token_id and input_ids"),
        (lambda: pool_hidden(hidden, mask, "source_token", 4, ids), "text 1 has no token 4"),
        (lambda: pool_hidden(hidden, mask, "source_token", 4, ids[:1]), "input_ids must have shape"),
        (lambda: position_ids(mask[0]), "mask must have shape"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
