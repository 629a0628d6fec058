from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.nn import ConvNet, SmallConvNet


def test_convnet_3_is_the_published_architecture():
    network = ConvNet()  # depth 3, width 128, 32x32: 2048 features
    assert network.num_features == 128 * 4 * 4
    convs = 3 * 128 * 9 + 128 + 2 * (128 * 128 * 9 + 128)
    assert sum(p.numel() for p in network.parameters()) == convs + 3 * 2 * 128 + 2048 * 10 + 10


@pytest.mark.parametrize(("depth", "size"), [(3, 32), (4, 64), (2, 8), (3, 28)])
def test_convnet_sizes(depth, size):
    network = ConvNet(depth, width=8, in_channels=1, num_classes=5, image_size=size)
    assert network(torch.randn(2, 1, size, size)).shape == (2, 5)
    encoder = ConvNet(depth, width=8, in_channels=1, num_classes=0, image_size=size)
    assert encoder(torch.randn(2, 1, size, size)).shape == (2, encoder.num_features)


def test_instance_norm_does_not_mix_the_batch():
    x = torch.randn(4, 3, 16, 16)
    for norm, mixes in (("instance", False), ("batch", True)):
        network = ConvNet(2, width=8, norm=norm, image_size=16)
        alone, together = network(x[:2]), network(x)[:2]
        assert torch.allclose(alone, together, atol=1e-5) is not mixes


@pytest.mark.parametrize("pool", ["max", "avg", None])
@pytest.mark.parametrize("norm", ["batch", None])
def test_small_convnet(pool, norm):
    network = SmallConvNet((4, 8), in_channels=2, num_classes=3, norm=norm, pool=pool)
    network(torch.randn(5, 2, 9, 9)).pow(2).sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    encoder = SmallConvNet((4, 8), norm=norm, pool=pool)
    assert encoder(torch.randn(5, 1, 8, 8)).shape == (5, encoder.num_features)


def test_small_convnet_pools_between_the_blocks():
    network = SmallConvNet((4, 4, 4), norm=None)
    kinds = [type(layer) for layer in network.features]
    assert kinds.count(nn.MaxPool2d) == 2
    assert kinds[0] is nn.Conv2d
    assert SmallConvNet((4, 4, 4), pool=None)(torch.randn(2, 1, 2, 2)).shape == (2, 4)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConvNet(depth=4, image_size=8), "at least 16"),
        (lambda: ConvNet(norm="layer"), "norm must be one of 'batch', 'instance'"),
        (lambda: ConvNet(width=0), "width"),
        (lambda: SmallConvNet(()), "at least one block"),
        (lambda: SmallConvNet(pool="mean"), "pool must be one of"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
