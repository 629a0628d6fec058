"""Clustering metrics against brute force, scikit-learn and the test vectors; sums over batches equal the whole."""

from itertools import permutations

import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, roc_auc_score
from torch import Tensor

from lightning_methods.metrics.clustering import (
    AURC,
    ClusterAccuracy,
    ClusterCalibrationError,
    ClusterRejection,
    aurc,
    clustering_metrics,
    fpr_at_recall,
    match_clusters,
)
from tests.ddp import run_two_processes
from tests.vectors import load_cases


def sample(
    n: int = 200, clusters: int = 5, classes: int = 5, seed: int = 0, dtype=torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, clusters, generator=generator, dtype=dtype)
    logits[torch.arange(n), (targets + 2) % clusters] += 1.5
    return logits.softmax(1), targets


@pytest.mark.parametrize("case", load_cases("cdc", "clustering_metrics"), ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors(case, dtype):
    result = clustering_metrics(case.inputs["probs"].to(dtype), case.inputs["targets"])
    for name, value in case.outputs.items():
        tolerance = 1e-6 if dtype == torch.float64 else 1e-5
        assert result[name].item() == pytest.approx(value, rel=tolerance), name
        assert result[name].dtype == dtype


@pytest.mark.parametrize(("clusters", "classes"), [(4, 4), (5, 3), (3, 5)])
def test_accuracy_is_the_best_over_all_maps(clusters, classes):
    probs, targets = sample(120, clusters, classes)
    preds = probs.argmax(1)
    best = 0.0
    if clusters <= classes:
        maps = permutations(range(classes), clusters)
    else:  # some clusters get no class: -1 is never right
        maps = permutations([*range(classes), *[-1] * (clusters - classes)])
    for m in maps:
        best = max(best, (torch.tensor(m)[preds] == targets).double().mean().item())
    assert clustering_metrics(probs, targets)["acc"].item() == pytest.approx(best)
    match = match_clusters(preds, targets, clusters, classes)
    assert (match[preds] == targets).double().mean().item() == pytest.approx(best)
    assert (match == -1).sum() == max(clusters - classes, 0)
    metric = ClusterAccuracy(clusters, classes)
    metric.update(probs, targets)
    assert metric.compute().item() == pytest.approx(best)


def test_partition_scores_equal_scikit_learn():
    probs, targets = sample(classes=4)
    result = clustering_metrics(probs, targets)
    preds = probs.argmax(1)
    assert result["nmi"].item() == pytest.approx(normalized_mutual_info_score(targets, preds), rel=1e-5)
    assert result["ari"].item() == pytest.approx(adjusted_rand_score(targets, preds), rel=1e-5)


def test_calibration_error_equals_a_loop_over_samples():
    probs, targets = sample(300, 4, 4)
    match = match_clusters(probs.argmax(1), targets, 4, 4)
    bins: dict[int, list[tuple[float, float]]] = {}
    for p, t in zip(probs, targets, strict=True):
        confidence = p.max().item()
        index = next(i for i in range(15) if i / 15 < confidence <= (i + 1) / 15)
        bins.setdefault(index, []).append((confidence, float(match[p.argmax()] == t)))
    expected = sum(abs(sum(c for c, _ in rows) - sum(r for _, r in rows)) for rows in bins.values()) / 300
    assert clustering_metrics(probs, targets)["ece"].item() == pytest.approx(expected, rel=1e-9)


def test_renaming_clusters_changes_nothing():
    probs, targets = sample()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3))
    for name, value in clustering_metrics(probs, targets).items():
        torch.testing.assert_close(clustering_metrics(probs[:, order], targets)[name], value)


def test_unknown_classes_are_left_out():
    probs, targets = sample()
    some = targets.clone()
    some[::3] = -1
    expected = clustering_metrics(probs[some >= 0], some[some >= 0])
    for name, value in clustering_metrics(probs, some).items():
        torch.testing.assert_close(value, expected[name])
    for metric in (ClusterAccuracy(5), ClusterCalibrationError(5)):
        metric.update(probs, some)
        key = "acc" if isinstance(metric, ClusterAccuracy) else "ece"
        assert metric.compute().item() == pytest.approx(expected[key].item(), rel=1e-6)


def test_everything_in_one_cluster_is_finite():
    probs = torch.tensor([[0.9, 0.05, 0.05]]).repeat(30, 1)
    result = clustering_metrics(probs, torch.arange(30) % 3)
    assert result["acc"].item() == pytest.approx(1 / 3)
    assert all(torch.isfinite(value) for value in result.values())
    assert result["nmi"] == 0


def test_metrics_over_batches_equal_the_functions():
    probs, targets = sample(301)
    expected = clustering_metrics(probs, targets)
    metrics = {"acc": ClusterAccuracy(5), "ece": ClusterCalibrationError(5)}
    rejection = ClusterRejection(5)
    for p, t in zip(probs.split(50), targets.split(50), strict=True):
        rejection.update(p, t)
        for metric in metrics.values():
            metric.update(p, t)
    for name, metric in metrics.items():
        assert metric.compute().item() == pytest.approx(expected[name].item(), rel=1e-6)
    correct = match_clusters(probs.argmax(1), targets, 5, 5)[probs.argmax(1)] == targets
    confidence = probs.max(1).values
    result = rejection.compute()
    assert result["auroc"].item() == pytest.approx(roc_auc_score(correct, confidence), rel=1e-6)
    assert result["aurc"].item() == pytest.approx(aurc(confidence, correct).item())
    assert result["fpr95"].item() == pytest.approx(fpr_at_recall(confidence, correct).item())


def test_aurc_equals_its_definition():
    generator = torch.Generator().manual_seed(0)
    confidence, correct = torch.rand(40, generator=generator).double(), torch.rand(40, generator=generator) < 0.7
    order = sorted(range(40), key=lambda i: -confidence[i])
    risks = [sum(not correct[i] for i in order[:k]) / k for k in range(1, 41)]
    assert aurc(confidence, correct).item() == pytest.approx(sum(risks) / 40)
    metric = AURC()
    metric.update(confidence[:11], correct[:11])
    metric.update(confidence[11:], correct[11:])
    assert metric.compute().item() == pytest.approx(sum(risks) / 40)


def test_fpr_keeps_the_asked_share_of_the_right_ones():
    right, wrong = torch.arange(1, 21) / 20, torch.tensor([0.04, 0.05, 0.06, 0.10, 0.9])
    confidence, correct = torch.cat([right, wrong]), torch.arange(25) < 20
    assert fpr_at_recall(confidence, correct).item() == pytest.approx(2 / 5)  # 19 of 20 lie at or above 0.10
    assert fpr_at_recall(confidence, correct, recall=1.0).item() == pytest.approx(4 / 5)
    assert fpr_at_recall(confidence[:20], correct[:20]) == 0
    assert fpr_at_recall(confidence[20:], correct[20:]).isnan()


def test_rejection_of_a_perfect_clustering_has_no_auroc():
    metric = ClusterRejection(2)
    metric.update(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([1, 0]))
    result = metric.compute()
    assert result["auroc"].isnan()
    assert result["aurc"] == 0
    assert result["fpr95"] == 0


def _ranks_metrics(rank: int, world: int) -> list[float]:
    probs, targets = sample(101)
    local = slice(0, 60) if rank == 0 else slice(60, 101)
    values = []
    for metric in (ClusterAccuracy(5), ClusterCalibrationError(5), ClusterRejection(5)):
        metric.update(probs[local], targets[local])
        result = metric.compute()
        values += [v.item() for v in (result.values() if isinstance(result, dict) else [result])]
    return values


def test_two_processes_agree_with_one():
    one = _ranks_metrics(0, 1)
    probs, targets = sample(101)
    expected = clustering_metrics(probs, targets)
    for values in run_two_processes(_ranks_metrics):
        assert values[0] == pytest.approx(expected["acc"].item(), rel=1e-6)
        assert values[1] == pytest.approx(expected["ece"].item(), rel=1e-6)
        assert values != one


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, t: clustering_metrics(p[0], t), "probs must have shape"),
        (lambda p, t: clustering_metrics(p * 1.1, t), "sum to 1"),
        (lambda p, t: clustering_metrics(p - 0.5, t), "probabilities"),
        (lambda p, t: clustering_metrics(p, t[:-1]), "targets must have shape"),
        (lambda p, t: clustering_metrics(p, t * 0 - 1), "at least one known class"),
        (lambda p, t: clustering_metrics(p, t, num_bins=0), "num_bins"),
        (lambda p, t: ClusterAccuracy(0), "num_clusters"),
        (lambda p, t: ClusterAccuracy(5).update(p[:, :4], t), "clusters=5"),
        (lambda p, t: ClusterAccuracy(5, 2).update(p, t), "target must be in 0..1"),
        (lambda p, t: ClusterAccuracy(2).update(t, t), "preds must be in 0..1"),
        (lambda p, t: ClusterAccuracy(5).update(p, t[:-1]), "same number of rows"),
        (lambda p, t: ClusterCalibrationError(5).update(p * 2, t), "sum to 1"),
        (lambda p, t: aurc(p[:, 0], t[:-1]), "correct must have shape"),
        (lambda p, t: aurc(p[:, 0] * torch.nan, t), "NaN"),
        (lambda p, t: fpr_at_recall(p[:, 0], t == 0, recall=0.0), "recall"),
        (lambda p, t: match_clusters(t, t, 2, 5), "preds must be in 0..1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(*sample(20))
