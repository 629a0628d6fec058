"""PopT: samples drawn a batch at a time against one by one, the transformer against PyTorch's layers, the maps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_methods.popt import (
    PopTBatch,
    PopulationPairs,
    PopulationTransformer,
    Recording,
    channel_connectivity,
    collate_population,
    electrode_position_encoding,
    popt_pretraining_loss,
)


def recordings(shape: dict[str, int]) -> list[Recording]:
    n, channels = shape["windows"], shape["channels"]
    coords = torch.randint(200, (channels, 3))
    return [Recording(torch.randn(n, channels, shape["d"]), coords, None, str(i)) for i in range(shape["recordings"])]


def one_by_one(data: PopulationPairs, rows: list[int]) -> PopTBatch:
    """Every sample drawn and read by itself, then collated: what a data set of samples does."""
    return collate_population([data[row] for row in rows])


def at_once(data: PopulationPairs, rows: list[int]) -> PopTBatch:
    return data.__getitems__(rows)


@pytest.mark.shapes(
    small={"batch": 48, "recordings": 6, "windows": 200, "channels": 40, "d": 16},
    treebank={"batch": 256, "recordings": 8, "windows": 60, "channels": 100, "d": 768},
)
@pytest.mark.parametrize("form", [at_once, one_by_one])
def test_pretraining_batch(measure, shape, form):
    data = PopulationPairs(recordings(shape), ensemble_sizes=[20] if shape["d"] < 100 else [50])
    rows = torch.randperm(len(data))[: shape["batch"]].tolist()
    measure(lambda: form(data, rows))


class Plain(nn.Module):
    """The same network of PyTorch's encoder layers, with weights of attention and the table made anew."""

    def __init__(self, ours: PopulationTransformer, n_heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.ours = ours
        dim = ours.hidden_dim
        layers = []
        for layer in ours.transformer_encoder["layers"]:
            plain = nn.TransformerEncoderLayer(dim, n_heads, ffn_dim, 0.0, "gelu", batch_first=True)
            plain.load_state_dict(layer.state_dict())
            layers.append(plain)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, coords: Tensor, seq_id: Tensor, pad_mask: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([x.new_ones(len(x), 1, x.shape[2]), x], dim=1)
        tokens = self.ours.input_encoding["in_proj"](tokens)
        tokens = tokens + electrode_position_encoding(coords, seq_id, self.ours.hidden_dim).to(tokens)
        tokens = self.ours.input_encoding["layer_norm"](tokens)
        mask = torch.cat([pad_mask.new_zeros(len(x), 1), pad_mask], dim=1)
        for layer in self.layers:
            mixed, _ = layer.self_attn(tokens, tokens, tokens, key_padding_mask=mask, average_attn_weights=False)
            tokens = layer.norm1(tokens + mixed)
            tokens = layer.norm2(tokens + layer.linear2(nn.functional.gelu(layer.linear1(tokens))))
        return self.ours.cls_head(tokens[:, 0]), self.ours.token_cls_head(tokens[:, 1:])


@pytest.mark.shapes(
    small={"batch": 48, "channels": 20, "input_dim": 16, "hidden_dim": 64, "n_heads": 4, "n_layers": 2, "ffn_dim": 128},
    paper={
        "batch": 8,
        "channels": 90,
        "input_dim": 768,
        "hidden_dim": 512,
        "n_heads": 8,
        "n_layers": 6,
        "ffn_dim": 2048,
    },
)
@pytest.mark.parametrize("form", ["ours", "plain"])
def test_pretraining_step(forward_backward, shape, form, device):
    options = {name: shape[name] for name in ("input_dim", "hidden_dim", "n_heads", "n_layers", "ffn_dim")}
    ours = PopulationTransformer(**options, dropout=0.0).to(device)
    plain = Plain(ours, shape["n_heads"], shape["ffn_dim"]).to(device)
    size = (shape["batch"], shape["channels"])
    coords, seq_id = torch.randint(200, (*size, 3), device=device), torch.randint(2, size, device=device)
    pad_mask = torch.zeros(size, dtype=torch.bool, device=device)
    pad_mask[1::2, -2:] = True
    label, replace_label = torch.randint(2, size[:1], device=device), torch.randint(3, size, device=device)
    replace_label = replace_label.masked_fill(pad_mask, 0)

    def loss_of(forward: Callable) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            output = forward(x, coords, seq_id, pad_mask)
            logits = (
                output if isinstance(output, tuple) and len(output) == 2 else (output.cls_logit, output.token_logit)
            )
            return popt_pretraining_loss(*logits, label, replace_label)[0]

        return loss

    forms = {"ours": loss_of(ours), "plain": loss_of(plain)}
    x = torch.randn(*size, shape["input_dim"], device=device, requires_grad=True)
    torch.testing.assert_close(forms["ours"](x), forms["plain"](x), rtol=1e-4, atol=1e-4)
    forward_backward(forms[form], x)


def channel_by_channel(model: PopulationTransformer, batch: PopTBatch) -> Tensor:
    return channel_connectivity(model, batch, chunk_size=1)


def in_chunks(model: PopulationTransformer, batch: PopTBatch) -> Tensor:
    return channel_connectivity(model, batch)


@pytest.mark.shapes(small={"batch": 16, "channels": 40})
@pytest.mark.parametrize("form", [in_chunks, channel_by_channel])
def test_connectivity(measure, shape, form, device):
    model = PopulationTransformer(16, 64, 4, 2, 128).to(device)
    size = (shape["batch"], shape["channels"])
    coords = torch.randint(200, (1, size[1], 3), device=device).expand(size[0], -1, -1)
    zeros = torch.zeros(size, dtype=torch.long, device=device)
    batch = PopTBatch(torch.randn(*size, 16, device=device), coords, zeros, zeros.bool(), torch.zeros(size[0]))
    measure(lambda: form(model, batch))
