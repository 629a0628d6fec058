"""Which expansion goes where in a ResNet."""

from __future__ import annotations

from torch import nn

from .functional import DepthMode, depth_map
from .growth import Growth, check_equal, check_not_smaller

__all__ = ["grow_resnet"]

STAGES = ("layer1", "layer2", "layer3", "layer4")


def stage_map(source_depth: int, target_depth: int, mode: DepthMode) -> list[tuple[int, bool]]:
    """:func:`~lightning_methods.lemon.depth_map` of a stage; its "interpolate" spreads new blocks over all of it.

    Position j copies block ``floor(j * l_s / l_t)``; the first that does so is not new. The authors' code has this rule
    for ResNets, and the other one for transformers.
    """
    blocks = depth_map(source_depth, target_depth, mode)
    if mode == "stack":
        return blocks
    indices = [j * source_depth // target_depth for j in range(target_depth)]
    return [(index, j > 0 and index == indices[j - 1]) for j, index in enumerate(indices)]


def _convolutions(block: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """The convolutions of a block, each with its BatchNorm."""
    return [(getattr(block, f"conv{k}"), getattr(block, f"bn{k}")) for k in (1, 2, 3) if hasattr(block, f"conv{k}")]


def _check_convolution(source: nn.Module, target: nn.Module) -> None:
    for name in ("kernel_size", "stride", "padding", "dilation"):
        check_equal(f"{name} of convolutions", getattr(source, name), getattr(target, name))
    if source.groups != 1 or target.groups != 1:
        raise ValueError("convolutions with groups (ResNeXt) cannot be expanded.")


def _grow_pair(growth: Growth, target: tuple, source: tuple, silent: bool = False) -> None:
    """A convolution and its BatchNorm."""
    _check_convolution(source[0], target[0])
    for what in ("out_channels", "in_channels"):
        check_not_smaller(f"{what} of convolutions", getattr(source[0], what), getattr(target[0], what))
    growth.linear(target[0], source[0], "circular", "circular")
    growth.batch_norm(target[1], source[1], silent)


def grow_resnet(
    source: nn.Module,
    target: nn.Module,
    growth: Growth,
    depth_mode: DepthMode = "interpolate",
    identity: bool = True,
) -> None:
    """Expand in place; see :func:`~lightning_methods.lemon.expand_resnet`.

    Args:
        source: a torchvision ResNet.
        target: a larger one.
        growth: the rules for single layers.
        depth_mode: where new blocks are put in every stage.
        identity: whether new blocks are the identity at all.
    """
    check_equal("max-pooling", repr(source.maxpool), repr(target.maxpool))
    check_equal("kind of block", type(source.layer1[0]).__name__, type(target.layer1[0]).__name__)
    heads = [getattr(network.fc, "out_features", None) for network in (source, target)]
    check_equal("number of classes", *heads)
    _grow_pair(growth, (target.conv1, target.bn1), (source.conv1, source.bn1))
    for stage in STAGES:
        small, large = getattr(source, stage), getattr(target, stage)
        check_not_smaller(f"number of blocks in {stage}", len(small), len(large))
        for block, (index, is_new) in zip(large, stage_map(len(small), len(large), depth_mode), strict=True):
            if is_new:
                _grow_new(growth, block, small, index, identity)
            else:
                _grow_block(growth, block, small[index])
    if heads[0] is not None:
        growth.linear(target.fc, source.fc, "circular", "circular")


def _grow_block(growth: Growth, block: nn.Module, small: nn.Module, silent: bool = False) -> None:
    pairs = list(zip(_convolutions(block), _convolutions(small), strict=True))
    for target, source in pairs:
        _grow_pair(growth, target, source, silent and target is pairs[-1][0])
    check_equal("shortcut of a block", type(small.downsample).__name__, type(block.downsample).__name__)
    if small.downsample is not None:
        check_equal("number of layers in a shortcut", len(small.downsample), len(block.downsample))
        _grow_pair(growth, tuple(block.downsample), tuple(small.downsample))


def _grow_new(growth: Growth, block: nn.Module, stage: nn.Sequential, index: int, identity: bool) -> None:
    """A block that is the identity, because ``relu(x + 0) = x`` behind the ReLU of the block before.

    A stage's first block has a stride, other input channels and a shortcut; a new block in its place copies the second
    one, or, where there is none, keeps its random weights.
    """
    if index == 0 and stage[0].downsample is not None:
        index = 1
    if index < len(stage):
        _grow_block(growth, block, stage[index], identity)
    elif identity:
        last = _convolutions(block)[-1][1]
        last.weight.zero_()
        last.bias.zero_()
