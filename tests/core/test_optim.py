from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.core.optim import build_optimizer, parameter_groups


@pytest.fixture
def network():
    return nn.ModuleDict(
        {
            "backbone": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
            "backbone_two": nn.Linear(3, 3),
            "head": nn.Linear(3, 2),
        }
    )


def find(groups, parameter):
    (group,) = [g for g in groups if any(p is parameter for p in g["params"])]
    return group


def test_vectors_do_not_decay(network):
    groups = parameter_groups(network, weight_decay=0.1)
    assert sum(len(g["params"]) for g in groups) == len(list(network.parameters()))
    for parameter in network.parameters():
        assert find(groups, parameter)["weight_decay"] == (0.0 if parameter.dim() <= 1 else 0.1)
    (everything,) = parameter_groups(network, weight_decay=0.1, no_decay=None)
    assert everything["weight_decay"] == 0.1


def test_rates_by_prefix_longest_first(network):
    groups = parameter_groups(network, lr={"head": 0.5}, lr_scale={"backbone": 0.1, "backbone.2": 0.2})
    optimizer = build_optimizer(lambda g: torch.optim.SGD(g, lr=1.0, weight_decay=0.3), groups)
    built = optimizer.param_groups
    assert find(built, network["backbone"][0].weight)["lr"] == pytest.approx(0.1)
    assert find(built, network["backbone"][2].weight)["lr"] == pytest.approx(0.2)
    assert find(built, network["backbone_two"].weight)["lr"] == 1.0  # a prefix ends at a dot
    assert find(built, network["head"].weight)["lr"] == 0.5
    assert find(built, network["head"].weight)["weight_decay"] == 0.3
    assert find(built, network["head"].bias)["weight_decay"] == 0


def test_frozen_parameters_are_left_out(network):
    network["backbone"].requires_grad_(False)
    listed = [p for g in parameter_groups(network) for p in g["params"]]
    assert len(listed) == 4


@pytest.mark.bad_input
def test_unknown_prefix(network):
    with pytest.raises(ValueError, match=r"'hed'.*Did you mean 'head'"):
        parameter_groups(network, lr={"hed": 1.0})
