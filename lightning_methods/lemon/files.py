"""Networks from and to files, with the ``eps`` of their normalisation layers, which a state dict does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checkpoints import load_submodule
from .expand import norm_eps, set_norm_eps, unwrap

__all__ = ["CHECKPOINT_KEY", "load_expanded", "load_source", "save_expanded"]

CHECKPOINT_KEY = "norm_eps"  # in our files, and in the Lightning checkpoints of our modules


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint: a dictionary with "state_dict", whatever the file's layout.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no weights.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}.")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no weights: neither a checkpoint nor a state dict.")
    for key in ("state_dict", "model"):  # Lightning and timm; DeiT's own files
        if isinstance(content.get(key), dict):
            return {**content, "state_dict": content[key]}
    state = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(f"{path} holds no weights: neither a checkpoint nor a state dict.")
    return {"state_dict": state}


def _find_prefix(state: dict[str, Tensor], network: nn.Module, path: str | Path) -> str:
    """Under which name a checkpoint has the weights of a network."""
    own = list(network.state_dict())
    found = [key[: -len(own[0])] for key in state if key == own[0] or key.endswith(f".{own[0]}")]
    fitting = [prefix for prefix in found if all(prefix + key in state for key in own)]
    if len(fitting) > 1:
        names = ", ".join(repr(prefix.rstrip(".")) for prefix in fitting)
        raise ValueError(
            f"{path} has several networks of this kind, {names}: give the prefix of the one that is meant."
        )
    # Where it does not fit at all, load_submodule says what is missing.
    return (fitting or found or [""])[0].rstrip(".")


def load_source(network: nn.Module, path: str | Path, prefix: str | None = None) -> nn.Module:
    """Load a trained network, with the ``eps`` of its normalisation layers if the file has them, in place.

    Args:
        network: gets the weights.
        path: a Lightning checkpoint of any module that holds the network, a file of :func:`save_expanded`, or a state
            dict; loaded with ``weights_only=True``.
        prefix: name of the network in the checkpoint, "" for the whole; None finds it by the names of the weights.

    Returns:
        ``network``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file does not have the network's weights, or has several.
    """
    content = read_checkpoint(path)
    inner = unwrap(network)
    if prefix is None:
        prefix = _find_prefix(content["state_dict"], inner, path)
    if isinstance(content.get("model"), dict):  # a layout that load_submodule does not know
        start = f"{prefix}." if prefix else ""
        part = {key[len(start) :]: value for key, value in content["state_dict"].items() if key.startswith(start)}
        try:
            inner.load_state_dict(part)
        except RuntimeError as error:
            raise ValueError(f"the weights of {path} do not fit: {error}") from None
    else:
        load_submodule(path, prefix, inner)
    eps = content.get(CHECKPOINT_KEY)
    if isinstance(eps, dict):
        start = f"{prefix}." if prefix else ""
        set_norm_eps(inner, {name[len(start) :]: value for name, value in eps.items() if name.startswith(start)})
    return network


def save_expanded(network: nn.Module, path: str | Path, **more: Any) -> None:
    """Write a network's weights and the ``eps`` of its normalisation layers.

    Args:
        network: any network.
        path: the file; its "state_dict" is what timm and torch load.
        **more: plain values to keep with them.
    """
    inner = unwrap(network)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": inner.state_dict(), CHECKPOINT_KEY: norm_eps(inner), **more}, path)


def load_expanded(network: nn.Module, path: str) -> nn.Module:
    """Load a file of :func:`save_expanded` into a network of the same architecture, in a form that a config can call.

    Args:
        network: gets weights and ``eps``, in place.
        path: the file.

    Returns:
        ``network``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the weights do not fit.
    """
    return load_source(network, path, "")
