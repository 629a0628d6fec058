import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from lightning_methods.core.layers import find_layer_pairs, weight_layers
from lightning_methods.snr import (
    LayerPair,
    cbp_utility,
    empirical_tail,
    firing_mask,
    geometric_tail,
    redo_scores,
    reset_units,
    update_ages,
    update_thresholds,
)
from lightning_methods.snr import find_layer_pairs as reexported
from lightning_methods.snr.functional import add_observation_, fresh_layer, keep_mean_output_, lecun_normal_
from tests.vectors import load_cases

# the authors' numbers


@pytest.mark.parametrize("case", load_cases("snr", "ages"), ids=repr)
def test_ages_are_the_authors(case):
    z, ages, histogram = (case.inputs[name] for name in ("preactivation", "ages", "histogram"))
    kept = ages.clone(), histogram.clone()
    new_ages, new_histogram = update_ages(firing_mask(z), ages, len(z), histogram)
    assert torch.equal(new_ages, case.outputs["ages"].long())
    assert torch.equal(new_histogram, case.outputs["histogram"].long())
    assert torch.equal(ages, kept[0])
    assert torch.equal(histogram, kept[1])


@pytest.mark.parametrize("case", load_cases("snr", "thresholds"), ids=repr)
def test_thresholds_are_the_authors(case):
    options = {k: case.inputs[k] for k in ("percentile", "expansion_factor", "min_threshold", "max_threshold")}
    new = update_thresholds(case.inputs["histogram"], case.inputs["thresholds"], **options)
    assert torch.equal(new, case.outputs["thresholds"].long())


def _dense(case, k):
    """A Linear layer with the vector's weights, and an Adam that holds its moments."""
    weight = case.inputs[f"Dense_{k}.weight"]
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(case.inputs[f"Dense_{k}.bias"])
    return layer


@pytest.mark.parametrize("case", load_cases("snr", "reset"), ids=repr)
def test_reset_is_the_authors(case):
    layers = [_dense(case, k) for k in range(3)]
    adam = torch.optim.Adam([p for layer in layers for p in layer.parameters()])
    for k, layer in enumerate(layers):
        for parameter, prefix in ((layer.weight, ""), (layer.bias, "bias_")):
            adam.state[parameter] = {
                "step": torch.tensor(7.0),
                "exp_avg": case.inputs[f"Dense_{k}.{prefix}exp_avg"].clone(),
                "exp_avg_sq": case.inputs[f"Dense_{k}.{prefix}exp_avg_sq"].clone(),
            }
    for k in range(2):
        ages, thresholds = (case.inputs[f"Dense_{k}.{name}"].long() for name in ("ages", "thresholds"))
        mask = ages >= thresholds
        histogram = add_observation_(torch.zeros(20, 60, dtype=torch.long), ages, mask)
        number = reset_units(
            layers[k], layers[k + 1], mask, optimizer=adam, fresh_weight=case.inputs[f"Dense_{k}.fresh_weight"]
        )
        assert number == int(mask.sum())
        assert torch.equal(ages.masked_fill(mask, 0), case.outputs[f"Dense_{k}.ages"].long())
        assert torch.equal(histogram.sum(dim=0), case.outputs[f"Dense_{k}.histogram_sum"])
        assert torch.equal(histogram.sum(dim=1), case.outputs[f"Dense_{k}.histogram_rowsum"])
    for k, layer in enumerate(layers):
        for parameter, prefix, name in ((layer.weight, "", "weight"), (layer.bias, "bias_", "bias")):
            torch.testing.assert_close(parameter.detach(), case.outputs[f"Dense_{k}.{name}"], atol=1e-6, rtol=0)
            for moment in ("exp_avg", "exp_avg_sq"):
                wanted = case.outputs[f"Dense_{k}.{prefix}{moment}"]
                torch.testing.assert_close(adam.state[parameter][moment], wanted, atol=1e-6, rtol=0)
            assert adam.state[parameter]["step"] == 7


@pytest.mark.parametrize("case", load_cases("snr", "geometric"), ids=repr)
def test_geometric_tail(case):
    tail = geometric_tail(case.inputs["age"], case.inputs["mean"])
    torch.testing.assert_close(tail, case.outputs["tail"], atol=1e-6, rtol=1e-6)
    assert torch.equal(tail <= case.inputs["eta"], case.outputs["mask"])


@pytest.mark.parametrize("case", load_cases("snr", "redo"), ids=repr)
def test_redo_scores(case):
    score = redo_scores(case.inputs["activation"])
    torch.testing.assert_close(score, case.outputs["score"], atol=1e-6, rtol=1e-6)
    assert torch.equal(score <= case.inputs["tau"], case.outputs["mask"])


@pytest.mark.parametrize("case", load_cases("snr", "cbp"), ids=repr)
def test_cbp_utility(case):
    utility = cbp_utility(**case.inputs)
    torch.testing.assert_close(utility, case.outputs["utility"], atol=1e-6, rtol=1e-6)


def test_every_vector_is_a_test():
    assert len(load_cases("snr")) == 12
    assert {case.function for case in load_cases("snr")} == {"ages", "thresholds", "reset", "geometric", "redo", "cbp"}


# firing, ages, thresholds


def test_zero_does_not_fire_and_one_position_is_enough():
    z = torch.full((2, 3, 2, 2), -1.0)
    z[:, 1] = 0.0
    z[1, 2, 0, 1] = 1e-30
    assert firing_mask(z).tolist() == [False, False, True]
    assert firing_mask(z.movedim(1, -1), channel_dim=-1).tolist() == [False, False, True]


def test_firing_does_not_depend_on_scale_nor_order():
    z = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)) - 1.5
    fired = firing_mask(z)
    assert 0 < fired.sum() < 40
    assert torch.equal(firing_mask(z * 7), fired)
    assert torch.equal(firing_mask(z.flip(0)), fired)


def test_the_age_is_counted_before_it_is_set_to_zero():
    ages, histogram = update_ages(
        torch.tensor([True, True, False]), torch.tensor([0, 48, 48]), 16, torch.zeros(3, 65, dtype=torch.long)
    )
    assert ages.tolist() == [0, 0, 64]
    assert histogram.nonzero().tolist() == [[0, 0], [1, 48]]


def test_bins_count_what_single_ages_count():
    rng = torch.Generator().manual_seed(1)
    fine, coarse = torch.zeros(30, 161, dtype=torch.long), torch.zeros(30, 11, dtype=torch.int32)
    ages = torch.zeros(30, dtype=torch.long)
    for _ in range(200):
        fired = torch.rand(30, generator=rng) < torch.linspace(0, 0.9, 30)
        _, coarse = update_ages(fired, ages, 16, coarse, bin_width=16)
        ages, fine = update_ages(fired, ages, 16, fine)
    assert torch.equal(fine[:, ::16], coarse.long())
    assert fine.sum() == coarse.sum()
    options = {"percentile": 0.9, "min_threshold": 20, "max_threshold": 160}
    start = torch.full((30,), 100)
    assert torch.equal(
        update_thresholds(fine, start, **options), update_thresholds(coarse, start, bin_width=16, **options)
    )


def test_threshold_is_the_percentile_or_grows():
    histogram = torch.zeros(4, 1001, dtype=torch.long)
    histogram[0, 0] = 10_000  # consecutive firings do not count
    histogram[0, 200] = 98
    histogram[0, 300] = 2
    histogram[1, 700] = 5  # beyond its threshold
    histogram[3, 0] = 50  # fires always
    thresholds = torch.tensor([400, 333, 500, 500])
    options = {"min_threshold": 100, "max_threshold": 1000}
    new = update_thresholds(histogram, thresholds, percentile=0.98, **options)
    assert new.tolist() == [200, 666, 100, 100]
    assert update_thresholds(histogram, thresholds, percentile=0.99, **options)[0] == 300
    assert update_thresholds(histogram, thresholds, percentile=0.98, expansion_factor=2.5, **options)[1] == 832
    assert update_thresholds(histogram, thresholds, percentile=0.98, expansion_factor=4, **options)[1] == 1000


@pytest.mark.parametrize(("share", "total"), [(0.55, 100), (0.92, 25), (0.98, 50), (0.7, 10)])
def test_threshold_is_not_a_victim_of_rounding(share, total):
    histogram = torch.zeros(1, 500, dtype=torch.long)
    histogram[0, 150] = round(share * total)
    histogram[0, 400] = total - round(share * total)
    new = update_thresholds(histogram, torch.tensor([450]), percentile=share, max_threshold=499)
    assert new.item() == 150


def test_geometric_tail_is_a_survival_function():
    mean = torch.tensor([1.0, 0.5, 1.5, 3.0, 50.0])
    tail = torch.stack([geometric_tail(torch.full((5,), a), mean) for a in range(6)])
    assert tail.dtype == torch.float64
    assert (tail[:2] == 1).all()
    assert (tail[2:, :2] == 0).all()
    # sum of P(A >= a) over a = 1, 2, ... is the mean
    ages = torch.arange(1, 5000)
    assert geometric_tail(ages, torch.full((4999,), 3.0)).sum() == pytest.approx(3)


def test_empirical_tail_is_the_quantile_test():
    rng = torch.Generator().manual_seed(2)
    window = torch.randint(1, 60, (50, 40), generator=rng)
    window[:10, 25:] = -1
    window[10] = -1
    for eta in (0.02, 0.1, 0.35):
        for age in (5, 30, 50, 58):
            reached = empirical_tail(torch.full((50,), age), window) <= eta
            for unit in range(50):
                seen = window[unit][window[unit] >= 0]
                exact = len(seen) > 0 and (seen <= age).double().mean() >= 1 - eta - 1e-9
                assert reached[unit] == exact


def test_scores_of_a_silent_layer_are_zero_not_nan():
    assert redo_scores(torch.zeros(4, 3)).tolist() == [0, 0, 0]
    assert redo_scores(torch.rand(4, 3, 5, 5)).mean() == pytest.approx(1, abs=1e-6)


def test_cbp_utility_sums_over_all_that_leaves_a_channel():
    h = torch.rand(6, 3, 2, 2)
    out = torch.randn(5, 12)
    wanted = 0.1 * h.mean(dim=(0, 2, 3)) * out.view(5, 3, 4).abs().sum(dim=(0, 2))
    torch.testing.assert_close(cbp_utility(h, out, torch.zeros(3), 0.9), wanted)


# reset


def test_reset_touches_exactly_its_entries():
    torch.manual_seed(0)
    first, second = nn.Linear(5, 4), nn.Linear(4, 3)
    before = copy.deepcopy((first, second))
    units = torch.tensor([False, True, False, True])
    assert reset_units(first, second, units, generator=torch.Generator().manual_seed(0)) == 2
    assert torch.equal(first.weight[~units], before[0].weight[~units])
    assert (first.weight[units] != before[0].weight[units]).all()
    assert (first.weight[units].abs() <= 5**-0.5).all()
    assert torch.equal(first.bias[~units], before[0].bias[~units])
    assert (first.bias[units] == 0).all()
    assert (second.weight[:, units] == 0).all()
    assert torch.equal(second.weight[:, ~units], before[1].weight[:, ~units])
    assert torch.equal(second.bias, before[1].bias)


def test_order_of_layers_matters_and_is_input_to_output():
    """A weight between two units that are both reset is drawn anew, not zero."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    units = torch.tensor([True, False, False, False])
    for a, b in ((0, 1), (1, 2)):
        reset_units(layers[a], layers[b], units)
    assert layers[1].weight[0, 0] != 0
    assert (layers[1].weight[1:, 0] == 0).all()


def test_flatten_is_channel_major():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2))
    # Every image gives the same answer if nothing but unit 1 could tell them apart.
    with torch.no_grad():
        network[0].weight[[0, 2]] = 0
    x = torch.randn(6, 1, 3, 3)
    assert network(x).std(dim=0).max() > 0
    reset_units(network[0], network[3], torch.tensor([False, True, False]))
    assert network(x).std(dim=0).max() == 0
    assert (network[3].weight[:, 4:8] == 0).all()
    assert (network[3].weight[:, :4] != 0).all()
    assert (network[3].weight[:, 8:] != 0).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_after_a_reset_the_unit_has_no_effect_through_a_convolution(groups, layout):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3, groups=groups)).to(memory_format=layout)
    x = torch.randn(2, 2, 8, 8).contiguous(memory_format=layout)
    units = torch.tensor([False, True, True, False])
    reset_units(network[0], network[2], units)
    hidden = network[1](network[0](x))
    changed = hidden.clone()
    changed[:, units] += 5
    torch.testing.assert_close(network[2](hidden), network[2](changed))
    changed[:, ~units] += 5
    assert (network[2](hidden) - network[2](changed)).abs().max() > 0.1


def test_several_consumers_and_a_norm():
    torch.manual_seed(0)
    producer, norm, a, b = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1), nn.Linear(12, 2)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.fill_(3.0)
    reset_units(producer, [a, b], torch.tensor([True, False, False]), norm=norm)
    assert norm.weight.tolist() == [1, 3, 3]
    assert norm.bias.tolist() == [0, 3, 3]
    assert norm.running_mean.tolist() == [0, 3, 3]
    assert norm.running_var.tolist() == [1, 3, 3]
    assert (a.weight[:, 0] == 0).all()
    assert (b.weight[:, :4] == 0).all()
    assert (b.weight[:, 4:] != 0).all()


def test_norm_after_the_flatten_is_reset_in_blocks():
    norm = nn.BatchNorm1d(12)
    with torch.no_grad():
        norm.bias.fill_(2.0)
    reset_units(nn.Conv2d(1, 3, 3), nn.Linear(12, 2), torch.tensor([False, True, False]), norm=norm)
    assert norm.bias.tolist() == [2] * 4 + [0] * 4 + [2] * 4


OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "AdamW": (torch.optim.AdamW, {}, {"exp_avg", "exp_avg_sq"}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
    "plain SGD": (torch.optim.SGD, {"lr": 0.1}, set()),
    "RMSprop": (
        torch.optim.RMSprop,
        {"momentum": 0.5, "centered": True},
        {"square_avg", "momentum_buffer", "grad_avg"},
    ),
    "Adagrad": (torch.optim.Adagrad, {}, {"sum"}),
    "Adamax": (torch.optim.Adamax, {}, {"exp_avg", "exp_inf"}),
    "NAdam": (torch.optim.NAdam, {}, {"exp_avg", "exp_avg_sq"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_of_exactly_the_entries_is_zero(name):
    torch.manual_seed(0)
    cls, options, keys = OPTIMIZERS[name]
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with torch.no_grad():
        network[0].bias.fill_(2.0)  # every unit has a gradient
    optimizer = cls(network.parameters(), **options)
    for _ in range(3):
        network(torch.randn(8, 5)).square().sum().backward()
        optimizer.step()
    units = torch.tensor([True, False, True, False])
    before = copy.deepcopy({k: dict(v) for k, v in optimizer.state.items()})
    steps = [state.get("step") for state in optimizer.state.values()]
    reset_units(network[0], network[2], units, optimizer=optimizer)
    found = set()
    for parameter, mask in (
        (network[0].weight, units[:, None].expand(4, 5)),
        (network[0].bias, units),
        (network[2].weight, units.expand(3, 4)),
        (network[2].bias, torch.zeros(3, dtype=torch.bool)),
    ):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found.add(key)
                assert (value[mask] == 0).all()
                old = next(v for k, v in before.items() if k.shape == parameter.shape)[key]
                assert torch.equal(value[~mask], old[~mask])
                assert (value[~mask] != 0).any()
    assert found == keys
    assert steps == [state.get("step") for state in optimizer.state.values()]


def test_an_optimizer_whose_state_has_no_entries_is_refused_and_nothing_changes():
    network = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.Adafactor(network.parameters())
    network(torch.randn(8, 5)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(ValueError, match="Adafactor"):
        reset_units(network[0], network[2], torch.ones(4, dtype=torch.bool), optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_fresh_draw_is_decided_by_its_generator_and_leaves_the_global_one_alone():
    layer = nn.Linear(30, 20)
    state = torch.get_rng_state()
    draws = [fresh_layer(layer, init, torch.Generator().manual_seed(s))["weight"]
             for init, s in (("module", 3), ("module", 3), ("module", 4), ("lecun_normal", 3))]  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])
    torch.manual_seed(int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(3))))
    assert torch.equal(draws[0], nn.Linear(30, 20).weight)


def test_fresh_draw_does_not_touch_running_statistics():
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(5.0)
    assert fresh_layer(norm)["weight"].tolist() == [1, 1, 1, 1]
    assert norm.running_mean.tolist() == [5, 5, 5, 5]


class Attention(nn.Module):
    """Re-initialises its child with itself, as graph layers do, and leaves one parameter alone."""

    def __init__(self):
        super().__init__()
        self.project, self.weight, self.scale = (
            nn.Linear(4, 6),
            nn.Parameter(torch.zeros(6)),
            nn.Parameter(torch.ones(2)),
        )

    def reset_parameters(self):
        self.project.reset_parameters()
        nn.init.normal_(self.weight)


def test_fresh_draw_does_not_touch_children_and_is_zero_where_nothing_is_drawn():
    layer = Attention()
    before = copy.deepcopy(layer.state_dict())
    drawn = fresh_layer(layer)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert (drawn["weight"] != 0).all()
    assert drawn["scale"].tolist() == [0, 0]


@pytest.mark.bad_input
def test_layers_whose_weight_is_computed_are_refused():
    mask = torch.tensor([True, False, False, False])
    for change in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm,
                   lambda layer: prune.random_unstructured(layer, "weight", 0.5)):  # fmt: skip
        for place in (0, 2):
            network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            change(network[place])
            before = copy.deepcopy(network.state_dict())
            with pytest.raises(ValueError, match="computed from other parameters"):
                reset_units(network[0], network[2], mask)
            assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    with pytest.raises(ValueError, match="does not know its size"):
        reset_units(nn.LazyLinear(4), nn.Linear(4, 2), mask)


@pytest.mark.bad_input
def test_a_preconditioner_in_a_list_is_refused():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    optimizer.state[first.weight] = {"Q": [torch.eye(4), torch.eye(3)], "step": 3, "none": None}
    with pytest.raises(ValueError, match="'Q' of SGD"):
        reset_units(first, second, torch.tensor([True, False, False, False]), optimizer=optimizer)


def test_lecun_normal_has_variance_one_over_fan_in():
    weight = lecun_normal_(torch.empty(300, 4, 5, 5), torch.Generator().manual_seed(0))
    assert weight.var().item() == pytest.approx(1 / 100, rel=0.03)
    assert weight.abs().max() <= 2 * 0.1 / 0.8796 + 1e-6


def test_mean_output_is_kept_where_the_activation_is_its_mean():
    torch.manual_seed(0)
    consumer = nn.Linear(6, 3)
    mean = torch.tensor([0.7, 0.0])
    x = torch.cat([torch.full((1, 3), 0.7), torch.randn(1, 3)], dim=1)
    wanted = consumer(x)
    keep_mean_output_(consumer, mean)
    reset_units(nn.Conv1d(1, 2, 1), consumer, torch.tensor([True, False]))
    torch.testing.assert_close(consumer(x), wanted)


# bad input


@pytest.mark.bad_input
def test_bad_input_is_named():
    first, second = nn.Linear(5, 4), nn.Linear(4, 3)
    units = torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="units"):
        reset_units(first, second, units[:3])
    with pytest.raises(ValueError, match="boolean"):
        reset_units(first, second, units.long())
    with pytest.raises(ValueError, match="fresh_weight"):
        reset_units(first, second, units, fresh_weight=torch.zeros(5, 4))
    with pytest.raises(ValueError, match="divisible"):
        reset_units(nn.Conv2d(1, 4, 3), nn.Linear(10, 3), units)
    with pytest.raises(ValueError, match="init"):
        reset_units(first, second, units, init="xavier")
    with pytest.raises(ValueError, match="Embedding"):
        reset_units(nn.Embedding(4, 5), second, units)
    with pytest.raises(ValueError, match="normalise"):
        reset_units(first, second, units, norm=nn.LayerNorm(3))
    with pytest.raises(ValueError, match="ages"):
        update_ages(units, torch.zeros(3, dtype=torch.long), 16)
    with pytest.raises(ValueError, match="histogram"):
        update_ages(units, torch.zeros(4, dtype=torch.long), 16, torch.zeros(3, 9, dtype=torch.long))
    histogram, thresholds = torch.zeros(4, 9, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    for percentile in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="percentile"):
            update_thresholds(histogram, thresholds, percentile=percentile, max_threshold=100)
    with pytest.raises(ValueError, match="min_threshold"):
        update_thresholds(histogram, thresholds, percentile=0.9, min_threshold=101, max_threshold=100)
    with pytest.raises(ValueError, match="thresholds"):
        update_thresholds(histogram, thresholds[:2], percentile=0.9, max_threshold=100)
    with pytest.raises(ValueError, match="channel_dim"):
        firing_mask(torch.zeros(3, 4), channel_dim=0)
    with pytest.raises(ValueError, match="batch and a channel"):
        firing_mask(torch.zeros(3))
    with pytest.raises(ValueError, match="decay"):
        cbp_utility(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(4), 1.0)
    with pytest.raises(ValueError, match="weight_out"):
        cbp_utility(torch.zeros(3, 4), torch.zeros(2, 5), torch.zeros(4), 0.9)


# layers


class Functional(nn.Module):
    """The usual way of writing a network by hand."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.fc1, self.fc2 = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.adaptive_avg_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(torch.tanh(self.fc1(x.view(x.size(0), -1))))


def _pairs(network):
    return [(pair.name, pair.consumer) for pair in find_layer_pairs(network)]


def test_pairs_of_a_hand_written_network():
    network = Functional()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairs = find_layer_pairs(network)
    assert [(p.name, p.producer, p.consumer) for p in pairs] == [
        ("conv1", network.conv1, network.conv2),
        ("conv2", network.conv2, network.fc1),
        ("fc1", network.fc1, network.fc2),
    ]
    assert pairs[0].activation is F.relu
    assert pairs[2].activation is torch.tanh
    assert reexported is find_layer_pairs
    assert isinstance(pairs[0], LayerPair)


def test_pairs_know_the_norm_and_its_side():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.GroupNorm(1, 4),
        nn.Dropout(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip
    first, second = find_layer_pairs(network)
    assert first.norm is network[1]
    assert first.norm_first
    assert second.norm is network[5]
    assert not second.norm_first
    assert second.consumer is network[9]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x + self.inner(x))


def test_what_cannot_be_proven_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"inner\.2 \(passes through add\)"):
        assert [name for name, _ in _pairs(Residual())] == ["inner.0"]

    shared = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="shared weights"):
        assert _pairs(nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 2))) == []

    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    tied[2].weight = tied[0].weight
    with pytest.warns(UserWarning, match="shared weights"):
        assert _pairs(tied) == []

    weight_norm = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="parametrised"):
        assert _pairs(weight_norm) == []


class TiedByFunction(nn.Module):
    """An autoencoder whose decoder reads the encoder's weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x):
        h = self.b(self.a(x).relu()).relu()
        return F.linear(F.linear(h, self.b.weight.t()).relu(), self.a.weight.t())


def test_weights_that_a_function_reads_are_shared():
    with pytest.warns(UserWarning, match=r"a \(shared weights\)"):
        assert _pairs(TiedByFunction()) == []


class ChannelsFirstNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_layer_norm_over_positions_is_not_one_of_units():
    def conv(norm):
        return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))

    for norm in (nn.LayerNorm(8), nn.LayerNorm([8, 8]), nn.LayerNorm(4), nn.RMSNorm(8)):
        with pytest.warns(UserWarning, match="not by units"):
            assert _pairs(conv(norm)) == []
    with pytest.warns(UserWarning, match="not by units"):
        assert _pairs(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm([5, 4]), nn.ReLU(), nn.Linear(4, 2))) == []
    for network in (
        conv(nn.LayerNorm([4, 8, 8])),
        conv(ChannelsFirstNorm(4)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)),
    ):
        assert [name for name, _ in _pairs(network)] == ["0"]


def test_a_flatten_of_sequences_is_channel_minor_and_left_out():
    with pytest.warns(UserWarning, match="5 units into 15 inputs"):
        assert _pairs(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2))) == []


def test_a_linear_layer_on_an_image_is_no_consumer():
    with pytest.warns(UserWarning, match="not flattened"):
        assert _pairs(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Linear(6, 2))) == []


class Branching(nn.Module):
    """Cannot be traced: looks at its data."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(-x if x.sum() > 0 else x))


def test_parts_of_what_cannot_be_traced_are_found():
    network = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), Branching(), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)
    )
    with pytest.warns(UserWarning, match="could not be traced"):
        assert [name for name, _ in _pairs(network)] == ["2.body.0", "4"]


def test_a_lightning_module_is_not_trusted_between_its_networks():
    from lightning import LightningModule

    class Two(LightningModule):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())
            self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.fc2(self.fc1(self.encoder(x)).relu())

    with pytest.warns(UserWarning, match=r"encoder\.2"):
        assert [name for name, _ in _pairs(Two())] == ["encoder.0", "fc1"]


def test_timm_and_transformers():
    timm = pytest.importorskip("timm")
    with pytest.warns(UserWarning, match="passes through add"):
        pairs = find_layer_pairs(timm.create_model("resnet18", num_classes=3))
    assert [pair.name for pair in pairs] == [f"layer{i}.{j}.conv1" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert all(isinstance(pair.norm, nn.BatchNorm2d) for pair in pairs)


def test_weight_layers():
    network = nn.ModuleDict({"embed": nn.Embedding(7, 4), "body": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 1)})
    network["head"] = nn.Linear(4, 7, bias=False)
    network["head"].weight = network["embed"].weight
    assert list(weight_layers(network)) == ["body", "conv", "head"]
    assert list(weight_layers(network, nn.Linear, include_tied=False)) == ["body"]
    assert list(weight_layers(network, (nn.Embedding, nn.Linear))) == ["embed", "body"]
    assert list(weight_layers(network, skip=["b*", "head"])) == ["conv"]


def test_a_pair_pickles_with_its_network():
    pairs = find_layer_pairs(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    assert pickle.loads(pickle.dumps(pairs))[0].name == "0"
