from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.nn import MLP, MLPHead


def kinds(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module.modules() if not list(layer.children())]


def test_mlp_layers_in_order():
    network = MLP(4, hidden=(8, 6), out_features=3, norm="layer", activation="gelu", dropout=0.1)
    block = ["Linear", "LayerNorm", "GELU", "Dropout"]
    assert kinds(network) == ["Flatten", *block, *block, "Linear"]
    assert network.num_features == 6
    assert network(torch.randn(5, 4)).shape == (5, 3)


def test_mlp_flattens_images_and_is_an_encoder_without_a_head():
    network = MLP(64, hidden=(16,))
    x = torch.randn(7, 1, 8, 8)
    assert torch.equal(network(x), network(x.flatten(1)))
    assert network(x).shape == (7, network.num_features)


def test_mlp_without_hidden_layers_is_linear():
    network = MLP(4, hidden=(), out_features=2, bias=False)
    x = torch.randn(3, 4)
    torch.testing.assert_close(network(2 * x), 2 * network(x))
    assert [name for name, _ in network.named_parameters()] == ["head.weight"]


@pytest.mark.parametrize("norm", ["batch", "layer", None])
def test_mlp_every_parameter_takes_a_gradient(norm):
    network = MLP(4, hidden=(8, 8), out_features=2, norm=norm)
    network(torch.randn(6, 4)).pow(2).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_head_has_no_bias_before_batch_norm():
    head = MLPHead(8, 16, 4, num_layers=3)
    linears = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [layer.bias is None for layer in linears] == [True, True, False]
    assert [tuple(layer.weight.shape) for layer in linears] == [(16, 8), (16, 16), (4, 16)]
    assert kinds(head) == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear"]
    assert head.num_features == 4


def test_head_without_batch_norm_and_with_one_layer():
    plain = MLPHead(8, 16, 4, num_layers=2, batch_norm=False, bias_last=False)
    assert kinds(plain) == ["Linear", "ReLU", "Linear"]
    assert plain[0].bias is not None
    assert plain[-1].bias is None
    assert kinds(MLPHead(8, 16, 4, num_layers=1)) == ["Linear"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(0, hidden=(3,)), "in_features"),
        (lambda: MLP(3, hidden=(0,)), "hidden"),
        (lambda: MLP(3, hidden=(3,), norm="group"), "norm must be one of"),
        (lambda: MLP(3, hidden=(3,), activation="rellu"), "Did you mean 'relu'"),
        (lambda: MLP(3, hidden=(3,), dropout=1.0), "dropout"),
        (lambda: MLPHead(3, 3, 3, num_layers=0), "num_layers"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
