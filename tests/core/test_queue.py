from __future__ import annotations

import pytest
import torch

from lightning_methods.core.queue import FeatureQueue


def test_starts_as_unit_rows():
    queue = FeatureQueue(6, keys=4, scores=3)
    assert queue.keys.shape == (6, 4)
    assert queue.scores.shape == (6, 3)
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(6))


def test_oldest_rows_go_first_and_the_ring_closes():
    queue = FeatureQueue(6, keys=1)
    for start in (0, 2, 4, 6):
        queue.enqueue(keys=torch.tensor([[start], [start + 1]], dtype=torch.float32))
    assert queue.keys.flatten().tolist() == [6, 7, 2, 3, 4, 5]
    assert queue.position == 2


def test_a_smaller_batch_does_not_break_the_ring():
    queue = FeatureQueue(6, keys=1)
    queue.enqueue(keys=torch.tensor([[0.0], [1.0]]))
    queue.enqueue(keys=torch.tensor([[2.0]]))
    queue.enqueue(keys=torch.tensor([[3.0], [4.0], [5.0]]))
    queue.enqueue(keys=torch.tensor([[6.0], [7.0], [8.0]]))
    assert queue.keys.flatten().tolist() == [6, 7, 8, 3, 4, 5]


def test_snapshot_survives_the_next_enqueue_and_its_backward():
    queue = FeatureQueue(4, keys=2)
    q = torch.ones(1, 2, requires_grad=True)
    negatives = queue.snapshot("keys")
    before = negatives.clone()
    loss = (q @ negatives.T).square().sum()
    queue.enqueue(keys=torch.zeros(4, 2))
    loss.backward()  # in-place changes of what the graph keeps would raise here
    assert torch.equal(negatives, before)
    torch.testing.assert_close(q.grad, 2 * (q.detach() @ before.T) @ before)


def test_travels_in_the_state():
    queue, other = FeatureQueue(4, keys=2), FeatureQueue(4, keys=2)
    queue.enqueue(keys=torch.ones(2, 2))
    other.load_state_dict(queue.state_dict())
    other.enqueue(keys=torch.zeros(2, 2))
    assert other.keys.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert not list(queue.parameters())


@pytest.mark.bad_input
def test_bad_input():
    queue = FeatureQueue(8, keys=3)
    with pytest.raises(ValueError, match="8 is not a multiple of 3"):
        queue.enqueue(keys=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="keys must have shape"):
        queue.enqueue(keys=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="enqueue needs rows for keys; got values"):
        queue.enqueue(values=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="size"):
        FeatureQueue(0, keys=3)
    with pytest.raises(ValueError, match="needs at least one"):
        FeatureQueue(4)
