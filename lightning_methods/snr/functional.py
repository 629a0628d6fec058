"""Self-Normalized Resets: when a silent unit counts as dead, and what resetting it means, as tensor functions.

Symbols: A_i is the inter-firing time of unit i, a_i its age (examples since it last fired), tau_i its threshold and eta
the rejection level. A unit is reset when ``P(A_i >= a_i) <= eta``, that is when a_i reaches the (1 - eta) percentile of
A_i.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.checks import check_choice, check_range, check_shape
from ..core.layers import LayerPair, find_layer_pairs
from ..core.teacher import frozen_copy

__all__ = [
    "LayerPair",
    "cbp_utility",
    "check_optimizer_state",
    "empirical_tail",
    "find_layer_pairs",
    "firing_mask",
    "fresh_layer",
    "geometric_tail",
    "lecun_normal_",
    "outgoing_magnitude",
    "redo_scores",
    "reset_units",
    "units_of",
    "update_ages",
    "update_thresholds",
]

INITS = ("module", "lecun_normal")
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# What optimisers keep for every entry of a parameter by itself, and what the entry starts from: zero.
ENTRYWISE_STATE = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
    "sum",
}  # fmt: skip


# firing, ages, thresholds


def _other_dims(x: Tensor, channel_dim: int) -> tuple[int, ...]:
    """The dimensions of examples and positions of [B, C, ...]."""
    if x.dim() < 2:
        raise ValueError(f"a layer's output must have a batch and a channel dimension, got shape {list(x.shape)}.")
    if not -x.dim() <= channel_dim < x.dim() or channel_dim % x.dim() == 0:
        raise ValueError(f"channel_dim must name a dimension after the batch of {list(x.shape)}, got {channel_dim}.")
    return tuple(dim for dim in range(x.dim()) if dim != channel_dim % x.dim())


def any_positive(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """``(x > 0).any(dims)`` by way of the maximum: one pass over memory, several times faster on a CPU."""
    return x.amax(dim=dims) > 0 if x.numel() else (x > 0).any(dim=dims)


def firing_mask(preactivation: Float[Tensor, "batch *dims"], channel_dim: int = 1) -> Bool[Tensor, " channels"]:
    """Which units fire in a batch: pre-activation above zero for any example and any position. Exactly zero is silent.

    Source: Self-Normalized Resets, section on firing; the authors' released code.

    Args:
        preactivation: what goes into the ReLU, [B, C, ...] (or [B, ..., C] with ``channel_dim=-1``).
        channel_dim: the dimension of the units.

    Returns:
        bool [C].

    Raises:
        ValueError: there is no such dimension.

    Example:
        >>> firing_mask(torch.tensor([[0.5, -1.0, 0.0], [-0.5, -1.0, -2.0]]))
        tensor([ True, False, False])
    """
    return any_positive(preactivation, _other_dims(preactivation, channel_dim))


def add_observation_(histogram: Tensor, ages: Tensor, where: Tensor, bin_width: int = 1) -> Tensor:
    """Count ``ages`` in place for the units in ``where``; ages beyond the last bin are not counted."""
    bins = torch.div(ages, bin_width, rounding_mode="floor")
    counted = where & (bins < histogram.shape[1])
    bins = bins.clamp_max(histogram.shape[1] - 1)
    return histogram.scatter_add_(1, bins[:, None], counted[:, None].to(histogram.dtype))


def update_ages(
    fired: Bool[Tensor, " channels"],
    ages: Int[Tensor, " channels"],
    batch_size: int | Int[Tensor, " channels"],
    histogram: Int[Tensor, "channels bins"] | None = None,
    *,
    bin_width: int = 1,
) -> tuple[Int[Tensor, " channels"], Int[Tensor, "channels bins"] | None]:
    """Age the silent units by the batch and set the firing ones to zero, after counting the age at which they fired.

    Source: Self-Normalized Resets, Algorithm 1, in the order of the authors' released code.

    Args:
        fired: units that fired in this batch, [C].
        ages: examples since each unit last fired, before this batch, [C].
        batch_size: examples in the batch (or for each unit).
        histogram: how often each unit fired at each age, [C, tau_max / bin_width + 1]; older ages are not counted.
        bin_width: examples in a bin.

    Returns:
        New ages and new histogram (None if there was none); the arguments stay as they are.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> ages, _ = update_ages(torch.tensor([True, False]), torch.tensor([32, 32]), 16)
        >>> ages
        tensor([ 0, 48])
    """
    check_shape("ages", ages, "channels", channels=len(fired))
    check_range("bin_width", bin_width, 1)
    if histogram is not None:
        check_shape("histogram", histogram, "channels bins", channels=len(fired))
        histogram = add_observation_(histogram.clone(), ages, fired, bin_width)
    return torch.where(fired, 0, ages + batch_size), histogram


def update_thresholds(
    histogram: Int[Tensor, "channels bins"],
    thresholds: Int[Tensor, " channels"],
    *,
    percentile: float,
    expansion_factor: float = 2.0,
    min_threshold: int = 100,
    max_threshold: int,
    bin_width: int = 1,
) -> Int[Tensor, " channels"]:
    """Move each unit's threshold to the percentile of its inter-firing times, or beyond what it has seen.

    With q_i the smallest age at which the distribution without bin 0 (consecutive firings) reaches the percentile:
    ``tau_i <- q_i`` where q_i < tau_i, else ``tau_i <- expansion_factor * tau_i`` (truncated), then clipped. A unit
    without observations besides bin 0, because it always fires or never does, gets q_i = 1 and so the minimum: it is
    reset soon after it dies.

    Source: the authors' released code (the histogram is cleared by the caller afterwards).

    Args:
        histogram: counts of inter-firing times, [C, bins].
        thresholds: tau in examples, [C].
        percentile: 1 - eta, in (0, 1).
        expansion_factor: growth where the percentile lies at or beyond tau.
        min_threshold: smallest tau in examples.
        max_threshold: largest tau in examples.
        bin_width: examples in a bin.

    Returns:
        New thresholds of the dtype of ``thresholds``, [C].

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    check_shape("thresholds", thresholds, "channels", channels=len(histogram))
    check_range("percentile", percentile, 0, 1, low_open=True, high_open=True)
    check_range("expansion_factor", expansion_factor, 1)
    if min_threshold > max_threshold:
        raise ValueError(f"min_threshold must be at most max_threshold, got {min_threshold} and {max_threshold}.")
    counts = histogram[:, 1:].cumsum(dim=1)
    total = counts[:, -1:] if counts.shape[1] else counts.new_zeros(len(counts), 1)
    # On counts, not on their ratio: 0 / 0 cannot occur. The factor keeps the rounding of the product out.
    reached = counts >= (percentile * (1 - 1e-12)) * total.double()
    first = reached.int().argmax(dim=1) + 1 if counts.shape[1] else torch.ones_like(thresholds)
    quantile = torch.where(total[:, 0] > 0, first * bin_width, 1)
    expanded = (thresholds * float(expansion_factor)).to(thresholds.dtype)
    moved = torch.where(quantile < thresholds, quantile.to(thresholds.dtype), expanded)
    return moved.clamp(min_threshold, max_threshold)


def geometric_tail(
    age: Int[Tensor, " channels"] | Float[Tensor, " channels"], mean: Float[Tensor, " channels"]
) -> Float64[Tensor, " channels"]:
    """P(A >= age) for a geometric inter-firing time A in 1, 2, ... with the given mean: ``(1 - 1/m)^(a - 1)``.

    A mean of at most 1 is a unit that always fires: P(A >= 1) = 1 and P(A >= 2) = 0. Age and mean have the same unit
    (steps).

    Args:
        age: steps since each unit last fired, [C].
        mean: mean steps from one firing to the next, [C].

    Returns:
        Probabilities in float64, [C].

    Example:
        >>> geometric_tail(torch.tensor([1, 2, 3]), torch.tensor([2.0, 2.0, 1.0]))
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    check_shape("mean", mean, "channels", channels=len(age))
    later = (age.double() - 1).clamp_min(0)
    rate = torch.log1p(-1 / mean.double().clamp_min(1))  # -inf where the unit always fires
    return torch.where(later > 0, torch.exp(later * rate), 1.0)


def empirical_tail(
    age: Int[Tensor, " channels"], window: Int[Tensor, "channels window"]
) -> Float64[Tensor, " channels"]:
    """Share of the last inter-firing times above the age: ``P(A > age)``; at most eta once age reaches their quantile.

    The smallest value with distribution function >= 1 - eta is reached exactly when this is <= eta.

    Args:
        age: examples since each unit last fired, [C].
        window: the last inter-firing times of each unit in examples, [C, W]; negative entries are empty places.

    Returns:
        Shares in float64, [C]; 1 for a unit without observations.
    """
    check_shape("window", window, "channels window", channels=len(age))
    count = (window >= 0).sum(dim=1)
    above = (window > age[:, None]).sum(dim=1)
    return torch.where(count > 0, above.double() / count.clamp_min(1), 1.0)


# competitors


def redo_scores(activation: Float[Tensor, "batch *dims"], channel_dim: int = 1) -> Float[Tensor, " channels"]:
    """ReDo's score: ``s_i = E|h_i| / mean_k E|h_k|`` over examples and positions of one layer.

    Source: Sokar et al. (2023), equation (1).

    Args:
        activation: the layer's output after its non-linearity, [B, C, ...].
        channel_dim: the dimension of the units.

    Returns:
        Scores, [C]; 0 everywhere if the whole layer is silent. Float32 at least.
    """
    dtype = torch.promote_types(activation.dtype, torch.float32)
    return normalized_scores(activation.abs().mean(dim=_other_dims(activation, channel_dim), dtype=dtype))


def normalized_scores(magnitude: Tensor) -> Tensor:
    """Mean absolute activations [C] relative to their mean over the layer."""
    mean = magnitude.mean()
    return magnitude / torch.where(mean > 0, mean, 1)


def cbp_utility(
    activation: Float[Tensor, "batch *dims"],
    weight_out: Float[Tensor, "out columns *kernel"],
    utility: Float[Tensor, " channels"],
    decay: float,
    channel_dim: int = 1,
) -> Float[Tensor, " channels"]:
    """Running contribution utility of continual backprop, without bias correction.

    ``u_i <- decay * u_i + (1 - decay) * mean|h_i| * sum_k |W_out[k, i]|``

    Source: Dohare et al. (2024), equation (1).

    Args:
        activation: the layer's output after its non-linearity, [B, C, ...].
        weight_out: weight of the next layer, [K, C * columns per unit, ...].
        utility: utility so far, [C].
        decay: in [0, 1).
        channel_dim: the dimension of the units.

    Returns:
        New utility, [C].

    Raises:
        ValueError: decay outside [0, 1), or shapes that do not fit.
    """
    check_range("decay", decay, 0, 1, high_open=True)
    magnitude = activation.abs().mean(dim=_other_dims(activation, channel_dim), dtype=utility.dtype)
    check_shape("utility", utility, "channels", channels=len(magnitude))
    if weight_out.shape[1] % len(magnitude):
        raise ValueError(f"weight_out must have a multiple of {len(magnitude)} columns, got {list(weight_out.shape)}.")
    outgoing = _outgoing_view(weight_out, len(magnitude)).abs().sum(dim=(0, 1, 3))
    return decay * utility + (1 - decay) * magnitude * outgoing


# layers and their units


def units_of(layer: nn.Module) -> int:
    """Number of units of a Linear or Conv layer.

    Raises:
        ValueError: another kind of layer, or one whose weight is not a parameter of its own.
    """
    if not isinstance(layer, LAYERS):
        raise ValueError(f"units are those of Linear, Conv1d, Conv2d and Conv3d layers, got {type(layer).__name__}.")
    weight = layer._parameters.get("weight")
    if weight is None:  # a change of the product would be lost
        raise ValueError(
            f"the weight of {layer} is computed from other parameters (weight or spectral norm, pruning), single units "
            "of it cannot be reset."
        )
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{layer} does not know its size yet: run the network once before the training.")
    return weight.shape[0]


def _outgoing_view(weight: Tensor, units: int, groups: int = 1) -> Tensor:
    """A consumer's weight as [groups, out / groups, units / groups, columns of a unit]; a view where strides allow."""
    return weight.unflatten(1, (units // groups, -1)).unflatten(0, (groups, -1)).flatten(3)


def _outgoing_split(weight: Tensor, units: int, groups: int) -> Tensor:
    """The same with the kernel's dimensions left apart: always a view."""
    return weight.unflatten(1, (units // groups, -1)).unflatten(0, (groups, -1))


def _check_consumer(consumer: nn.Module, units: int) -> int:
    """Check that the units are blocks of the consumer's input; its number of groups."""
    units_of(consumer)
    width = consumer.in_features if isinstance(consumer, nn.Linear) else consumer.in_channels
    groups = getattr(consumer, "groups", 1)
    if width % units or (groups > 1 and width != units):
        raise ValueError(
            f"the consumer's {width} inputs are not divisible into {units} units of equal blocks (a flatten after a "
            f"convolution gives each channel the block of its positions)."
        )
    return groups


def outgoing_magnitude(consumer: nn.Module, units: int) -> Tensor:
    """``sum |W_out|`` over everything that leaves a unit, [units].

    Raises:
        ValueError: the units are no blocks of the consumer's input.
    """
    groups = _check_consumer(consumer, units)
    return _outgoing_view(consumer.weight.detach().abs(), units, groups).sum(dim=(1, 3)).flatten()


def keep_mean_output_(consumer: nn.Module, mean: Tensor) -> None:
    """Add ``W_out[:, i] * mean_i`` to a consumer's bias, for units that are about to lose their outgoing weights.

    Args:
        consumer: the next layer; nothing happens if it has no bias.
        mean: mean activation of the units to be reset, zero for all others, [units].
    """
    if consumer.bias is None:
        return
    groups = _check_consumer(consumer, len(mean))
    weight = _outgoing_view(consumer.weight.detach(), len(mean), groups).sum(dim=3)
    gain = torch.einsum("goc,gc->go", weight, mean.to(weight.dtype).view(groups, -1)).flatten()
    consumer.bias.data.add_(gain)


def lecun_normal_(weight: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fill with a truncated normal of variance 1 / fan_in (cut at two deviations), as flax's Dense and Conv start.

    Args:
        weight: [out, in, ...], changed in place.
        generator: source of the random numbers, on the weight's device.
    """
    # The deviation of a standard normal cut at +-2.
    std = math.sqrt(1 / weight[0].numel()) / 0.87962566103423978
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)


def _seed_device(device: torch.device, seed: int) -> None:
    backend = torch.get_device_module(device)
    if not hasattr(backend, "device"):  # one device only
        backend.manual_seed(seed)
        return
    with backend.device(device):
        backend.manual_seed(seed)


def fresh_layer(layer: nn.Module, init: str = "module", generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Draw new parameters from a layer's initial distribution; the layer and the global generators stay as they are.

    Args:
        layer: a module with ``reset_parameters``.
        init: "module" calls the layer's own ``reset_parameters`` on a copy; "lecun_normal" is a truncated normal of
            variance 1 / fan_in with zero biases, for Linear and Conv layers.
        generator: CPU generator that decides the draw; None takes one number from the global CPU generator.

    Returns:
        The new parameters by name; zeros for those that ``reset_parameters`` leaves as they are.

    Raises:
        ValueError: an unknown init, or a layer that cannot re-initialise itself.
    """
    check_choice("init", init, INITS)
    parameters = {name: p for name, p in layer._parameters.items() if p is not None}
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    if not parameters:
        return {}
    if not hasattr(layer, "reset_parameters"):
        raise ValueError(f"{type(layer).__name__} has no reset_parameters; its initial distribution is not known.")
    seed = int(torch.randint(2**62, (), generator=generator))
    # reset_parameters knows the global generator only: it is lent out and given back.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices that are not restored, too
        if devices:
            _seed_device(device, seed)
        # The twin shares everything with the layer but parameters, buffers and children, which it may re-initialise.
        twin = object.__new__(type(layer))
        twin.__dict__.update(layer.__dict__)
        twin._modules = {name: m if m is None else frozen_copy(m) for name, m in layer._modules.items()}
        twin._parameters = {name: nn.Parameter(torch.zeros_like(p), p.requires_grad) for name, p in parameters.items()}
        twin._parameters.update({name: None for name, p in layer._parameters.items() if p is None})
        twin._buffers = {name: None if b is None else b.clone() for name, b in layer._buffers.items()}
        if init == "lecun_normal" and isinstance(layer, LAYERS):
            lecun_normal_(twin._parameters["weight"])
            if twin._parameters.get("bias") is not None:
                twin._parameters["bias"].zero_()
        else:
            twin.reset_parameters()
    return {name: twin._parameters[name].detach() for name in parameters}


# optimiser state


def _as_optimizers(optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> list:
    if optimizer is None:
        return []
    return [optimizer] if hasattr(optimizer, "state") else list(optimizer)


def check_optimizer_state(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None, parameters: Iterable[Tensor]
) -> None:
    """Check that what the optimisers keep for these parameters can be reset entry by entry.

    Raises:
        ValueError: a state that is factored, quantised, or otherwise not one number per entry.
    """
    parameters = list(parameters)
    for one in _as_optimizers(optimizer):
        for parameter in parameters:
            for key, value in one.state.get(parameter, {}).items():
                if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    continue
                single = isinstance(value, Tensor)
                if single and value.numel() <= 1 and key not in ENTRYWISE_STATE:
                    continue
                fits = single and value.shape == parameter.shape and value.is_floating_point()
                if key not in ENTRYWISE_STATE or not fits:
                    kind = f"shape {list(value.shape)}, {value.dtype}" if single else f"a {type(value).__name__}"
                    raise ValueError(
                        f"the state {key!r} of {type(one).__name__} ({kind}) cannot be reset for single units of a "
                        f"parameter of shape {list(parameter.shape)}. Use an optimiser that keeps one number per "
                        "entry: Adam(W), NAdam, RAdam, Adamax, SGD, RMSprop, Adagrad."
                    )


def _states(optimizers: list, parameter: Tensor) -> list[Tensor]:
    """The entrywise state of a parameter in all optimisers."""
    found = []
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in ENTRYWISE_STATE and isinstance(value, Tensor):
                found.append(value)
    return found


# reset


def reset_units(
    producer: nn.Module,
    consumer: nn.Module | Sequence[nn.Module],
    units: Bool[Tensor, " channels"],
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    fresh_weight: Float[Tensor, "channels *rest"] | None = None,
    init: str = "module",
    generator: torch.Generator | None = None,
    norm: nn.Module | None = None,
) -> int:
    """Reset units in place: new incoming weights, zero bias, zero outgoing weights, clean optimiser state.

    Incoming: ``W_in[u, :]`` is a row of a fresh draw of the whole layer, ``b[u] = 0``. Outgoing: ``W_out[:, u] = 0``;
    after a flatten the block of the channel's positions. The consumer's bias stays. Of the optimiser's state exactly
    these entries become zero; Adam's ``step``, one number per tensor, stays. A normalisation between gets weight 1,
    bias 0, running mean 0 and running variance 1 at u.

    Where layers follow each other, reset from input to output: a weight between two units that are both reset is first
    zeroed as outgoing and then drawn as incoming.

    Source: Self-Normalized Resets, Algorithm 1; the authors' released code.

    Args:
        producer: Linear or Conv layer that has the units.
        consumer: the Linear or Conv layer that reads them, or several.
        units: units to reset, [C].
        optimizer: optimiser(s) that hold the parameters.
        fresh_weight: the fresh draw itself, shape of the producer's weight.
        init: where the fresh draw comes from otherwise: "module" or "lecun_normal", see :func:`fresh_layer`.
        generator: decides the draw.
        norm: the normalisation between the two.

    Returns:
        How many units were reset.

    Raises:
        ValueError: shapes that do not fit, inputs not divisible by the units, an unknown init, an optimiser whose state
            cannot be reset by entries. Nothing was changed then.

    Example:
        >>> first, second = nn.Linear(3, 2), nn.Linear(2, 1)
        >>> reset_units(first, second, torch.tensor([False, True]))
        1
        >>> second.weight[0, 1].item(), first.bias[1].item()
        (0.0, 0.0)
    """
    channels = units_of(producer)
    check_shape("units", units, "channels", channels=channels)
    if units.dtype != torch.bool:
        raise ValueError(f"units must be a boolean mask, got dtype {units.dtype}.")
    if fresh_weight is not None and fresh_weight.shape != producer.weight.shape:
        raise ValueError(
            f"fresh_weight must have the shape of the producer's weight, {list(producer.weight.shape)}, got "
            f"{list(fresh_weight.shape)}."
        )
    check_choice("init", init, INITS)
    consumers = [consumer] if isinstance(consumer, nn.Module) else list(consumer)
    optimizers = _as_optimizers(optimizer)
    check_reset(producer, consumers, norm, optimizers)
    index = units.nonzero().flatten()
    if len(index):
        reset_at_(
            producer, consumers, index.to(producer.weight.device), optimizers, fresh_weight, init, generator, norm
        )
    return len(index)


def check_reset(producer: nn.Module, consumers: Sequence[nn.Module], norm: nn.Module | None, optimizers: list) -> None:
    """Raise a ``ValueError`` if a unit of the producer could not be reset."""
    channels = units_of(producer)
    for consumer in consumers:
        _check_consumer(consumer, channels)
    if norm is not None and _norm_width(norm, channels) % channels:
        raise ValueError(f"{norm} does not normalise the {channels} units of the layer before it.")
    layers = [producer, *consumers, *([] if norm is None else [norm])]
    check_optimizer_state(optimizers, (p for layer in layers for p in layer.parameters(recurse=False)))


def _norm_width(norm: nn.Module, channels: int) -> int:
    tensor = norm.weight if getattr(norm, "weight", None) is not None else getattr(norm, "running_mean", None)
    return channels if tensor is None else tensor.shape[0]


@torch.no_grad()
def reset_at_(
    producer: nn.Module,
    consumers: Sequence[nn.Module],
    index: Tensor,
    optimizers: list,
    fresh_weight: Tensor | None = None,
    init: str = "module",
    generator: torch.Generator | None = None,
    norm: nn.Module | None = None,
) -> None:
    """:func:`reset_units` for the units at ``index`` (int64, on the layer's device) without checks or device waits."""
    channels = producer.weight.shape[0]
    if fresh_weight is None:
        fresh_weight = fresh_layer(producer, init, generator)["weight"]
    producer.weight[index] = fresh_weight.to(producer.weight)[index]
    for state in _states(optimizers, producer.weight):
        state[index] = 0
    if producer.bias is not None:
        for tensor in (producer.bias, *_states(optimizers, producer.bias)):
            tensor[index] = 0
    for consumer in consumers:
        groups = getattr(consumer, "groups", 1)
        group, column = torch.div(index, channels // groups, rounding_mode="floor"), index % (channels // groups)
        for tensor in (consumer.weight, *_states(optimizers, consumer.weight)):
            _outgoing_split(tensor, channels, groups)[group, :, column] = 0
    if norm is not None:
        _reset_norm(norm, channels, index, optimizers)


def _reset_norm(norm: nn.Module, channels: int, index: Tensor, optimizers: list) -> None:
    for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
        tensor = getattr(norm, name, None)
        if tensor is None:
            continue
        tensor.unflatten(0, (channels, -1))[index] = value
        for state in _states(optimizers, tensor):
            state.unflatten(0, (channels, -1))[index] = 0
