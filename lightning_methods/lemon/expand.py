"""Whole networks: timm's ViTs, the BERTs of transformers, torchvision's ResNets, and the baselines of the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..core.checks import check_choice
from ..core.modes import evaluating
from .bert import grow_bert
from .functional import DepthMode, Split
from .growth import Growth, NewBlock, NewBlockInit
from .resnet import grow_resnet
from .vit import grow_vit

__all__ = [
    "Method",
    "expand_bert",
    "expand_model",
    "expand_resnet",
    "expand_vit",
    "max_output_difference",
    "norm_eps",
    "set_norm_eps",
    "unwrap",
]

WRAPPERS = ("AveragedModel", "DataParallel", "DistributedDataParallel", "ModelEma", "ModelEmaV2", "ModelEmaV3")
Method = Literal["lemon", "fpi", "aki", "stack", "scratch"]


def unwrap(module: nn.Module) -> nn.Module:
    """The network inside of ``torch.compile``, data-parallel and averaging wrappers."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod
        elif type(module).__name__ in WRAPPERS:
            module = module.module
        else:
            return module


def _grow(source: nn.Module, target: nn.Module, grow: Any, **options: Any) -> nn.Module:
    """Expand in place what is inside of the wrappers, without gradients."""
    inner, outer = unwrap(source), unwrap(target)
    for name, network in (("source", inner), ("target", outer)):
        if any(p.is_meta for p in network.parameters()):
            raise ValueError(f"the {name} has parameters on the meta device: materialise it before the expansion.")
    with torch.no_grad():
        grow(inner, outer, **options)
    return target


def expand_vit(
    source: nn.Module,
    target: nn.Module,
    *,
    depth_mode: DepthMode = "interpolate",
    new_block: NewBlock = "cancel",
    split: Split = "projection",
    free_scale: float = 1.0,
    new_block_init: NewBlockInit = "copy",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Give a large ViT the function of a small one.

    The residual stream is average-expanded, what the LayerNorms give out zero-expanded, heads and hidden units are
    repeated circularly. The target's weights are the free matrices, so it should be at its random initialisation.
    An RMSNorm in place of the LayerNorms needs a zero-expanded stream and gets it.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4; the authors' `vit`.

    Args:
        source: a trained timm ``VisionTransformer`` (class, register and distillation tokens, LayerScale and fc_norm
            as they come); it is not changed.
        target: the same architecture, wider by whole heads and deeper as wanted; changed in place, ``eps`` of its
            LayerNorms included (see :func:`norm_eps`).
        depth_mode: where new blocks are put, see :func:`~lightning_methods.lemon.depth_map`.
        new_block: how a new block is the identity: "cancel" by weights that cancel over the copies, "zero" by zeros.
        split: how a column is divided among copies, see :func:`~lightning_methods.lemon.expand_linear`.
        free_scale: factor of the target's weights.
        new_block_init: "aki" continues the rows of a new block's other layers by those of the next source block; for
            ``new_block="zero"`` only, because copies that differ do not cancel.
        generator: source of the residue weights of the LayerNorms.

    Returns:
        ``target``.

    Raises:
        ValueError: the networks differ in more than size, or the target is smaller; another head size; with a width
            that is no multiple: a LayerNorm on the stream itself (``norm_pre``), or on queries and keys.

    Example:
        >>> import timm
        >>> vit = lambda width, depth, heads: timm.create_model(
        ...     "vit_tiny_patch16_224", img_size=32, embed_dim=width, depth=depth, num_heads=heads, num_classes=3)
        >>> small, large = vit(16, 1, 2), vit(24, 2, 3)
        >>> _ = expand_vit(small, large)
        >>> max_output_difference(small, large, torch.randn(2, 3, 32, 32)) < 1e-5
        True
    """
    growth = Growth(split=split, free_scale=free_scale, generator=generator)
    options = {"depth_mode": depth_mode, "new_block": new_block, "new_block_init": new_block_init}
    return _grow(source, target, grow_vit, growth=growth, **options)


def expand_bert(
    source: nn.Module,
    target: nn.Module,
    *,
    depth_mode: DepthMode = "interpolate",
    new_block: NewBlock = "zero",
    split: Split = "projection",
    free_scale: float = 1.0,
    new_block_init: NewBlockInit = "copy",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Give a large BERT the function of a small one.

    A BERT of transformers normalises after the residual sum (Post-LN): all is repeated circularly, which is lossless
    for multiples of the hidden size, and the affine part of the last LayerNorm of a block moves to the last of its
    copies. For :class:`~lightning_methods.lemon.PreLNBertForMaskedLM` any larger size will do, as for a ViT. The hidden
    states of the target are expanded too: those of a BertModel are the source's, repeated.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024, section 4; the authors' `lm`, which divides with
    ``split="complement"``, ``free_scale=0.1`` and fills new blocks by ``new_block_init="aki"``.

    Args:
        source: BertModel, BertForMaskedLM (tied or not), BertForSequenceClassification and the other heads of
            transformers' BERT, or PreLNBertForMaskedLM; not changed.
        target: the same class, larger; changed in place, and its configuration's ``layer_norm_eps`` with it, so that
            ``save_pretrained`` keeps the function.
        depth_mode: where new blocks are put; Post-LN knows "interpolate" only.
        new_block: how a new block is the identity.
        split: how a column is divided among copies.
        free_scale: factor of the target's weights.
        new_block_init: "aki" continues the rows of a new block's other layers by those of the next source block.
        generator: source of the residue weights of the LayerNorms.

    Returns:
        ``target``.

    Raises:
        ValueError: the networks differ in more than size (vocabulary, positions, activation, head size, labels), the
            target is smaller, or (Post-LN) its hidden size is no multiple or ``depth_mode`` is "stack".
    """
    growth = Growth(split=split, free_scale=free_scale, generator=generator)
    options = {"depth_mode": depth_mode, "new_block": new_block, "new_block_init": new_block_init}
    return _grow(source, target, grow_bert, growth=growth, **options)


def expand_resnet(
    source: nn.Module,
    target: nn.Module,
    *,
    depth_mode: DepthMode = "interpolate",
    split: Split = "projection",
    free_scale: float = 1.0,
) -> nn.Module:
    """Give a large ResNet the function of a small one.

    All channels are repeated circularly, BatchNorm statistics included. The last BatchNorm of a new block is zero, and
    ``relu(x + 0)`` is x behind another block.

    Source: Wang et al., "LEMON: Lossless model expansion", ICLR 2024; the authors' `cnn`.

    Args:
        source: a torchvision ``ResNet`` of BasicBlocks or Bottlenecks; not changed.
        target: the same kind, with more blocks in any stage or more channels anywhere; changed in place.
        depth_mode: "interpolate" spreads the new blocks over a stage, "stack" appends them.
        split: how a kernel is divided among copies.
        free_scale: factor of the target's weights.

    Returns:
        ``target``.

    Raises:
        ValueError: the networks differ in more than size, or the target is smaller.
    """
    growth = Growth("circular", "circular", split, free_scale)
    return _grow(source, target, grow_resnet, growth=growth, depth_mode=depth_mode)


def _grower(network: nn.Module) -> tuple[Any, str]:
    """The function for a network, and its kind."""
    names = {base.__name__ for base in type(network).__mro__}
    if "VisionTransformer" in names:
        return grow_vit, "vit"
    if names & {"BertPreTrainedModel", "PreLNBertForMaskedLM"}:
        return grow_bert, "bert"
    if "ResNet" in names and type(network).__module__.startswith("torchvision"):
        return grow_resnet, "resnet"
    raise TypeError(
        f"{type(network).__name__} cannot be expanded: a timm VisionTransformer, a BERT of transformers, "
        "PreLNBertForMaskedLM or a torchvision ResNet can. For another network use expand_linear and its kin."
    )


def expand_model(
    source: nn.Module,
    target: nn.Module,
    method: Method = "lemon",
    *,
    depth_mode: DepthMode = "interpolate",
    new_block: NewBlock | None = None,
    split: Split = "projection",
    free_scale: float = 1.0,
    new_block_init: NewBlockInit = "copy",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Start a large network from a small one, by LEMON or by one of the methods it is compared with.

    * "lemon": :func:`expand_vit`, :func:`expand_bert` or :func:`expand_resnet`, by the type of the networks.
    * "fpi": the same with ``split="even"`` - Net2Net, function-preserving initialisation of bert2BERT. The function is
      kept, the copies of a neuron stay equal. At indivisible widths ours has LEMON's LayerNorm rule, so that nothing
      but the split differs.
    * "aki": advanced knowledge initialisation of bert2BERT: the extra rows come from the next block, columns are split
      evenly, LayerNorms repeated, blocks stacked. Not lossless.
    * "stack": StackBERT: blocks are stacked as they are; a width grows circularly with an even split. Not lossless.
    * "scratch": the target as it is.

    Args:
        source: the small network; not changed.
        target: the large one; changed in place.
        method: how.
        depth_mode: where new blocks are put, for "lemon" and "fpi".
        new_block: how a new block is the identity; None for the default of its architecture. No choice for a ResNet.
        split: of "lemon".
        free_scale: of "lemon".
        new_block_init: of "lemon" and "fpi".
        generator: source of the residue weights of LayerNorms.

    Returns:
        ``target``.

    Raises:
        TypeError: networks that are none of the three architectures.
        ValueError: the networks do not fit each other, or an unknown option; "aki" for a ResNet.
    """
    check_choice("method", method, get_args(Method))
    if method == "scratch":
        return target
    grow, kind = _grower(unwrap(source))
    if _grower(unwrap(target))[1] != kind:
        raise ValueError(f"source and target must be of one architecture, got {type(source)} and {type(target)}.")
    lossless = method in ("lemon", "fpi")
    even = method != "lemon"
    growth = Growth(
        stream="average" if lossless and kind != "resnet" else "circular",
        normed="zero" if lossless and kind != "resnet" else "circular",
        split="even" if even else split,
        free_scale=1.0 if even else free_scale,
        exact_norm=lossless,
        generator=generator,
    )
    options: dict[str, Any] = {"depth_mode": depth_mode if lossless else "stack"}
    if kind == "resnet":
        if method == "aki":
            raise ValueError(
                "method='aki' takes rows from the next layer, which fit in transformers only, not a ResNet."
            )
    else:
        options["new_block"] = (new_block or ("cancel" if kind == "vit" else "zero")) if lossless else None
        options["new_block_init"] = new_block_init
        options["following_rows"] = method == "aki"
    if not lossless:
        options["identity"] = False
    return _grow(source, target, grow, growth=growth, **options)


# what is not in a state dict


def norm_eps(model: nn.Module) -> dict[str, float]:
    """The ``eps`` of every normalisation layer, by name.

    The expansion changes them with the width, and they are no part of a state dict: keep them beside the weights.

    Args:
        model: any network.

    Example:
        >>> norm_eps(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, eps=1e-6)))
        {'1': 1e-06}
    """
    found = ((name, getattr(layer, "eps", None)) for name, layer in unwrap(model).named_modules())
    return {name: eps for name, eps in found if isinstance(eps, float)}


def set_norm_eps(model: nn.Module, eps: Mapping[str, float]) -> nn.Module:
    """Set the ``eps`` of the named layers, in place.

    Args:
        model: the network.
        eps: what :func:`norm_eps` gave.

    Returns:
        ``model``.

    Raises:
        ValueError: a layer is not there or has no ``eps``.
    """
    layers = dict(unwrap(model).named_modules())
    for name, value in eps.items():
        if not hasattr(layers.get(name), "eps"):
            raise ValueError(f"{type(model).__name__} has no normalisation layer {name!r}.")
        layers[name].eps = value
    if hasattr(getattr(unwrap(model), "config", None), "layer_norm_eps") and len(set(eps.values())) == 1:
        unwrap(model).config.layer_norm_eps = next(iter(eps.values()))
    return model


def _tensors(output: Any) -> list[Tensor]:
    """The floating tensors of an output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


@torch.no_grad()
def max_output_difference(source: nn.Module, target: nn.Module, *inputs: Any) -> float:
    """Largest absolute difference between the outputs of two networks in eval mode.

    Where the target's output is wider (features, hidden states), its copies are compared with the source's output.

    Args:
        source: the small network.
        target: the large one.
        *inputs: arguments of both; a single dictionary is passed as keyword arguments.

    Returns:
        The difference. Both networks are left in the mode they were in, layer by layer.

    Raises:
        ValueError: the outputs do not correspond.
    """
    outputs = []
    with evaluating(source, target):
        for network in (source, target):
            keywords = len(inputs) == 1 and isinstance(inputs[0], Mapping)
            outputs.append(_tensors(network(**inputs[0]) if keywords else network(*inputs)))
    if len(outputs[0]) != len(outputs[1]) or not outputs[0]:
        raise ValueError(f"the networks give {len(outputs[0])} and {len(outputs[1])} tensors, which do not correspond.")
    differences = []
    for old, new in zip(*outputs, strict=True):
        if old.shape[:-1] != new.shape[:-1] or new.shape[-1] < old.shape[-1]:
            raise ValueError(
                f"the outputs have shapes {list(old.shape)} and {list(new.shape)}, which do not correspond."
            )
        copies = new.shape[-1] // old.shape[-1]
        copied = new[..., : copies * old.shape[-1]].unflatten(-1, (copies, -1))
        differences.append((copied.double() - old.double().unsqueeze(-2)).abs().max())
    return float(torch.stack(differences).max())
