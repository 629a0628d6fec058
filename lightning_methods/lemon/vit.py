"""Which expansion goes where in a ViT."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .functional import DepthMode, depth_map
from .growth import Growth, NewBlock, NewBlockInit, check_equal, check_new_block, check_not_smaller, norm_kind

__all__ = ["grow_vit"]

TOKENS = ("cls_token", "reg_token", "dist_token", "pos_embed")
SAME = ("num_classes", "in_chans", "global_pool", "has_class_token", "num_reg_tokens", "no_embed_class",
        "pool_include_prefix", "dynamic_img_size")  # fmt: skip


def _check_block(block: nn.Module) -> None:
    """Only the plain block is known to be a sum of two parts behind a normalisation."""
    from timm.layers import Attention, Mlp
    from timm.models.vision_transformer import Block

    for layer, kind in ((block, Block), (getattr(block, "attn", None), Attention), (getattr(block, "mlp", None), Mlp)):
        if type(layer) is not kind:
            raise ValueError(f"only timm's {kind.__name__} can be expanded, this network has {type(layer).__name__}.")
    if not isinstance(block.mlp.fc1, nn.Linear):
        raise ValueError("only an Mlp of linear layers can be expanded, this one has convolutions.")


def _check(source: nn.Module, target: nn.Module, exact: bool) -> None:
    check_equal("class", type(source).__name__, type(target).__name__)
    for name in SAME:
        check_equal(name, getattr(source, name, None), getattr(target, name, None))
    for name in ("patch_size", "img_size"):
        check_equal(name, getattr(source.patch_embed, name, None), getattr(target.patch_embed, name, None))
    for network in (source, target):
        if not isinstance(getattr(network.patch_embed, "proj", None), nn.Conv2d) or hasattr(
            network.patch_embed, "backbone"
        ):
            raise ValueError("the patch embedding must be one convolution; hybrid networks cannot be expanded.")
        if network.attn_pool is not None:
            raise ValueError(f"global_pool={network.global_pool!r} pools by attention, which cannot be expanded.")
        for block in network.blocks:
            _check_block(block)
    small, large = source.blocks[0], target.blocks[0]
    check_equal("head size", small.attn.head_dim, large.attn.head_dim)
    check_equal("activation", type(small.mlp.act).__name__, type(large.mlp.act).__name__)
    for what, old, new in (
        ("embed_dim", source.embed_dim, target.embed_dim),
        ("num_heads", small.attn.num_heads, large.attn.num_heads),
        ("number of hidden units", small.mlp.fc1.out_features, large.mlp.fc1.out_features),
        ("depth", len(source.blocks), len(target.blocks)),
    ):
        check_not_smaller(what, old, new)
    for name in TOKENS:
        old, new = getattr(source, name, None), getattr(target, name, None)
        check_equal(f"{name} but for the width", None if old is None else old.shape[:-1],
                    None if new is None else new.shape[:-1])  # fmt: skip
    if exact and target.embed_dim % source.embed_dim:
        on_stream = {
            "norm_pre": source.norm_pre,
            "patch_embed.norm": source.patch_embed.norm,
            "q_norm": small.attn.q_norm,
            "k_norm": small.attn.k_norm,
        }
        for name, layer in on_stream.items():
            if not isinstance(layer, nn.Identity):
                raise ValueError(
                    f"with {name} the width can grow to multiples of {source.embed_dim} only, got {target.embed_dim}."
                )


def _factors(layer: nn.Module) -> Tensor | None:
    """The factors of a LayerScale, None without one."""
    if isinstance(layer, nn.Identity):
        return None
    if not isinstance(getattr(layer, "gamma", None), Tensor):
        raise ValueError(f"a LayerScale or nothing can follow a residual part, got {type(layer).__name__}.")
    return layer.gamma


def _inner_norm(growth: Growth, target: nn.Module, source: nn.Module) -> None:
    """A normalisation over units that are repeated circularly: whole repetitions only."""
    if not isinstance(source, nn.Identity) and growth.exact_norm:
        old, new = source.normalized_shape[0], target.normalized_shape[0]
        if new % old:
            raise ValueError(f"a normalisation inside of a block grows to multiples of {old} only, got {new}.")
    growth.norm(target, source)


def grow_vit(
    source: nn.Module,
    target: nn.Module,
    growth: Growth,
    depth_mode: DepthMode = "interpolate",
    new_block: NewBlock | None = "cancel",
    new_block_init: NewBlockInit = "copy",
    following_rows: bool = False,
    identity: bool = True,
) -> None:
    """Expand in place; see :func:`~lightning_methods.lemon.expand_vit`.

    Args:
        source: a timm VisionTransformer.
        target: a larger one.
        growth: the rules for single layers.
        depth_mode: where new blocks are put.
        new_block: how a new block is the identity.
        new_block_init: the other layers of a new block.
        following_rows: rows of every layer continue with those of the next block.
        identity: whether new blocks are the identity at all.
    """
    check_new_block(new_block, new_block_init)
    _check(source, target, growth.exact_norm)
    blocks = depth_map(len(source.blocks), len(target.blocks), depth_mode)
    if growth.exact_norm and norm_kind(source.blocks[0].norm1) == "rms":
        growth = replace(growth, stream="zero")
    growth.linear(target.patch_embed.proj, source.patch_embed.proj, growth.stream, "circular")
    growth.norm(target.patch_embed.norm, source.patch_embed.norm)
    for name in TOKENS:
        if getattr(source, name, None) is not None:
            growth.vector(getattr(target, name), getattr(source, name), growth.stream)
    growth.norm(target.norm_pre, source.norm_pre)
    for block, (index, is_new) in zip(target.blocks, blocks, strict=True):
        is_new = is_new and identity
        after = source.blocks[min(index + 1, len(source.blocks) - 1)]
        extend = following_rows or (is_new and new_block_init == "aki")
        _grow_block(growth, block, source.blocks[index], after if extend else None, new_block if is_new else None)
    growth.norm(target.norm, source.norm)
    growth.norm(target.fc_norm, source.fc_norm)
    normed = not (isinstance(source.norm, nn.Identity) and isinstance(source.fc_norm, nn.Identity))
    for name in ("head", "head_dist"):
        if isinstance(head := getattr(source, name, None), nn.Linear):
            growth.linear(getattr(target, name), head, "circular", growth.normed if normed else growth.stream)


def _grow_block(
    growth: Growth, block: nn.Module, small: nn.Module, after: nn.Module | None, silent: NewBlock | None
) -> None:
    attn, old = block.attn, small.attn
    growth.norm(block.norm1, small.norm1)
    growth.packed(attn.qkv, old.qkv, 3, growth.normed, None if after is None else after.attn.qkv)
    check_equal("gate of the attention", getattr(old, "gate", None) is None, getattr(attn, "gate", None) is None)
    if getattr(old, "gate", None) is not None:
        growth.packed(attn.gate, old.gate, 1, growth.normed, None if after is None else after.attn.gate)
    for name in ("q_norm", "k_norm"):  # over one head, whose size does not grow
        growth.norm(getattr(attn, name), getattr(old, name))
    _inner_norm(growth, attn.norm, old.norm)
    growth.scaled(
        (attn.proj, _factors(block.ls1)),
        (old.proj, _factors(small.ls1)),
        None if after is None else after.attn.proj,
        silent,
    )
    growth.norm(block.norm2, small.norm2)
    growth.linear(block.mlp.fc1, small.mlp.fc1, "circular", growth.normed, None if after is None else after.mlp.fc1)
    _inner_norm(growth, block.mlp.norm, small.mlp.norm)
    growth.scaled(
        (block.mlp.fc2, _factors(block.ls2)),
        (small.mlp.fc2, _factors(small.ls2)),
        None if after is None else after.mlp.fc2,
        silent,
    )
