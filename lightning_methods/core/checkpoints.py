"""Weights of one part of a network out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from .checks import nearest

__all__ = ["load_network", "load_submodule"]


def _part(path: str | Path, prefix: str) -> dict[str, Tensor]:
    """The weights under a prefix, without it."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}.")
    content = torch.load(path, map_location="cpu", weights_only=True)
    content = content.get("state_dict", content) if isinstance(content, dict) else {}
    state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(f"{path} holds no weights: neither a checkpoint's state_dict nor a state dict of tensors.")
    start = f"{prefix.rstrip('.')}." if prefix else ""
    part = {key[len(start) :]: value for key, value in state.items() if key.startswith(start)}
    if not part:
        parts = sorted({key.split(".")[0] for key in state})
        raise ValueError(f"{path} has nothing under {prefix!r}; it has {', '.join(parts)}.{nearest(prefix, parts)}")
    return part


def load_submodule(path: str | Path, prefix: str, into: nn.Module, strict: bool = True) -> nn.Module:
    """Load the weights under ``prefix`` of a checkpoint into a module, in place.

    Args:
        path: a Lightning checkpoint, or a file with a plain state dict; loaded with ``weights_only=True``.
        prefix: name of the part in the checkpoint, e.g. "backbone"; "" for the whole state.
        into: gets the weights.
        strict: every weight has to be there and known here; otherwise those with a name in common are loaded.

    Returns:
        ``into``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no weights, none under the prefix, or they do not fit; the message names them.
    """
    part, own = _part(path, prefix), into.state_dict()
    common = [key for key in own if key in part]
    problems = [
        f"{key} is {list(part[key].shape)} there and {list(own[key].shape)} here"
        for key in common
        if part[key].shape != own[key].shape
    ]
    if strict:
        problems += [f"{key} is missing there" for key in own if key not in part]
        problems += [f"{key} is unknown here" for key in part if key not in own]
    elif not common:
        problems.append("no weight has a name in common")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the weights of {path} under {prefix!r} do not fit {type(into).__name__}: {'; '.join(problems[:5])}{more}."
        )
    into.load_state_dict({key: part[key] for key in common}, strict=False)
    return into


def load_network(network: nn.Module, path: str, prefix: str = "") -> nn.Module:
    """A network with the weights of a checkpoint: :func:`load_submodule` in the form that a config can call.

    In YAML, wherever a network is expected::

        class_path: load_network
        init_args:
          network: {class_path: SmallConvNet}
          path: runs/teacher/digits/checkpoints/last.ckpt
          prefix: network

    Args:
        network: gets the weights.
        path: a Lightning checkpoint, or a file with a plain state dict.
        prefix: name of the part in the checkpoint; "" for the whole state.

    Returns:
        ``network``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as in :func:`load_submodule`.
    """
    return load_submodule(path, prefix, network)
