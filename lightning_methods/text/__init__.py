"""Language models: loading, token log-probabilities, generation, prompt encoding, tiny models for tests."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .encode import encode_texts as encode_texts
    from .generation import TextGenerator as TextGenerator
    from .generation import generate_text as generate_text
    from .likelihood import token_log_probs as token_log_probs
    from .models import add_lora as add_lora
    from .models import disable_dropout as disable_dropout
    from .models import load_model as load_model
    from .models import load_tokenizer as load_tokenizer
    from .pooling import pool_hidden as pool_hidden
    from .pooling import position_ids as position_ids
    from .prompts import chat_prompt as chat_prompt
    from .prompts import chat_response as chat_response
    from .prompts import cut_pair as cut_pair
    from .prompts import encode_pair as encode_pair
    from .prompts import pad_batch as pad_batch
    from .prompts import response_tokens as response_tokens
    from .prompts import truncate_pair as truncate_pair
    from .tiny import save_tiny as save_tiny
    from .tiny import tiny_causal_lm as tiny_causal_lm
    from .tiny import tiny_encoder as tiny_encoder
    from .tiny import tiny_masked_lm as tiny_masked_lm
    from .tiny import tiny_seq2seq as tiny_seq2seq
    from .tiny import word_tokenizer as word_tokenizer

__getattr__, __dir__, __all__ = attach(__name__, __file__)
