"""Tiny networks whose every parameter counts: biases, tokens and normalisation weights are random, not 0 and 1."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.models import ResNet
from transformers import BertConfig

DOUBLE = torch.float64


def shuffle(network: nn.Module, seed: int) -> nn.Module:
    """Random values for what is initialised to a constant; float64."""
    generator = torch.Generator().manual_seed(seed)
    network.double()
    with torch.no_grad():
        for name, value in [*network.named_parameters(), *network.named_buffers()]:
            if not value.is_floating_point() or (value.dim() > 1 and "token" not in name and "embed" not in name):
                continue
            noise = torch.randn(value.shape, generator=generator, dtype=DOUBLE)
            value.copy_(0.5 + noise.abs() if "running_var" in name or "gamma" in name else 0.5 * noise)
    return network.eval()


def vit(width: int, depth: int, heads: int, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    size = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 5}
    network = timm.create_model(
        "vit_tiny_patch16_224", **{**size, "embed_dim": width, "depth": depth, "num_heads": heads, **options}
    )
    return shuffle(network, seed)


def images(channels: int = 1, size: int = 8) -> Tensor:
    return torch.randn(3, channels, size, size, dtype=DOUBLE, generator=torch.Generator().manual_seed(7))


def bert(kind: type, width: int, depth: int, heads: int, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    config = BertConfig(
        **{"vocab_size": 20, "intermediate_size": 2 * width, "max_position_embeddings": 10, **sizes, **options}
    )
    return shuffle(kind(config), seed)


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {
        "input_ids": torch.randint(1, 20, (2, 6), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(2, (2, 6), generator=generator),
    }


def resnet(block: type, layers: list[int], seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    network = ResNet(block, layers, num_classes=4, **options)
    return shuffle(network, seed)
