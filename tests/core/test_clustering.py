"""k-means: against scikit-learn and a loop, duplicates, empty clusters, chunks, seeds."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from torch import Tensor

from lightning_methods.core.clustering import _dense_sums, _sparse_sums, kmeans, kmeans_plusplus, lloyd


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits() -> Tensor:
    return torch.from_numpy(load_digits().data)


def lloyd_loop(x: Tensor, centroids: Tensor, max_iter: int) -> tuple[Tensor, Tensor]:
    """One point and one cluster at a time."""
    centroids = centroids.clone()
    for _ in range(max_iter):
        labels = torch.stack([(p - centroids).square().sum(1).argmin() for p in x])
        for c in range(len(centroids)):
            if (labels == c).any():
                centroids[c] = x[labels == c].mean(0)
    return centroids, torch.stack([(p - centroids).square().sum(1).argmin() for p in x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lloyd_equals_scikit_learn_from_the_same_start(dtype):
    x = digits().to(dtype)
    start = x[:10]
    centroids, labels, inertia = lloyd(x, start, 300)
    reference = KMeans(10, init=start.numpy(), n_init=1, tol=0, algorithm="lloyd").fit(x.numpy())
    torch.testing.assert_close(centroids, torch.from_numpy(reference.cluster_centers_).to(dtype), rtol=1e-5, atol=1e-4)
    assert np.array_equal(labels.numpy(), reference.labels_)
    assert inertia.item() == pytest.approx(reference.inertia_, rel=1e-5)


@pytest.mark.parametrize("max_iter", [0, 1, 3, 50])
def test_lloyd_equals_a_loop_over_points(max_iter):
    x = torch.randn(40, 3, generator=seeded(), dtype=torch.float64)
    start = torch.cat([x[:4], torch.full((1, 3), 100.0, dtype=torch.float64)])  # the last stays empty
    centroids, labels, _ = lloyd(x, start, max_iter)
    expected, expected_labels = lloyd_loop(x, start, max_iter)
    torch.testing.assert_close(centroids, expected)
    torch.testing.assert_close(labels, expected_labels)
    assert (centroids[-1] == 100).all(), "an empty cluster keeps its centroid"


def test_runs_together_equal_runs_apart():
    x = torch.randn(200, 5, generator=seeded(1), dtype=torch.float64)
    starts = kmeans_plusplus(x, 7, n_init=4, generator=seeded(2))
    together = lloyd(x, starts, 100)
    for r in range(4):
        for all_runs, one in zip(together, lloyd(x, starts[r], 100), strict=True):
            torch.testing.assert_close(all_runs[r], one)


def test_chunks_do_not_change_the_result():
    x = torch.randn(101, 4, generator=seeded(), dtype=torch.float64)
    whole, parts = kmeans(x, 6, generator=seeded(3)), kmeans(x, 6, generator=seeded(3), chunk_size=7)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("step", [7, 1000])
def test_the_sums_of_the_cpu_and_of_the_accelerator_agree(step):
    x = torch.randn(50, 4, generator=seeded(), dtype=torch.float64)
    labels = torch.randint(9, (3, 50), generator=seeded())
    labels[labels == 5] = 2  # an empty cluster
    for cpu, accelerator in zip(_sparse_sums(x, labels, 9), _dense_sums(x, labels, 9, step), strict=True):
        torch.testing.assert_close(accelerator, cpu.double())


def test_best_restart_is_as_good_as_scikit_learn():
    x = digits().float()
    inertia = kmeans(x, 10, n_init=10, generator=seeded())[2].item()
    assert inertia <= KMeans(10, n_init=10, random_state=0).fit(x.numpy()).inertia_ * 1.002
    assert inertia <= kmeans(x, 10, n_init=1, generator=seeded())[2].item()


def test_inertia_is_the_sum_of_squared_distances_and_labels_are_nearest():
    x = torch.randn(60, 3, generator=seeded(), dtype=torch.float64) + 1000  # far from the origin
    centroids, labels, inertia = kmeans(x, 5, generator=seeded(), tol=0)
    distances = torch.cdist(x, centroids, compute_mode="donot_use_mm_for_euclid_dist").square()
    assert torch.equal(labels, distances.argmin(1))
    torch.testing.assert_close(inertia, distances.amin(1).sum())


def test_seeds():
    x = torch.randn(50, 3, generator=seeded())
    assert torch.equal(kmeans(x, 8, generator=seeded(5))[0], kmeans(x, 8, generator=seeded(5))[0])
    assert not torch.equal(kmeans_plusplus(x, 8, generator=seeded(5)), kmeans_plusplus(x, 8, generator=seeded(6)))
    state = torch.get_rng_state()
    kmeans(x, 8, generator=seeded(5))
    assert torch.equal(state, torch.get_rng_state()), "with a generator the global one is left alone"


def test_plusplus_draws_are_proportional_to_the_squared_distance():
    x = torch.tensor([[0.0], [1.0], [3.0]])
    starts = kmeans_plusplus(x, 2, n_init=60_000, generator=seeded())[..., 0]
    second = starts[starts[:, 0] == 0][:, 1]
    assert (second == 3).float().mean().item() == pytest.approx(0.9, abs=0.01)  # 9 : 1


def test_plusplus_takes_every_distinct_point_before_a_copy():
    x = torch.randn(6, 40, generator=seeded()).repeat_interleave(5, dim=0)
    for start in kmeans_plusplus(x, 6, n_init=20, generator=seeded()):
        assert len(start.unique(dim=0)) == 6


@pytest.mark.parametrize("k", [1, 3, 20])
def test_duplicates_never_give_nan(k):
    x = torch.ones(20, 3)
    centroids, labels, inertia = kmeans(x, k, generator=seeded())
    assert torch.isfinite(centroids).all()
    assert (labels == 0).all()
    assert inertia == 0


def test_as_many_clusters_as_points():
    x = torch.randn(9, 2, generator=seeded(), dtype=torch.float64)
    centroids, labels, inertia = kmeans(x, 9, generator=seeded())
    assert sorted(labels.tolist()) == list(range(9))
    torch.testing.assert_close(centroids[labels], x)
    assert inertia.item() == pytest.approx(0, abs=1e-12)


def test_half_precision_and_autocast_compute_in_float32():
    x = torch.randn(60, 4, generator=seeded()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        centroids, labels, _ = kmeans(x.float(), 4, generator=seeded())
    plain = kmeans(x, 4, generator=seeded())
    assert plain[0].dtype == torch.float32
    assert torch.equal(centroids, plain[0])
    assert torch.equal(labels, plain[1])


def test_no_gradient():
    x = torch.randn(20, 2, requires_grad=True)
    assert not kmeans(x, 3, generator=seeded())[0].requires_grad


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kmeans(x, 6), "got 6 for 5 points"),
        (lambda x: kmeans(x, 0), "num_clusters"),
        (lambda x: kmeans(x[0], 1), "x must have shape"),
        (lambda x: kmeans(x.long(), 1), "floating"),
        (lambda x: kmeans(x / 0, 2), "finite"),
        (lambda x: kmeans(x, 2, n_init=0), "n_init"),
        (lambda x: kmeans(x, 2, max_iter=0), "max_iter"),
        (lambda x: kmeans(x, 2, metric="cosine"), "metric"),
        (lambda x: lloyd(x, torch.zeros(2, 4)), "centroids must have shape"),
        (lambda x: lloyd(x, torch.zeros(3)), "centroids must have shape"),
        (lambda x: lloyd(x, torch.zeros(2, 3), tol=-1), "tol"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(5, 3))
