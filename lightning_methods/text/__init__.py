"""Language models: loading, token log-probabilities, generation, prompt encoding, tiny models for tests."""

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from .models import add_lora as add_lora
    from .models import disable_dropout as disable_dropout
    from .models import load_model as load_model
    from .models import load_tokenizer as load_tokenizer
    from .tiny import save_tiny as save_tiny
    from .tiny import tiny_causal_lm as tiny_causal_lm
    from .tiny import tiny_encoder as tiny_encoder
    from .tiny import tiny_masked_lm as tiny_masked_lm
    from .tiny import tiny_seq2seq as tiny_seq2seq
    from .tiny import word_tokenizer as word_tokenizer

__getattr__, __dir__, __all__ = attach(__name__, __file__)
