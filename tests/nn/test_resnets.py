from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_methods.nn import CIFARResNet18, cifar_resnet


@pytest.mark.parametrize(("padding", "side"), [(1, 8), (2, 10)])
def test_stem_keeps_the_resolution(padding, side):
    network = cifar_resnet("resnet18", padding=padding, in_channels=1)
    assert network.maxpool(network.conv1(torch.randn(1, 1, 8, 8))).shape[-1] == side
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, network.num_features)


def test_classifier_and_keyword_arguments():
    network = cifar_resnet("resnet34", num_classes=7, zero_init_residual=True)
    assert network.fc.out_features == 7
    assert not network.layer1[0].bn2.weight.any()


def test_preset():
    network = CIFARResNet18(in_channels=1)
    assert network.num_features == 512
    assert network.network.conv1.padding == (2, 2)
    assert isinstance(network.network.fc, nn.Identity)
    assert not network.network.layer1[0].bn2.weight.any()


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["resnet19", "vgg16"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="torchvision ResNet"):
        cifar_resnet(name)


def test_importing_the_package_does_not_import_torchvision():
    code = (
        "import sys; from lightning_methods.nn import MLP, ConvNet; "
        "assert not {'torchvision', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
