"""Tokenizers and language models of a few thousand parameters, for synthetic data and tests: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..core.checks import check_choice

__all__ = ["save_tiny", "tiny_causal_lm", "tiny_encoder", "tiny_masked_lm", "tiny_seq2seq", "word_tokenizer"]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[BOS]", "[EOS]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, BOS, EOS, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{% for message in messages %}[BOS] {{ message['role'] }} : {{ message['content'] }} [EOS] {% endfor %}"
    "{% if add_generation_prompt %}[BOS] assistant : {% endif %}"
)
CHAT_WORDS = ("system", "user", "assistant", ":")


def word_tokenizer(
    words: Iterable[str], style: Literal["causal", "encoder"] = "causal", chat_template: str | None = CHAT_TEMPLATE
) -> Any:
    """A tokenizer whose tokens are whole words between white space; words that it does not know are ``[UNK]``.

    Args:
        words: the vocabulary; repetitions count once, and the first seven ids are the special tokens
            ``[PAD] [UNK] [BOS] [EOS] [CLS] [SEP] [MASK]``.
        style: "causal" adds no special tokens to a text; "encoder" puts ``[CLS]`` before it and ``[SEP]`` after it.
        chat_template: Jinja template of a conversation; its words (system, user, assistant, :) are in the vocabulary
            when it is given. None: no template.

    Returns:
        A fast transformers tokenizer, with offsets; ``len(tokenizer)`` is the size of the vocabulary.

    Example:
        >>> tokenizer = word_tokenizer(["a", "b"], chat_template=None)
        >>> tokenizer("b a c b")["input_ids"]
        [8, 7, 1, 8]
        >>> tokenizer.decode([7, 8])
        'a b'
    """
    check_choice("style", style, ("causal", "encoder"))
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    template_words = CHAT_WORDS if chat_template is not None else ()
    vocabulary = dict.fromkeys([*SPECIAL_TOKENS, *words, *template_words])
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if style == "encoder":
        core.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _vocabulary_size(vocab: Any) -> int:
    return vocab if isinstance(vocab, int) else len(vocab)


def _seeded(build: Any, seed: int) -> nn.Module:
    """Build a model from its own seed, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def tiny_causal_lm(
    vocab: Any,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    positions: int = 128,
    architecture: Literal["gpt2", "llama"] = "gpt2",
    seed: int = 0,
    **config: Any,
) -> nn.Module:
    """A random causal language model.

    Args:
        vocab: a tokenizer, or the number of its tokens.
        width: of the hidden states.
        layers: number of transformer blocks.
        heads: attention heads.
        positions: longest sequence.
        architecture: "gpt2" (learned positions, tied head) or "llama" (rotary positions, RMSNorm).
        seed: of the weights; the global random state is left alone.
        **config: further fields of the transformers configuration. GPT-2's dropout is off unless asked for.

    Returns:
        A ``GPT2LMHeadModel`` or ``LlamaForCausalLM`` in eval mode.

    Example:
        >>> model = tiny_causal_lm(20)
        >>> model(torch.tensor([[8, 9]])).logits.shape
        torch.Size([1, 2, 20])
    """
    check_choice("architecture", architecture, ("gpt2", "llama"))
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": _vocabulary_size(vocab), "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    if architecture == "gpt2":
        own: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": positions}
        own |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return _seeded(lambda: GPT2LMHeadModel(GPT2Config(**{**common, **own, **config})), seed).eval()
    own = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": positions,
    }
    return _seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**common, **own, **config})), seed).eval()


def _bert_config(vocab: Any, width: int, layers: int, heads: int, positions: int, config: dict[str, Any]) -> Any:
    from transformers import BertConfig

    own: dict[str, Any] = {
        "vocab_size": _vocabulary_size(vocab),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "pad_token_id": PAD,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return BertConfig(**{**own, **config})


def tiny_encoder(
    vocab: Any, width: int = 32, layers: int = 2, heads: int = 2, positions: int = 128, seed: int = 0, **config: Any
) -> nn.Module:
    """A random BERT without a head; arguments as in :func:`tiny_causal_lm`.

    Example:
        >>> tiny_encoder(20)(torch.tensor([[4, 8, 5]])).last_hidden_state.shape
        torch.Size([1, 3, 32])
    """
    from transformers import BertModel

    return _seeded(lambda: BertModel(_bert_config(vocab, width, layers, heads, positions, config)), seed).eval()


def tiny_masked_lm(
    vocab: Any, width: int = 32, layers: int = 2, heads: int = 2, positions: int = 128, seed: int = 0, **config: Any
) -> nn.Module:
    """A random BERT with its masked-language-model head; arguments as in :func:`tiny_causal_lm`."""
    from transformers import BertForMaskedLM

    return _seeded(lambda: BertForMaskedLM(_bert_config(vocab, width, layers, heads, positions, config)), seed).eval()


def tiny_seq2seq(
    vocab: Any, width: int = 32, layers: int = 2, heads: int = 2, seed: int = 0, **config: Any
) -> nn.Module:
    """A random T5 (relative positions: no longest sequence); arguments as in :func:`tiny_causal_lm`.

    Example:
        >>> model = tiny_seq2seq(20)
        >>> model(input_ids=torch.tensor([[8, 9]]), decoder_input_ids=torch.tensor([[0]])).logits.shape
        torch.Size([1, 1, 20])
    """
    from transformers import T5Config, T5ForConditionalGeneration

    own: dict[str, Any] = {
        "vocab_size": _vocabulary_size(vocab),
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 2 * width,
        "num_layers": layers,
        "num_heads": heads,
        "dropout_rate": 0.0,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    }
    return _seeded(lambda: T5ForConditionalGeneration(T5Config(**{**own, **config})), seed).eval()


_MODELS = {"causal": tiny_causal_lm, "encoder": tiny_encoder, "masked": tiny_masked_lm, "seq2seq": tiny_seq2seq}


def save_tiny(
    folder: str | Path,
    kind: Literal["causal", "encoder", "masked", "seq2seq"] = "causal",
    words: Iterable[str] = ("a", "b", "c", "d", "e", "f", "g", "h"),
    **model: Any,
) -> str:
    """Write a tiny model with its tokenizer to a folder that the Auto classes read.

    Args:
        folder: where to; it is made.
        kind: "causal" (GPT-2), "encoder" or "masked" (BERT), "seq2seq" (T5).
        words: the vocabulary of the tokenizer.
        **model: arguments of the model's function, e.g. ``width=16``.

    Returns:
        The folder, as a string: what ``load_model`` and ``load_tokenizer`` take.
    """
    check_choice("kind", kind, tuple(_MODELS))
    tokenizer = word_tokenizer(words, style="encoder" if kind in ("encoder", "masked") else "causal")
    tokenizer.save_pretrained(folder)
    _MODELS[kind](tokenizer, **model).save_pretrained(folder)
    return str(folder)
