"""Text: blocks of tokens with masks."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_methods.core.batches import PreferenceBatch
from lightning_methods.core.checks import check_choice, check_range, check_shape
from lightning_methods.core.io import read_jsonl
from lightning_methods.lidr.data import ToyWorld

from .base import ArrayDataset, BaseDataModule, seeded

__all__ = ["MaskedBlocks", "MaskedLMDataModule", "PreferenceDataModule", "PreferencePairs", "mask_tokens"]


# masked language modelling


def mask_tokens(
    input_ids: Tensor,
    special: Tensor,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose tokens to predict and hide them, as BERT does.

    Every ordinary token is chosen with probability ``rate``. Of the chosen ones 80 % become the mask token, 10 % a
    random token, 10 % stay.

    Source: Devlin et al., "BERT", NAACL 2019, section 3.1.

    Args:
        input_ids: int64, [batch, length].
        special: True where a token is never chosen, [batch, length].
        mask_id: the mask token.
        vocab_size: random tokens are drawn from 0 .. vocab_size - 1.
        rate: share of chosen tokens, in (0, 1].
        generator: source of the random numbers; the global one by default.

    Returns:
        The tokens that are seen, and the labels: the original token where one is chosen, else -100.

    Raises:
        ValueError: shapes differ, or the rate is out of range.

    Example:
        >>> ids = torch.tensor([[4, 9, 8, 7, 5]])
        >>> seen, labels = mask_tokens(ids, (ids == 4) | (ids == 5), mask_id=6, vocab_size=10, rate=1.0)
        >>> labels
        tensor([[-100,    9,    8,    7, -100]])
    """
    shape = check_shape("input_ids", input_ids, "batch length")
    check_shape("special", special, "batch length", **shape)
    check_range("rate", rate, 0, 1, low_open=True)
    options = {"generator": generator, "device": input_ids.device}
    chosen = (torch.rand(input_ids.shape, **options) < rate) & ~special
    fate = torch.rand(input_ids.shape, **options)
    other = torch.randint(vocab_size, input_ids.shape, **options)
    seen = torch.where(chosen & (fate < 0.8), mask_id, torch.where(chosen & (fate >= 0.9), other, input_ids))
    return seen, torch.where(chosen, input_ids, -100)


class MaskedBlocks(ArrayDataset):
    """Blocks of tokens that are masked anew in every epoch of training, and always alike in evaluation.

    A sample is ``{"input_ids", "attention_mask", "labels"}``; a loader fetches whole batches without a loop.

    Args:
        blocks: token numbers without the special tokens at both ends, padded, [N, length - 2]; an array, also one in a
            memory-mapped file.
        tokenizer: tells the special tokens and the size of the vocabulary.
        mask_rate: share of tokens to predict.
        seed: seed of the masks.
    """

    def __init__(self, blocks: np.ndarray, tokenizer: Any, mask_rate: float = 0.15, seed: int = 0) -> None:
        super().__init__(blocks, torch.zeros(len(blocks)), num_classes=0, seed=seed)
        for name in ("cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id"):
            if getattr(tokenizer, name, None) is None:
                raise ValueError(f"masked language modelling needs a tokenizer with a {name[:-3]}, this one has none.")
        self.ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        self.mask_id, self.pad_id = tokenizer.mask_token_id, tokenizer.pad_token_id
        self.special_ids = torch.tensor(sorted(tokenizer.all_special_ids))
        self.vocab_size = len(tokenizer)
        self.mask_rate = mask_rate

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        row = int(row)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a data set of {len(self)}.")
        return {name: value[0] for name, value in self._masked([row % len(self)]).items()}

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """A batch; its masks depend on the seed, the epoch and its rows."""
        with seeded(hash((self.seed, self.epoch, *map(int, rows)))):
            return self._masked(rows)

    def _masked(self, rows: Sequence[int]) -> dict[str, Tensor]:
        positions = self.indices[torch.as_tensor(rows)].numpy()
        tokens = torch.from_numpy(np.asarray(self.source[positions]).astype(np.int64))
        first, last = (tokens.new_full((len(tokens), 1), end) for end in self.ends)
        tokens = torch.cat([first, tokens, last], dim=1)
        special = torch.isin(tokens, self.special_ids)
        seen, labels = mask_tokens(tokens, special, self.mask_id, self.vocab_size, self.mask_rate)
        return {"input_ids": seen, "attention_mask": (tokens != self.pad_id).long(), "labels": labels}


class MaskedLMDataModule(BaseDataModule):
    """Text for masked language modelling: blocks of ``max_length`` tokens, some of them hidden.

    Documents are joined, with a separator between them, and cut into blocks of ``max_length - 2`` tokens between the
    class and the separator token; the last one is padded. Batches are a tokenizer's dictionary: ``input_ids``,
    ``attention_mask``, ``labels`` (the hidden token, -100 elsewhere). Training masks are drawn anew in every epoch;
    those of validation and test are always the same. 5 % of the blocks are for validation and 5 % for the test unless
    sizes are given.

    The token numbers of files and of sets of Hugging Face are written once, under ``root``, and memory-mapped.

    Args:
        source: "synthetic" - generated sentences with rules to find, nothing is downloaded; text files, or a folder of
            ``.txt`` files (one document a line); else the name of a set for ``datasets.load_dataset``, e.g.
            "wikimedia/wikipedia".
        tokenizer: name or folder of a tokenizer of transformers; None for the words of the synthetic sentences.
        mask_rate: share of tokens to predict.
        max_length: tokens in a block with the two special ones.
        num_sentences: of the synthetic source.
        config_name: configuration of the set of Hugging Face, e.g. "20231101.en".
        text_column: its column with the text.
        **kwargs: arguments of :class:`BaseDataModule`.

    Raises:
        ValueError: an option is out of range, or the tokenizer lacks a special token (in ``setup``).
        FileNotFoundError: a file is missing, or the set cannot be had (in ``prepare_data``).
    """

    available_splits = ("train",)
    default_val_size = 0.05
    default_test_size = 0.05

    def __init__(
        self,
        source: str | list[str] = "synthetic",
        tokenizer: str | None = None,
        mask_rate: float = 0.15,
        max_length: int = 128,
        num_sentences: int = 4000,
        config_name: str | None = None,
        text_column: str = "text",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("mask_rate", mask_rate, 0, 1, low_open=True)
        check_range("max_length", max_length, 3)
        check_range("num_sentences", num_sentences, 1)
        if source != "synthetic" and tokenizer is None:
            raise ValueError("tokenizer must be given for real text, e.g. 'bert-base-uncased'.")
        self.source = source
        self.tokenizer_name = tokenizer
        self.mask_rate = mask_rate
        self.max_length = max_length
        self.num_sentences = num_sentences
        self.config_name = config_name
        self.text_column = text_column
        self._tokenizer: Any = None

    @property
    def downloads(self) -> bool:
        """Whether anything but the generated sentences is needed."""
        return self.source != "synthetic" or self.tokenizer_name is not None

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; loaded when it is first asked for."""
        if self._tokenizer is None:
            from lightning_methods.text import load_tokenizer, word_tokenizer

            if self.tokenizer_name is None:
                self._tokenizer = word_tokenizer(synthetic_words(), style="encoder", chat_template=None)
            else:
                self._tokenizer = load_tokenizer(self.tokenizer_name, local_files_only=not self.download)
        return self._tokenizer

    # files

    def _files(self) -> list[Path] | None:
        """The text files that are the source, None for a set of Hugging Face."""
        if isinstance(self.source, str):
            path = Path(self.source)
            if path.is_dir():
                found = sorted(path.rglob("*.txt"))
                if not found:
                    raise FileNotFoundError(f"there is no .txt file in {path}.")
                return found
            if not path.is_file() and path.suffix != ".txt":
                return None
        paths = [Path(self.source)] if isinstance(self.source, str) else [Path(name) for name in self.source]
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"there is no text file {path}.")
        return paths

    @property
    def tokens_file(self) -> Path:
        """Where the token numbers are kept."""
        files = self._files()
        state = [] if files is None else [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        key = repr((self.source, self.config_name, self.text_column, self.tokenizer_name, self.max_length, state))
        return Path(self.root) / "masked_lm" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"

    def prepare_data(self) -> None:
        """Write the token numbers of real text, once."""
        if self.source == "synthetic" or self.tokens_file.is_file():
            return
        path = self.tokens_file
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.part")
        kind = np.uint16 if len(self.tokenizer) <= 1 << 16 else np.int32
        try:
            rows = 0
            with draft.open("wb") as file:
                for block in self._blocks(self._documents()):
                    file.write(block.astype(kind).tobytes())
                    rows += len(block)
            # The number of rows is known at the end only: the file of plain numbers becomes one of numpy's.
            plain = np.memmap(draft, dtype=kind, mode="r", shape=(rows, self.max_length - 2))
            whole = np.lib.format.open_memmap(path.with_suffix(".npy.part"), "w+", kind, plain.shape)
            for start in range(0, rows, 1 << 16):
                whole[start : start + (1 << 16)] = plain[start : start + (1 << 16)]
            whole.flush()
            path.with_suffix(".npy.part").replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def _documents(self) -> Iterator[list[str]]:
        """Texts, some at a time."""
        files = self._files()
        if files is None:
            yield from self._hub_documents()
            return
        for path in files:
            with path.open(encoding="utf-8") as file:
                lines: list[str] = []
                for line in file:
                    if line.strip():
                        lines.append(line.strip())
                    if len(lines) == 1000:
                        yield lines
                        lines = []
                yield lines

    def _hub_documents(self) -> Iterator[list[str]]:
        try:
            from datasets import load_dataset
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the set {self.source!r} needs the package datasets: pip install 'lightning-methods[text]'.",
                name="datasets",
            ) from error
        try:
            found = load_dataset(self.source, self.config_name, split="train", cache_dir=self.root)
        except Exception as error:
            raise FileNotFoundError(
                f"{self.source!r} is no text file or folder here, and no set of Hugging Face that could be loaded into "
                f"{self.root} ({type(error).__name__}: {error})."
            ) from error
        for start in range(0, len(found), 1000):
            yield found[start : start + 1000][self.text_column]

    def _blocks(self, documents: Iterable[list[str]]) -> Iterator[np.ndarray]:
        """Rows of ``max_length - 2`` tokens, the last one padded."""
        length = self.max_length - 2
        separator = [self.tokenizer.sep_token_id]
        rest: list[int] = []
        for texts in documents:
            if not texts:
                continue
            ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
            rest += [token for tokens in ids for token in (*tokens, *separator)]
            rows = len(rest) // length
            if rows:
                yield np.asarray(rest[: rows * length]).reshape(rows, length)
                rest = rest[rows * length :]
        if rest:
            yield np.asarray(rest + [self.tokenizer.pad_token_id] * (length - len(rest)))[None]

    def load_split(self, split: str) -> ArrayDataset | None:
        """All blocks as the training part; validation and test are taken out of it."""
        if split != "train":
            return None
        if self.source == "synthetic":
            sentences = synthetic_sentences(self.num_sentences, self.seed)
            blocks = np.concatenate(list(self._blocks([sentences])))
        else:
            if not self.tokens_file.is_file():
                raise FileNotFoundError(f"{self.tokens_file} is missing: call prepare_data() first.")
            blocks = np.load(self.tokens_file, mmap_mode="r")
        return MaskedBlocks(blocks, self.tokenizer, self.mask_rate, self.seed)


# generated sentences: who says what, lives where and eats what is fixed, and what is hidden can be inferred

ANIMALS = {
    "dog": ("barks", "kennel", "bones"), "cat": ("meows", "basket", "fish"), "cow": ("moos", "barn", "grass"),
    "duck": ("quacks", "pond", "bread"), "frog": ("croaks", "swamp", "flies"), "lion": ("roars", "savanna", "meat"),
    "owl": ("hoots", "forest", "mice"), "bee": ("buzzes", "hive", "nectar"), "horse": ("neighs", "stable", "hay"),
    "snake": ("hisses", "desert", "eggs"), "wolf": ("howls", "mountains", "deer"),
    "mouse": ("squeaks", "hole", "cheese"),
}  # fmt: skip
SIZES = {"small": "quietly", "big": "loudly", "old": "rarely", "young": "often"}
TEMPLATES = (
    "the {size} {animal} {sound} {how} in the {home} .",
    "in the {home} lives a {size} {animal} that eats {food} and {sound} .",
    "who eats {food} ? it is the {animal} of the {home} .",
    "a {animal} {sound} {how} because it is {size} and wants {food} .",
)


def synthetic_words() -> list[str]:
    """The words of the generated sentences."""
    fields = {"animal", "size", "how", "sound", "home", "food"}
    plain = [word for template in TEMPLATES for word in template.split() if word.strip("{}") not in fields]
    return sorted({*plain, *ANIMALS, *SIZES, *SIZES.values(), *(word for facts in ANIMALS.values() for word in facts)})


def synthetic_sentences(count: int, seed: int = 0) -> list[str]:
    """Random sentences about animals.

    Args:
        count: how many.
        seed: of the draw.
    """
    draw = random.Random(seed)
    sentences = []
    for _ in range(count):
        animal, size = draw.choice(list(ANIMALS)), draw.choice(list(SIZES))
        sound, home, food = ANIMALS[animal]
        sentences.append(
            draw.choice(TEMPLATES).format(animal=animal, size=size, how=SIZES[size], sound=sound, home=home, food=food)
        )
    return sentences


# preferences


class PreferencePairs(ArrayDataset):
    """Pairs of answers, encoded with their prompt; the loader gets whole batches.

    Args:
        pairs: the pairs, with the keys prompt, chosen, rejected.
        language_ids: the number of each pair's language.
        tokenizer: of transformers.
        max_length: tokens of a prompt with its answer.
        max_prompt_length: tokens of a prompt; None for half of ``max_length`` where both do not fit.
        chat_template: write prompt and answer in the tokenizer's conversation template.
        system: system line of the conversation.
    """

    def __init__(
        self,
        pairs: Sequence[dict[str, Any]],
        language_ids: Sequence[int],
        tokenizer: Any,
        max_length: int,
        max_prompt_length: int | None,
        chat_template: bool,
        system: str | None,
    ) -> None:
        super().__init__(pairs, torch.as_tensor(language_ids), batch_type=PreferenceBatch)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length
        self.chat_template = chat_template
        self.system = system

    def set_reference(self, chosen: Tensor, rejected: Tensor) -> None:
        """Keep the reference's log-probabilities of all answers, [N] each; batches have them from now on."""
        for name, values in (("reference_chosen", chosen), ("reference_rejected", rejected)):
            self.extras[name] = check_reference(name, values, len(self))

    def encode(self, row: int) -> dict[str, list[int]]:
        """Tokens and labels of both answers of a pair; both have the same part of the prompt."""
        from lightning_methods.text import chat_response, cut_pair, response_tokens, truncate_pair

        pair = self.source[int(self.indices[row])]
        encoded = {}
        for which in ("chosen", "rejected"):
            prompt, response = pair["prompt"], pair[which]
            if self.chat_template:
                prompt, response = chat_response(self.tokenizer, prompt, response, self.system)
            elif prompt and not prompt[-1].isspace() and not response[:1].isspace():
                prompt += " "
            encoded[which] = response_tokens(
                self.tokenizer, prompt, response, add_special_tokens=not self.chat_template
            )
        prompts, responses = ([start for _, start in encoded.values()], [len(i) - s for i, s in encoded.values()])
        kept, _ = truncate_pair(max(prompts), max(responses), self.max_length, self.max_prompt_length)
        fields = {}
        for which, (ids, start) in encoded.items():
            keep = min(start, kept), min(len(ids) - start, self.max_length - min(start, kept))
            fields[f"{which}_ids"], fields[f"{which}_labels"] = cut_pair(self.tokenizer, ids, start, keep)
        return fields

    def __getitem__(self, row: int) -> PreferenceBatch:
        """A batch of one pair."""
        return self.__getitems__([row])

    def __getitems__(self, rows: Sequence[int]) -> PreferenceBatch:
        """A padded batch."""
        from lightning_methods.text import pad_batch

        encoded = [self.encode(int(row)) for row in rows]
        pad = self.tokenizer.pad_token_id or 0
        fields: dict[str, Any] = {}
        for which in ("chosen", "rejected"):
            ids = [pair[f"{which}_ids"] for pair in encoded]
            fields[f"{which}_ids"] = pad_batch(ids, "right", pad)
            fields[f"{which}_mask"] = pad_batch([[1] * len(row) for row in ids])
            fields[f"{which}_labels"] = pad_batch([pair[f"{which}_labels"] for pair in encoded], "right", -100)
        chosen_rows = torch.as_tensor(list(rows))
        for name in ("reference_chosen", "reference_rejected"):
            if name in self.extras:
                fields[name] = self.extras[name][chosen_rows]
        return PreferenceBatch(**fields, language_ids=self.targets[chosen_rows])


def check_reference(name: str, values: Tensor, rows: int) -> Tensor:
    check_shape(name, values, "pairs", pairs=rows)
    return values.detach().cpu()


class PreferenceDataModule(BaseDataModule):
    """Pairs of answers to one prompt, the preferred one and the other; batches are ``PreferenceBatch``.

    Prompt and answer are encoded as one text, in the tokenizer's conversation template where it has one; labels are
    those of the answer, with the token that ends its turn. Of what is too long the prompt loses its beginning and the
    answers their ends, and both answers of a pair see the same prompt. A share of the pairs, with the languages in
    proportion, is held out for validation; the test set is the same unless ``test_size`` is given.

    Files are JSON lines with ``id, prompt, chosen, rejected`` and, where it is known, ``language``, as
    ``lightning_methods.lidr.build_preference_pairs`` gives them.

    Args:
        source: "jsonl", or "synthetic": pairs about a small world in two languages, with a tokenizer of their own;
            nothing is downloaded.
        path: the file of "jsonl".
        tokenizer: name, folder or object of a tokenizer of transformers; None for that of the synthetic pairs.
        max_length: tokens of a prompt with its answer.
        max_prompt_length: tokens of a prompt; None for half of ``max_length`` where both do not fit.
        languages: keep the pairs of these languages; None for all.
        chat_template: use the tokenizer's conversation template; None where it has one. The synthetic pairs have none.
        system: system line of the conversation.
        swap: prefer the other answer: the control that shows that the direction of the preference matters.
        val_fraction: share of the pairs for validation, short for ``val_size``.
        **kwargs: arguments of :class:`BaseDataModule`.

    Raises:
        ValueError: an option is out of range, the path or the tokenizer is missing, or no pair is left.
        FileNotFoundError: there is no such file (in ``setup``).
    """

    available_splits = ("train",)
    default_val_size = 0.1
    default_test_size = 0

    def __init__(
        self,
        source: Literal["synthetic", "jsonl"] = "synthetic",
        path: str | None = None,
        tokenizer: Any = None,
        max_length: int = 2048,
        max_prompt_length: int | None = None,
        languages: list[str] | None = None,
        chat_template: bool | None = None,
        system: str | None = None,
        swap: bool = False,
        val_fraction: float | None = None,
        **kwargs: Any,
    ) -> None:
        if val_fraction is not None:
            if kwargs.get("val_size") is not None:
                raise ValueError("val_fraction is short for val_size: give one of them.")
            kwargs["val_size"] = float(val_fraction)
        super().__init__(**kwargs)
        check_choice("source", source, ("synthetic", "jsonl"))
        check_range("max_length", max_length, 2)
        if max_prompt_length is not None:
            check_range("max_prompt_length", max_prompt_length, 1, max_length - 1)
        if source == "jsonl" and (path is None or tokenizer is None):
            raise ValueError("source='jsonl' needs a path, and the tokenizer of the model.")
        self.source = source
        self.path = path
        self.max_length = max_length
        self.max_prompt_length = max_prompt_length
        self.only_languages = languages
        self.chat_template = chat_template
        self.system = system
        self.swap = swap
        self.tokenizer_name = tokenizer
        self._tokenizer: Any = None
        self._languages: list[str] = []

    @property
    def downloads(self) -> bool:
        """Whether a file or a tokenizer is needed."""
        return self.source != "synthetic" or isinstance(self.tokenizer_name, str)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; loaded when it is first asked for."""
        if self._tokenizer is None:
            from lightning_methods.text import load_tokenizer, word_tokenizer

            if self.tokenizer_name is None:
                self._tokenizer = word_tokenizer(ToyWorld(seed=self.seed).words(), chat_template=None)
            else:
                self._tokenizer = load_tokenizer(self.tokenizer_name, local_files_only=not self.download)
        return self._tokenizer

    @property
    def languages(self) -> list[str]:
        """The names of the languages, by ``language_ids``; empty before ``setup``, or where the file names none."""
        return self._languages

    def _rows(self) -> list[dict[str, Any]]:
        if self.source == "synthetic":
            return [pair._asdict() for pair in ToyWorld(seed=self.seed).pairs()]
        return read_jsonl(self.path, required=("id", "prompt", "chosen", "rejected"))

    def load_split(self, split: str) -> ArrayDataset | None:
        """All pairs as the training part; validation and test are taken out of it."""
        if split != "train":
            return None
        rows = self._rows()
        if self.only_languages is not None:
            rows = [row for row in rows if row.get("language") in self.only_languages]
        if not rows:
            raise ValueError(
                f"there is no pair{' of ' + ', '.join(self.only_languages) if self.only_languages else ''}."
            )
        if self.swap:
            rows = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
        names = list(dict.fromkeys(str(row.get("language", "")) for row in rows))
        self._languages = [] if names == [""] else names
        chat = self.chat_template
        if chat is None:
            chat = getattr(self.tokenizer, "chat_template", None) is not None
        numbers = [names.index(str(row.get("language", ""))) for row in rows]
        return PreferencePairs(
            rows, numbers, self.tokenizer, self.max_length, self.max_prompt_length, chat, self.system
        )

    def pair_sets(self) -> dict[str, PreferencePairs]:
        """The sets of pairs by name: train, val, test; ready after ``setup``."""
        return {"train": self.train_set, "val": self.val_set, "test": self.test_set}
