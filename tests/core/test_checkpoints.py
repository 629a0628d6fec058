from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_methods.core import load_network, load_submodule
from lightning_methods.nn import SmallConvNet


@pytest.fixture
def checkpoint(tmp_path):
    network = SmallConvNet((2, 3), num_classes=4)
    state = {**{f"network.{k}": v for k, v in network.state_dict().items()}, "loss.weight": torch.ones(4)}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    return tmp_path, network


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "prefix"), [("last.ckpt", "network"), ("last.ckpt", "network."), ("plain.pt", "")])
def test_loads_one_part(checkpoint, name, prefix):
    folder, network = checkpoint
    other = SmallConvNet((2, 3), num_classes=4)
    assert load_submodule(folder / name, prefix, other) is other
    assert_equal(other, network)
    assert_equal(load_network(SmallConvNet((2, 3), num_classes=4), str(folder / name), prefix), network)


def test_not_strict_loads_what_has_a_name_in_common(checkpoint):
    folder, network = checkpoint
    encoder = load_submodule(folder / "last.ckpt", "network", SmallConvNet((2, 3)), strict=False)
    assert_equal(encoder.features, network.features)


def test_messages(checkpoint, tmp_path):
    folder, _ = checkpoint
    path = folder / "last.ckpt"
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nowhere\.ckpt"):
        load_submodule("nowhere.ckpt", "", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"nothing under 'netwrk'; it has loss, network\. Did you mean 'network'"):
        load_submodule(path, "netwrk", SmallConvNet((2, 3), num_classes=4))
    with pytest.raises(ValueError, match=r"head\.weight is \[4, 3\] there and \[5, 3\] here"):
        load_submodule(path, "network", SmallConvNet((2, 3), num_classes=5), strict=False)
    with pytest.raises(ValueError, match=r"do not fit SmallConvNet: head\.weight is unknown here; head\.bias"):
        load_submodule(path, "network", SmallConvNet((2, 3)))
    with pytest.raises(ValueError, match=r"features\.0\.bias is missing there"):
        load_submodule(path, "network", SmallConvNet((2, 3), num_classes=4, norm=None))
    with pytest.raises(ValueError, match="no weight has a name in common"):
        load_submodule(path, "network", nn.Linear(2, 2), strict=False)
    torch.save({"data": [1, 2]}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="holds no weights"):
        load_submodule(tmp_path / "other.pt", "", nn.Linear(2, 2))
