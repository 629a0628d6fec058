"""The transformer: the authors' numbers, PyTorch's layer, padding, positions, start, compiled once for all."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_methods.popt import PopulationTransformer, SpectrogramEncoder, stft_features
from tests.vectors import load_cases

SMALL = {"input_dim": 6, "hidden_dim": 16, "n_heads": 2, "n_layers": 2, "ffn_dim": 24}
LAYER = [
    *("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias"),
    *("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"),
    *("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
]


def small(seed: int = 0, **options) -> PopulationTransformer:
    torch.manual_seed(seed)
    return PopulationTransformer(**{**SMALL, **options}).eval()


def population(batch: int = 3, channels: int = 5, seed: int = 0, d: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, d, generator=generator)
    coords = torch.randint(200, (batch, channels, 3), generator=generator)
    return x, coords, torch.randint(2, (batch, channels), generator=generator)


def reference_state(model: PopulationTransformer, n_layers: int, dim: int) -> dict[str, Tensor]:
    """Weights in the authors' names and order, from the random numbers that the vectors were made with."""
    names = ["input_encoding.in_proj.weight", "input_encoding.in_proj.bias", "input_encoding.positional_encoding.pe"]
    names += ["input_encoding.layer_norm.weight", "input_encoding.layer_norm.bias"]
    names += [f"transformer_encoder.layers.{layer}.{name}" for layer in range(n_layers) for name in LAYER]
    spectral = [("hidden_layer", (dim, dim)), ("layer_norm", (dim,)), ("output", (12, dim))]
    shapes = {f"spec_prediction_head.{name}.weight": shape for name, shape in spectral}
    shapes |= {f"spec_prediction_head.{name}.bias": shape[:1] for name, shape in spectral}
    names += [f"spec_prediction_head.{name}.{kind}" for name, _ in spectral for kind in ("weight", "bias")]
    names += ["cls_head.weight", "cls_head.bias", "token_cls_head.weight", "token_cls_head.bias"]
    own, state = model.state_dict(), {}
    for j, name in enumerate(names):
        if name.endswith(".pe"):
            state[name] = torch.zeros(1, 5000, dim // 4)
            continue
        shape = tuple(own[name].shape) if name in own else shapes[name]
        s = np.random.RandomState(2000 + j).randn(*shape)
        if len(shape) == 1:
            value = 1 + 0.2 * s if "norm" in name and name.endswith("weight") else 0.2 * s
        else:
            value = 1.2 * s / shape[1] ** 0.5
        state[name] = torch.tensor(value, dtype=torch.float32)
    return state


@pytest.mark.parametrize("return_attention", [False, True])
def test_vectors(return_attention):
    (case,) = load_cases("popt", "network")
    given, expected = case.inputs, case.outputs
    dim, layers = given["hidden_dim"], given["n_layers"]
    model = PopulationTransformer(12, dim, given["n_head"], layers).eval()
    model.load_reference_state_dict(reference_state(model, layers, dim))
    assert (given["x"][:, 0] == 1).all()  # [CLS], which the model adds itself
    pad_mask = given["pad_mask"]
    output = model(given["x"][:, 1:], given["coords"], given["seq_id"], pad_mask[:, 1:], return_attention)
    torch.testing.assert_close(output.cls_logit, expected["cls_logit"], rtol=0, atol=1e-3)
    for name, real in (("token_logit", ~pad_mask[:, 1:]), ("hidden", ~pad_mask)):
        torch.testing.assert_close(getattr(output, name)[real], expected[name][real], rtol=0, atol=1e-3)
    assert pad_mask.any()


def test_size_is_the_papers():
    model = PopulationTransformer()
    spectral_head = (512 * 512 + 512) + 2 * 512 + (512 * 768 + 768)  # the authors count it, no loss uses it
    assert sum(p.numel() for p in model.parameters()) + spectral_head == 19_967_746


def test_layers_are_pytorchs_post_norm_layers():
    model = small()
    x, coords, seq_id = population()
    tokens = torch.cat([torch.ones(3, 1, 6), x], 1)
    tokens = model.input_encoding["in_proj"](tokens)
    from lightning_methods.popt import electrode_position_encoding

    tokens = model.input_encoding["layer_norm"](tokens + electrode_position_encoding(coords, seq_id, 16))
    for layer in model.transformer_encoder["layers"]:
        theirs = nn.TransformerEncoderLayer(16, 2, 24, 0.1, "gelu", batch_first=True, norm_first=False).eval()
        theirs.load_state_dict(layer.state_dict())
        tokens = theirs(tokens)
    torch.testing.assert_close(model(x, coords, seq_id).hidden, tokens)


def test_attention_is_of_every_head_and_changes_nothing():
    model, args = small(), population()
    plain, watched = model(*args), model(*args, return_attention=True)
    assert plain.attention is None
    assert [a.shape for a in watched.attention] == [(3, 2, 6, 6)] * 2
    torch.testing.assert_close(watched.attention[0].sum(-1), torch.ones(3, 2, 6))
    torch.testing.assert_close(watched.hidden, plain.hidden)
    assert not torch.allclose(watched.attention[0][:, 0], watched.attention[0][:, 1])


@pytest.mark.parametrize("return_attention", [False, True])
def test_padding_is_invisible(return_attention):
    model, (x, coords, seq_id) = small(), population()
    whole = model(x, coords, seq_id, None, return_attention)
    padded = [torch.cat([part, torch.full_like(part[:, :2], 7)], 1) for part in (x, coords)]
    ids = torch.cat([seq_id, seq_id[:, :2]], 1)
    mask = torch.arange(7).expand(3, -1) >= 5
    more = model(*padded, ids, mask, return_attention)
    torch.testing.assert_close(more.hidden[:, :6], whole.hidden)
    torch.testing.assert_close(more.cls_logit, whole.cls_logit)
    if return_attention:
        assert not any(layer[..., 6:].any() for layer in more.attention)
    # without the mask it is not
    assert not torch.allclose(model(*padded, ids).cls_logit, whole.cls_logit)


def test_order_of_the_channels_does_not_matter_but_their_places_do():
    model, (x, coords, seq_id) = small(), population()
    order = torch.tensor([3, 0, 4, 1, 2])
    whole, shuffled = model(x, coords, seq_id), model(x[:, order], coords[:, order], seq_id[:, order])
    torch.testing.assert_close(shuffled.cls_logit, whole.cls_logit)
    torch.testing.assert_close(shuffled.token_logit, whole.token_logit[:, order])
    assert not torch.allclose(model(x, coords.flip(1), seq_id).cls_logit, whole.cls_logit)
    assert not torch.allclose(model(x, coords, 1 - seq_id).cls_logit, whole.cls_logit)


@pytest.mark.parametrize(("options", "blind_to"), [({"use_position": False}, 1), ({"use_ensemble": False}, 2)])
def test_ablations_hide_the_place_or_the_ensemble_and_not_the_other(options, blind_to):
    model, args = small(**options), list(population())
    whole = model(*args).cls_logit
    for index in (1, 2):
        changed = list(args)
        changed[index] = torch.zeros_like(args[index])
        assert torch.equal(model(*changed).cls_logit, whole) == (index == blind_to)


def test_start_of_the_weights():
    model = small(layernorm_bias_init=1.0, identical_layers=True)
    layers = model.transformer_encoder["layers"]
    for module in (m for m in model.modules() if isinstance(m, nn.LayerNorm)):
        assert (module.weight == 1).all()
        assert (module.bias == 1).all()
    for name, value in layers[0].state_dict().items():
        assert torch.equal(value, layers[1].state_dict()[name])
    assert layers[0].linear1.weight.data_ptr() != layers[1].linear1.weight.data_ptr()  # equal, not shared
    assert not model.input_encoding["in_proj"].bias.any()
    other = small(layernorm_bias_init=0.0)
    assert not any(m.bias.any() for m in other.modules() if isinstance(m, nn.LayerNorm))
    first, second = other.transformer_encoder["layers"]
    assert not torch.equal(first.linear1.weight, second.linear1.weight)


def test_dropout_is_for_training():
    model, args = small(dropout=0.5), population()
    assert torch.equal(model(*args).cls_logit, model(*args).cls_logit)
    model.train()
    for watched in (False, True):
        a, b = (model(*args, return_attention=watched).cls_logit for _ in range(2))
        assert not torch.equal(a, b)


def test_the_position_table_is_no_part_of_the_state():
    model = small()
    assert "positions" not in model.state_dict()
    assert not any(p.shape[0] == model.max_position for p in model.parameters())
    assert model.num_features == 16


def test_reference_weights_have_to_fit():
    model = small()
    state = reference_state(PopulationTransformer(12, 32, 4, 2), 2, 32)
    with pytest.raises(ValueError, match=r"\[32, 12\] there and \[16, 6\] here"):
        model.load_reference_state_dict(state)
    own = model.state_dict()
    own.pop("cls_head.bias")
    with pytest.raises(ValueError, match=r"cls_head.bias is missing"):
        model.load_reference_state_dict(own)
    with pytest.raises(ValueError, match="surplus is unknown"):
        model.load_reference_state_dict({**model.state_dict(), "surplus": torch.zeros(1)})


def test_one_compilation_serves_subjects_with_different_channels():
    """In a process of its own: the run-time shape checks of this one are not made for the compiler."""
    program = """
import torch
from torch.nn.functional import pad
from lightning_methods.popt import PopulationTransformer

graphs = 0

def count(graph, example_inputs):
    global graphs
    graphs += 1
    return graph

def population(channels):
    zeros = torch.zeros(4, channels, dtype=torch.long)
    return torch.randn(4, channels, 6), zeros[..., None].expand(-1, -1, 3), zeros

model = PopulationTransformer(6, 16, 2, 1, 24).eval()
compiled = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
for channels in (5, 9, 31):
    args, mask = population(channels), torch.zeros(4, channels, dtype=torch.bool)
    torch.testing.assert_close(compiled(*args, mask).cls_logit, model(*args, mask).cls_logit)
assert graphs == 1, graphs

# With populations padded to a common number of channels it needs no dynamic shapes either.
torch._dynamo.reset()
graphs, compiled = 0, torch.compile(model, backend=count, dynamic=False, fullgraph=True)
for channels in (17, 24, 32):
    args = (pad(part, (*(0, 0) * (part.dim() - 2), 0, 32 - channels)) for part in population(channels))
    compiled(*args, torch.arange(32).expand(4, -1) >= channels)
assert graphs == 1, graphs
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_dim": 12}, "divisible by 8"),
        ({"hidden_dim": 24, "n_heads": 5}, "n_heads=5"),
        ({"hidden_dim": 0}, "hidden_dim"),
        ({"n_layers": 0}, "n_layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"max_position": 1}, "max_position"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PopulationTransformer(**{**SMALL, **options})


@pytest.mark.bad_input
def test_bad_input():
    model, (x, coords, seq_id) = small(max_position=200), population()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    empty = mask.clone()
    empty[1] = True
    bad = [
        ((x[..., :4], coords, seq_id), "input_dim=6"),
        ((x, coords[:, :3], seq_id), "channels=5"),
        ((x, coords + 100, seq_id), r"in \[0, 200\).*to 2\d\d"),
        ((x, coords - 250, seq_id), "from -2"),
        ((x, coords, seq_id[:, :2]), "seq_id"),
        ((x, coords, seq_id, mask[:, :4]), "pad_mask"),
        ((x, coords, seq_id, mask.long()), "boolean"),
        ((x, coords, seq_id, empty), r"samples \[1\] are padding"),
    ]
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            model(*args)
    model(x, coords, seq_id, mask)


def test_the_front_end_takes_the_mean_of_the_middle_frames():
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, spectrogram: Tensor) -> Tensor:
            return self.scale * spectrogram[..., :7]

    encoder = SpectrogramEncoder(Frames())
    signal = torch.randn(3, 5 * 2048, generator=torch.Generator().manual_seed(0))
    frames = stft_features(signal)
    middle = frames.shape[1] // 2
    torch.testing.assert_close(encoder(signal), 2 * frames[:, middle - 5 : middle + 5, :7].mean(1))
    assert not encoder.network.scale.requires_grad
    assert not encoder.train().network.training
    with pytest.raises(ValueError, match="10 frames"):
        encoder(signal[:, :1200])
