"""Which layers of a network hold weights, and which of them feed each other through unit-wise operations only."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["LayerPair", "find_layer_pairs", "weight_layers"]

PRODUCERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# What acts on every unit by itself; only torch's own classes, whose meaning is known.
ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.Softplus,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softsign, nn.Threshold,
)  # fmt: skip
POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
KNOWN = (*PRODUCERS, *NORMS, *ACTIVATIONS, *POOLS, *DROPOUTS, nn.Flatten, nn.Identity)

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(F, name) for name in ("relu", "relu6", "leaky_relu", "gelu", "silu", "mish", "elu", "selu")},
    **{name: getattr(F, name) for name in ("celu", "softplus", "hardswish", "hardsigmoid", "hardtanh", "softsign")},
    "logsigmoid": F.logsigmoid,
    "relu_": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_POOLS = {f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}
# Files of the libraries we build on that hold element-wise activations and nothing else.
_ELEMENTWISE_MODULES = {"transformers.activations", "timm.layers.activations"}
_SIZES = {"size", "dim"}
_ATTRIBUTES = {"shape", "ndim", "dtype", "device"}
_SPACE = {(2, 3), (-2, -1), (-1, -2), (2, 3, 4)}


class LayerPair(NamedTuple):
    """A layer whose units reach exactly one other layer, through unit-wise operations only.

    Attributes:
        name: the producer's name in ``named_modules()``.
        producer: Linear or Conv; its output channels are the units.
        norm: the normalisation between the two, if there is one.
        consumer: Linear or Conv; its input columns are the units (times spatial positions after a flatten).
        activation: the non-linearity between the two as a function, if there is one.
        norm_first: whether the normalisation acts before the activation (a unit's sign is then the normalised one).
    """

    name: str
    producer: nn.Module
    norm: nn.Module | None
    consumer: nn.Module
    activation: Callable[[Tensor], Tensor] | None = None
    norm_first: bool = True


def weight_layers(
    module: nn.Module,
    types: type[nn.Module] | tuple[type[nn.Module], ...] = PRODUCERS,
    skip: Sequence[str] = (),
    *,
    include_tied: bool = True,
) -> dict[str, nn.Module]:
    """The layers of some types that hold a ``weight``, by name, in the order of definition.

    A weight that several modules share is listed once, under the first of its names.

    Args:
        module: any network.
        types: classes to look for.
        skip: fnmatch patterns on the qualified names, e.g. ``"*.head"``.
        include_tied: False leaves out every layer whose weight another module of any type uses too (a language model's
            head that is tied to its embedding).

    Returns:
        ``{qualified name: layer}``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> list(weight_layers(net, nn.Linear, skip=["2"]))
        ['0']
    """
    uses = _weight_uses(module)
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, types) or not isinstance(weight, Tensor) or id(weight) in seen:
            continue
        if any(fnmatch(name, pattern) for pattern in skip) or (not include_tied and uses[id(weight)] > 1):
            continue
        seen.add(id(weight))
        found[name] = layer
    return found


def find_layer_pairs(module: nn.Module) -> list[LayerPair]:
    """Find the producer-consumer pairs of layers that a network's structure proves.

    The forward functions are traced symbolically (``torch.fx``); a part that cannot be traced is looked at child by
    child, which still sees every ``nn.Sequential`` in it. A pair is a Linear or Conv whose output goes to one Linear or
    Conv and nowhere else, through activation, normalisation, pooling, dropout and flatten only. What cannot be proven
    is left out with a warning: residual sums, several consumers, shared or parametrised weights, reshapes that mix
    units. The last layer has no consumer and is left out silently.

    Args:
        module: any network. Between the networks inside a LightningModule no pair is accepted, since its training step
            may use them in other ways than ``forward`` does.

    Returns:
        The pairs, from input to output.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        >>> [(pair.name, type(pair.norm).__name__, type(pair.consumer).__name__) for pair in find_layer_pairs(net)]
        [('0', 'BatchNorm2d', 'Linear')]
    """
    uses = _weight_uses(module)
    pairs: list[LayerPair] = []
    skipped: dict[str, str] = {}
    _search(module, "", uses, pairs, skipped)
    if skipped:
        shown = [f"{name} ({reason})" for name, reason in itertools.islice(skipped.items(), 8)]
        reasons = "; ".join(shown) + (f"; and {len(skipped) - 8} more" if len(skipped) > 8 else "")
        warnings.warn(
            f"find_layer_pairs: where the units of these layers go could not be proven, they are left out: {reasons}. "
            "Name them and their consumers where they are wanted.",
            stacklevel=2,
        )
    return pairs


def _is_lightning(module: nn.Module) -> bool:
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)


def _within_one_part(target: str, module: nn.Module, consumer: nn.Module) -> bool:
    """Whether both layers are in the same child of a LightningModule, or both are its own direct children."""
    child = target.partition(".")[0]
    direct = any(consumer is layer for layer in module.children())
    return direct if child == target else any(consumer is layer for layer in getattr(module, child).modules())


def _weight_uses(module: nn.Module) -> Counter[int]:
    """How many names each weight has."""
    layers = (layer for _, layer in module.named_modules(remove_duplicate=False))
    return Counter(id(layer._parameters["weight"]) for layer in layers if layer._parameters.get("weight") is not None)


def _functional_uses(graph: fx.Graph, root: nn.Module) -> Counter[int]:
    """How often a forward reads a parameter itself, as in ``F.linear(x, self.encoder.weight.t())``."""
    return Counter(id(attrgetter(node.target)(root)) for node in graph.nodes if node.op == "get_attr")


class _Tracer(fx.Tracer):
    """Descends into everything but known layers, modules without children and what could not be traced."""

    def __init__(self, opaque: set[int]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self.opaque or isinstance(m, KNOWN) or not any(True for _ in m.children())


def _trace(module: nn.Module, opaque: set[int]) -> fx.Graph | None:
    try:
        return _Tracer(opaque).trace(module)
    except Exception:  # data-dependent control flow and the like: whatever the user's forward raises on a proxy
        return None


def _search(
    module: nn.Module, prefix: str, uses: Counter[int], pairs: list[LayerPair], skipped: dict[str, str]
) -> bool:
    """Collect the pairs below ``module``; return whether its own forward could be traced."""
    if not any(isinstance(layer, PRODUCERS) for layer in module.modules()):
        return True
    graph = _trace(module, set())
    if graph is None:
        # Which child cannot be traced? With those as black boxes the module itself may be.
        opaque: set[int] = set()
        parts: dict[bool, tuple[list[LayerPair], dict[str, str]]] = {True: ([], {}), False: ([], {})}
        for name, child in module.named_children():
            below: tuple[list[LayerPair], dict[str, str]] = ([], {})
            fine = _search(child, f"{prefix}{name}.", uses, *below)
            parts[fine][0].extend(below[0])
            parts[fine][1].update(below[1])
            if not fine:
                opaque.add(id(child))
            if isinstance(child, PRODUCERS):
                parts[True][1][f"{prefix}{name}"] = f"the forward of {type(module).__name__} could not be traced"
        graph = _trace(module, opaque) if opaque else None
        kept = (False,) if graph is not None else (True, False)
        order = {id(layer): i for i, layer in enumerate(module.modules())}
        pairs += sorted((pair for k in kept for pair in parts[k][0]), key=lambda pair: order[id(pair.producer)])
        for k in kept:
            skipped.update(parts[k][1])
        if graph is None:
            return False
    lightning = _is_lightning(module)
    uses = uses + _functional_uses(graph, module)
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node, layer in _layer_nodes(graph, module):
        result = _follow(node, layer, module, calls, uses)
        name = f"{prefix}{node.target}"
        if lightning and isinstance(result, LayerPair) and not _within_one_part(node.target, module, result.consumer):
            result = f"leaves {node.target.partition('.')[0]}, which training_step may use in another way"
        if isinstance(result, LayerPair):
            pairs.append(result._replace(name=name))
        elif result:
            skipped[name] = result
    return True


def _layer_nodes(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[fx.Node, nn.Module]]:
    if isinstance(root, PRODUCERS):  # a layer by itself: no chain
        return
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(layer := root.get_submodule(node.target), PRODUCERS):
            yield node, layer


def _follow(
    node: fx.Node, producer: nn.Module, root: nn.Module, calls: Counter[str], uses: Counter[int]
) -> LayerPair | str | None:
    """The pair that starts at a layer's node, the reason why there is none, or None for the last layer."""
    norm: nn.Module | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    norm_first, flattened, last = True, False, node
    spatial = not isinstance(producer, nn.Linear)
    while True:
        users = [user for user in last.users if not _reads_size(user)]
        if len(users) > 1:
            return "several consumers"
        if not users or users[0].op == "output":
            return None
        last = users[0]
        step = _classify(last, root)
        if step == "layer":
            break
        if isinstance(step, str):
            return step
        kind, value = step
        if kind == "norm":
            if norm is not None:
                return "two normalisations"
            if not _norm_of_units(value, producer.weight.shape[0], spatial, flattened):
                return "a normalisation that is not by units"
            norm, norm_first = value, activation is None
        elif kind == "activation":
            if activation is not None:
                return "two activations"
            activation = value
        elif kind == "flatten":
            flattened = True
        elif kind == "pool" and not spatial:
            return "pooling after a Linear layer"
    consumer = root.get_submodule(last.target)
    for target, layer in ((node.target, producer), (last.target, consumer)):
        if is_parametrized(layer) or layer._parameters.get("weight") is None:
            return "parametrised weights"
        if calls[target] > 1 or uses[id(layer.weight)] > 1:
            return "shared weights"
    units = producer.weight.shape[0]
    linear = isinstance(consumer, nn.Linear)
    width = consumer.in_features if linear else consumer.in_channels
    if spatial and linear and not flattened:
        return "a Linear layer on an image that was not flattened"
    if not spatial and not linear:
        return "a convolution after a Linear layer"
    # After a Linear layer on sequences a flatten is channel-minor, and units are no blocks of columns.
    if width != units and not (spatial and linear and width % units == 0):
        return f"{units} units into {width} inputs"
    return LayerPair("", producer, norm, consumer, activation, norm_first)


def _norm_of_units(norm: nn.Module, units: int, spatial: bool, flattened: bool) -> bool:
    """Whether the first dimension of a layer norm's weight is that of the units, or their blocks after a flatten."""
    if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return True
    shape = norm.normalized_shape
    if flattened:
        return len(shape) == 1 and shape[0] % units == 0
    # On images torch's own classes normalise the last dimensions; libraries derive channels-first ones from them.
    last = type(norm) in (nn.LayerNorm, nn.RMSNorm)
    return shape[0] == units and (len(shape) > 1 if spatial and last else len(shape) == 1)


def _reads_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZES
    return node.op == "call_function" and node.target is getattr and node.args[1] in _ATTRIBUTES


def _classify(node: fx.Node, root: nn.Module) -> str | tuple[str, object]:
    """What a node does to units: a kind with its object, ``"layer"``, or the reason why the chain ends."""
    if node.op == "call_module":
        layer = root.get_submodule(node.target)
        if isinstance(layer, PRODUCERS):
            return "layer"
        if isinstance(layer, NORMS):
            return "norm", layer
        if isinstance(layer, ACTIVATIONS):
            return "activation", layer
        if isinstance(layer, POOLS):
            return "pool", None
        if isinstance(layer, (*DROPOUTS, nn.Identity)):
            return "other", None
        if isinstance(layer, nn.Flatten) and layer.start_dim == 1 and layer.end_dim == -1:
            return "flatten", None
        if type(layer).__module__ in _ELEMENTWISE_MODULES:
            return "activation", layer
        return f"passes through {type(layer).__name__}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if node.op == "call_method" and name in {"view", "reshape"}:
        shape = node.args[1:] if not isinstance(node.args[1], (tuple, list)) else node.args[1]
        return ("flatten", None) if len(shape) == 2 and shape[1] == -1 else "a reshape"
    if name == "flatten":
        start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
        whole = len(node.args) < 3 and "end_dim" not in node.kwargs
        return ("flatten", None) if start == 1 and whole else "a flatten that mixes samples"
    if name == "mean" and _means_over_space(node):
        return "flatten", None
    if name in _FUNCTIONS:
        return "activation", _FUNCTIONS[name]
    if name in _POOLS or (name == "boolean_dispatch" and "max_pool" in str(node)):
        return "pool", None
    if name in _DROPOUTS or name in {"contiguous", "clone"}:
        return "other", None
    return f"passes through {name}"


def _means_over_space(node: fx.Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
    keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return not keep and tuple(dims if isinstance(dims, (tuple, list)) else (dims,)) in _SPACE
