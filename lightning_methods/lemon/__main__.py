"""``python -m lightning_methods.lemon expand SOURCE OUTPUT``: from checkpoint to checkpoint.

    # a folder of transformers -> a folder of transformers
    python -m lightning_methods.lemon expand bert-small bert-large --hidden-size 768 --num-layers 12
    # a timm model's checkpoint -> a checkpoint
    python -m lightning_methods.lemon expand deit_small.pth deit_base.pt \\
        --source-model deit_small_patch16_224 --target-model deit_base_patch16_224
    # a Lightning checkpoint of the command line describes its network
    python -m lightning_methods.lemon expand runs/lemon/digits_small/checkpoints/last.ckpt big.pt --num-layers 5
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["expand", "main"]

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
)  # fmt: skip
SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size")


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_methods.lemon",
        description="Start a large network as the function of a small one.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "expand",
        help="expand a checkpoint",
        description="Expand the network of a checkpoint and write the large one. SOURCE is a folder of transformers "
        "(OUTPUT is one too), a file with the weights of a timm or torchvision model, or a Lightning checkpoint; with "
        "these OUTPUT is a file that torch.load reads: state_dict, and norm_eps, which load_expanded sets.",
    )
    one.add_argument("source", type=Path, help="folder or file of the small network")
    one.add_argument("output", type=Path, help="folder or file of the large one")
    sizes = one.add_argument_group("the large network's size (what is not given stays)")
    sizes.add_argument("--hidden-size", type=int, metavar="N", help="width (embed_dim of a ViT)")
    sizes.add_argument("--num-layers", type=int, metavar="N", help="number of blocks (depth of a ViT)")
    sizes.add_argument("--num-heads", type=int, metavar="N", help="default: as many as keep the size of a head")
    sizes.add_argument("--intermediate-size", type=int, metavar="N", help="default: grows with the width")
    built = one.add_argument_group("files and Lightning checkpoints")
    built.add_argument("--source-model", metavar="NAME", help="timm's name, or the import path of a factory; a "
                       "Lightning checkpoint of the command line tells it itself")  # fmt: skip
    built.add_argument("--source-args", type=_arguments, default={}, metavar="JSON", help="the factory's arguments")
    built.add_argument("--target-model", metavar="NAME", help="default: the source's")
    built.add_argument("--target-args", type=_arguments, default={}, metavar="JSON", help="added to the source's")
    built.add_argument("--prefix", metavar="NAME", help="name of the network in a Lightning checkpoint")
    how = one.add_argument_group("how")
    how.add_argument("--method", default="lemon", choices=("lemon", "fpi", "aki", "stack"))
    how.add_argument("--depth-mode", default="interpolate", choices=("interpolate", "stack"))
    how.add_argument("--new-block", choices=("cancel", "zero"), help="default: cancel for ViTs, zero for BERTs")
    how.add_argument("--new-block-init", default="copy", choices=("copy", "aki"))
    how.add_argument("--split", default="projection", choices=("projection", "complement", "even"))
    how.add_argument("--free-scale", type=float, default=1.0, metavar="X", help="factor of the random weights")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of the large network's random weights")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: those of the process by default.

    Returns:
        The exit status.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        print(expand(options))
    except (ValueError, TypeError, FileNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


def expand(options: argparse.Namespace) -> str:
    """Read, expand, compare, write.

    Args:
        options: as the parser gives them.

    Returns:
        What was done, in words.
    """
    import torch

    from .expand import expand_model, max_output_difference

    if options.output.resolve() == options.source.resolve():
        raise ValueError(f"the output {options.output} is the source itself.")
    torch.manual_seed(options.seed)
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if options.source.is_dir():
        source, description = _read_folder(options.source), None
    else:
        source, description = _read_file(options)
    target, described = _target_of(source, description, sizes, options)
    target = target.to(next(source.parameters()).dtype)
    expand_model(
        source,
        target,
        options.method,
        depth_mode=options.depth_mode,
        new_block=options.new_block,
        split=options.split,
        free_scale=options.free_scale,
        new_block_init=options.new_block_init,
    )
    difference = max_output_difference(source.float(), copy.deepcopy(target).float(), _example(source))
    _write(target, described, options)
    counts = [sum(p.numel() for p in network.parameters()) / 1e6 for network in (source, target)]
    return (
        f"{options.output}: {type(target).__name__}, {counts[0]:.3f} -> {counts[1]:.3f} million parameters, largest "
        f"difference of outputs {difference:.2g}."
    )


# reading


def _read_folder(folder: Path) -> nn.Module:
    """The model of a folder that ``save_pretrained`` wrote, by the class that its configuration names."""
    import transformers

    from .modules import PreLNBertForMaskedLM

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no folder of transformers.")
    names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ["BertForMaskedLM"]
    own = {"PreLNBertForMaskedLM": PreLNBertForMaskedLM}
    kind = own.get(names[0]) or getattr(transformers, names[0], None)
    if kind is None:
        raise ValueError(f"{folder} holds a {names[0]}, which transformers does not have.")
    return kind.from_pretrained(str(folder), local_files_only=True)


Description = tuple[str, dict[str, Any]]


def _read_file(options: argparse.Namespace) -> tuple[nn.Module, Description]:
    """The network of a file, with the name and the arguments of its factory."""
    from .files import load_source, read_checkpoint

    prefix = options.prefix
    if options.source_model is not None:
        description = (options.source_model, options.source_args)
    else:
        content = read_checkpoint(options.source)
        if isinstance(content.get("factory"), str):  # a file that this command wrote
            description = (content["factory"], content.get("arguments", {}))
        else:
            prefix, description = _described(content, prefix, options.source)
        description = (description[0], {**description[1], **options.source_args})
    network = _build(*description)
    return load_source(network, options.source, prefix), description


def _described(content: dict[str, Any], prefix: str | None, path: Path) -> tuple[str, Description]:
    """Which network a Lightning checkpoint's hyper-parameters describe."""
    described = {
        name: value
        for name, value in content.get("hyper_parameters", {}).items()
        if isinstance(value, dict) and "class_path" in value
        and any(key.startswith(f"{name}.") for key in content["state_dict"])
    }  # fmt: skip
    if prefix is not None:
        described = {name: value for name, value in described.items() if name == prefix}
    if len(described) != 1:
        found = f"several networks ({', '.join(described)}): give --prefix" if described else "no network"
        raise ValueError(f"{path} describes {found}. Where it describes none, give --source-model and --source-args.")
    (name, value), *_ = described.items()
    arguments = {**dict(value.get("init_args") or {}), **dict(value.get("dict_kwargs") or {})}
    factory = value["class_path"]
    if factory in ("timm.create_model", "timm.models._factory.create_model"):
        factory = arguments.pop("model_name")
    return name, (factory, arguments)


def _build(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A network by timm's name, or by the import path of what makes it."""
    if "." in name and ":" not in name:
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                continue
            for part in parts[end:]:
                found = getattr(found, part, None)
            if found is not None:
                return found(**arguments)
            break
    import timm

    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:5])
        raise ValueError(f"{name} is neither a model of timm nor an import path.{f' timm has {near}.' if near else ''}")
    return timm.create_model(name, **{**arguments, "pretrained": False})


# the large network


def _target_of(
    source: nn.Module, description: Description | None, sizes: dict[str, int], options: argparse.Namespace
) -> tuple[nn.Module, Description | None]:
    """A random network of the wanted size."""
    if hasattr(source, "config") and hasattr(source.config, "hidden_size"):
        if options.target_model is not None or options.target_args:
            raise ValueError("a model of transformers grows by --hidden-size, --num-layers, --num-heads and "
                             "--intermediate-size; --target-model and --target-args are for others.")  # fmt: skip
        return type(source)(_grown_config(source.config, sizes)), None
    if description is None:
        raise ValueError(f"{options.source} holds a {type(source).__name__}, which is no BERT.")
    name = options.target_model or description[0]
    arguments = {**_kept(description, name), **_vit_sizes(source, sizes), **options.target_args}
    return _build(name, arguments), (name, arguments)


def _grown_config(config: Any, sizes: dict[str, int]) -> Any:
    """A BERT's configuration with other sizes."""
    grown = copy.deepcopy(config)
    head, ratio = config.hidden_size // config.num_attention_heads, config.intermediate_size / config.hidden_size
    grown.hidden_size = sizes.get("hidden_size", config.hidden_size)
    grown.num_hidden_layers = sizes.get("num_layers", config.num_hidden_layers)
    grown.num_attention_heads = sizes.get("num_heads", grown.hidden_size // head)
    grown.intermediate_size = sizes.get("intermediate_size", round(ratio * grown.hidden_size))
    return grown


def _kept(description: Description, name: str) -> dict[str, Any]:
    """The source's arguments; of another model those that do not say how large it is."""
    if name == description[0]:
        return dict(description[1])
    size = ("embed_dim", "depth", "num_heads", "mlp_ratio", "layers", "width_per_group", "pretrained", *SIZES)
    return {key: value for key, value in description[1].items() if key not in size}


def _vit_sizes(source: nn.Module, sizes: dict[str, int]) -> dict[str, Any]:
    """timm's names of the sizes."""
    if not sizes:
        return {}
    if not hasattr(source, "embed_dim"):
        raise ValueError(f"the size of a {type(source).__name__} is given by --target-model and --target-args.")
    width = sizes.get("hidden_size", source.embed_dim)
    head = source.blocks[0].attn.head_dim
    named = {"embed_dim": width, "num_heads": sizes.get("num_heads", width // head)}
    if "num_layers" in sizes:
        named["depth"] = sizes["num_layers"]
    if "intermediate_size" in sizes:
        named["mlp_ratio"] = sizes["intermediate_size"] / width
    return named


# checking and writing


def _example(source: nn.Module) -> Any:
    """Random input to compare both networks on."""
    import torch

    if hasattr(source, "config") and hasattr(source.config, "vocab_size"):
        length = min(16, source.config.max_position_embeddings)
        ids = torch.randint(source.config.vocab_size, (2, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if hasattr(source, "patch_embed"):
        return torch.randn(2, source.in_chans, *source.patch_embed.img_size)
    return torch.randn(2, source.conv1.in_channels, 64, 64)


def _write(target: nn.Module, description: Description | None, options: argparse.Namespace) -> None:
    from .files import save_expanded

    if description is not None:
        save_expanded(target, options.output, factory=description[0], arguments=description[1])
        return
    target.save_pretrained(str(options.output))
    if options.source.is_dir():
        for name in TOKENIZER_FILES:
            if (options.source / name).is_file():
                shutil.copy2(options.source / name, options.output / name)


if __name__ == "__main__":
    sys.exit(main())
