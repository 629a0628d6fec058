"""Which expansion goes where in a BERT: that of transformers (Post-LN), and the Pre-LN one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from .functional import DepthMode, depth_map
from .growth import Growth, NewBlock, NewBlockInit, check_equal, check_new_block, check_not_smaller

__all__ = ["grow_bert"]

SAME = ("vocab_size", "max_position_embeddings", "type_vocab_size", "hidden_act", "is_decoder", "add_cross_attention")
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
# Heads on the hidden states, of the classes of transformers; their outputs are labels, which do not grow.
HEADS = ("classifier", "qa_outputs", "cls.seq_relationship")


def _get(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None:
            return None
    return module


def _check(source: nn.Module, target: nn.Module) -> None:
    check_equal("class", type(source).__name__, type(target).__name__)
    old, new = source.config, target.config
    for name in SAME:
        check_equal(name, getattr(old, name, None), getattr(new, name, None))
    if old.is_decoder:
        raise ValueError("a BERT that decodes (is_decoder=True) cannot be expanded, only an encoder.")
    heads = (old.num_attention_heads, new.num_attention_heads)
    check_equal("head size", old.hidden_size // heads[0], new.hidden_size // heads[1])
    for what in ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"):
        check_not_smaller(what, getattr(old, what), getattr(new, what))


def grow_bert(
    source: nn.Module,
    target: nn.Module,
    growth: Growth,
    depth_mode: DepthMode = "interpolate",
    new_block: NewBlock | None = "zero",
    new_block_init: NewBlockInit = "copy",
    following_rows: bool = False,
    identity: bool = True,
) -> None:
    """Expand in place; see :func:`~lightning_methods.lemon.expand_bert`.

    Args:
        source: a BERT.
        target: a larger one.
        growth: the rules for single layers; for Post-LN its patterns become circular.
        depth_mode: where new blocks are put.
        new_block: how a new block is the identity.
        new_block_init: the other layers of a new block.
        following_rows: rows of every layer continue with those of the next block.
        identity: whether new blocks are the identity at all.
    """
    check_new_block(new_block, new_block_init)
    _check(source, target)
    grow = _pre_norm if type(source).__name__ == "PreLNBertForMaskedLM" else _post_norm
    blocks = depth_map(source.config.num_hidden_layers, target.config.num_hidden_layers, depth_mode)
    blocks = [(index, is_new and identity) for index, is_new in blocks]
    last = source.config.num_hidden_layers - 1

    def following(index: int, is_new: bool) -> int | None:
        return min(index + 1, last) if following_rows or (is_new and new_block_init == "aki") else None

    grow(source, target, growth, blocks, following, new_block, depth_mode if identity else "interpolate")


Following = Callable[[int, bool], int | None]


def _pre_norm(
    source: nn.Module,
    target: nn.Module,
    growth: Growth,
    blocks: list[tuple[int, bool]],
    following: Following,
    new_block: NewBlock | None,
    depth_mode: str,
) -> None:
    for name in EMBEDDINGS:
        growth.vector(getattr(target.embeddings, name).weight, getattr(source.embeddings, name).weight, growth.stream)
    for block, (index, is_new) in zip(target.blocks, blocks, strict=True):
        small, silent = source.blocks[index], new_block if is_new else None
        after = None if (k := following(index, is_new)) is None else source.blocks[k]
        layers = {
            "query": ("circular", growth.normed, None),
            "key": ("circular", growth.normed, None),
            "value": ("circular", growth.normed, None),
            "attention_output": (growth.stream, "circular", silent),
            "intermediate": ("circular", growth.normed, None),
            "output": (growth.stream, "circular", silent),
        }
        growth.norm(block.norm1, small.norm1)
        growth.norm(block.norm2, small.norm2)
        for name, (rows, columns, quiet) in layers.items():
            more = None if after is None else getattr(after, name)
            growth.linear(getattr(block, name), getattr(small, name), rows, columns, more, quiet)
    tied = _check_tie(source.decoder, source.embeddings, target.decoder, target.embeddings)
    growth.norm(target.ln_f, source.ln_f, _share(source, target) if tied else 1.0)
    _decoder(growth, target.decoder, source.decoder, growth.normed, tied)
    target.config.layer_norm_eps = target.ln_f.eps


def _check_tie(decoder: nn.Linear, embeddings: nn.Module, new: nn.Linear, new_embeddings: nn.Module) -> bool:
    """Whether the target's decoder is its word embedding."""
    tied = [
        layer.weight is words.word_embeddings.weight for layer, words in ((decoder, embeddings), (new, new_embeddings))
    ]
    if tied[1] and not tied[0]:
        raise ValueError("the source's decoder is not tied to its embeddings: neither may the target's be.")
    return tied[1]


def _share(source: nn.Module, target: nn.Module) -> float:
    """A tied decoder adds up the copies of the hidden state: 1 / m."""
    return 1.0 / (target.config.hidden_size // source.config.hidden_size)


def _decoder(growth: Growth, target: nn.Linear, source: nn.Linear, columns: str, tied: bool) -> None:
    """The decoder; a tied weight has grown as the embedding already."""
    if not tied:
        growth.linear(target, source, "circular", columns)
    elif target.bias is not None:
        growth.vector(target.bias, source.bias, "circular")


def _post_norm(
    source: nn.Module,
    target: nn.Module,
    growth: Growth,
    blocks: list[tuple[int, bool]],
    following: Following,
    new_block: NewBlock | None,
    depth_mode: str,
) -> None:
    old, new = source.config.hidden_size, target.config.hidden_size
    if growth.exact_norm and new % old:
        raise ValueError(
            f"a Post-LN BERT grows to multiples of its hidden size {old} only, got {new}: a LayerNorm on the residual "
            "stream itself takes away what an indivisible width needs. PreLNBertForMaskedLM grows to any size."
        )
    if depth_mode == "stack" and len(blocks) > source.config.num_hidden_layers:
        raise ValueError(
            "depth_mode='stack' is not possible for a Post-LN BERT: a new block is the identity only behind the block "
            "whose LayerNorm it takes over. Use 'interpolate'."
        )
    growth = replace(growth, stream="circular", normed="circular")
    small, large = (getattr(model, "bert", model) for model in (source, target))
    for name in EMBEDDINGS:
        growth.vector(getattr(large.embeddings, name).weight, getattr(small.embeddings, name).weight, "circular")
    growth.norm(large.embeddings.LayerNorm, small.embeddings.LayerNorm)
    for position, (index, is_new) in enumerate(blocks):
        after = None if (k := following(index, is_new)) is None else small.encoder.layer[k]
        ends_run = position + 1 == len(blocks) or not blocks[position + 1][1]
        _grow_layer(growth, large.encoder.layer[position], small.encoder.layer[index], after,
                    new_block if is_new else None, ends_run)  # fmt: skip
    if small.pooler is not None and large.pooler is not None:
        growth.linear(large.pooler.dense, small.pooler.dense, "circular", "circular")
    for path in HEADS:
        if (head := _get(source, path)) is not None:
            check_equal("number of labels", head.out_features, _get(target, path).out_features)
            growth.linear(_get(target, path), head, "circular", "circular")
    if (predictions := _get(source, "cls.predictions")) is not None:
        own = _get(target, "cls.predictions")
        tied = _check_tie(predictions.decoder, small.embeddings, own.decoder, large.embeddings)
        growth.linear(own.transform.dense, predictions.transform.dense, "circular", "circular")
        growth.norm(own.transform.LayerNorm, predictions.transform.LayerNorm, _share(source, target) if tied else 1.0)
        _decoder(growth, own.decoder, predictions.decoder, "circular", tied)
        growth.vector(own.bias, predictions.bias, "circular")
    target.config.layer_norm_eps = source.config.layer_norm_eps


def _grow_layer(
    growth: Growth, layer: nn.Module, small: nn.Module, after: nn.Module | None, silent: NewBlock | None, ends_run: bool
) -> None:
    """One Post-LN block: LN(x + attention), LN(x + hidden units).

    Behind a block come the new ones that copy it. ``LN(x + 0)`` is x only for a normalised x, so all LayerNorms between
    the block and the last of its copies are plain, and the affine part comes at the end of the run.
    """
    parts = {
        "attention.self.query": None,
        "attention.self.key": None,
        "attention.self.value": None,
        "attention.output.dense": silent,
        "intermediate.dense": None,
        "output.dense": silent,
    }
    for path, quiet in parts.items():
        more = None if after is None else _get(after, path)
        growth.linear(_get(layer, path), _get(small, path), "circular", "circular", more, quiet)
    growth.norm(layer.attention.output.LayerNorm, small.attention.output.LayerNorm)
    growth.norm(layer.output.LayerNorm, small.output.LayerNorm)
    plain = ([layer.attention.output.LayerNorm] if silent else []) + ([] if ends_run else [layer.output.LayerNorm])
    for norm in plain:
        norm.weight.fill_(1)
        norm.bias.zero_()
