"""Text: streams of tokens, blocks with masks, preferences."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_methods.core.batches import PreferenceBatch
from lightning_methods.core.checks import check_choice, check_range, check_shape
from lightning_methods.core.io import read_jsonl
from lightning_methods.lidr.data import ToyWorld

from .base import ArrayDataset, BaseDataModule, BatchDataset

__all__ = [
    "MaskedBlocks",
    "MaskedLMDataModule",
    "PreferenceDataModule",
    "PreferencePairs",
    "TokenStreamDataModule",
    "TokenWindows",
    "character_tokenizer",
    "mask_tokens",
    "read_documents",
    "write_token_bin",
]


# documents

DOCUMENT_END = "<|endoftext|>"
TEXT_SUFFIXES = (".txt", ".json", ".jsonl")
# "train", "TinyStoriesV2-GPT4-valid", "valdataset"; not "valley" or "contest"
SPLIT_NAME = re.compile(r"(?<![a-z])(train|val|test)(?:id|ing|idation)?(?:dataset)?(?![a-z])")


def text_files(
    source: str | Sequence[str], suffixes: Sequence[str] = (".txt",), exist: bool = True
) -> list[Path] | None:
    """The text files that a source names: files, or those of a folder. None for a set of Hugging Face.

    Args:
        source: a folder, a file or several, or a name.
        suffixes: of the files that are taken from a folder, and of a name that must be a file.
        exist: whether missing files are an error.

    Raises:
        FileNotFoundError: a file is missing, or a folder has none.
    """
    if isinstance(source, str):
        path = Path(source)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in suffixes)
            if not found:
                raise FileNotFoundError(f"there is {' or '.join(suffixes)} file in {path}.")
            return found
        if not path.is_file() and path.suffix not in suffixes:
            return None
    paths = [Path(source)] if isinstance(source, str) else [Path(name) for name in source]
    for path in paths:
        if exist and not path.is_file():
            raise FileNotFoundError(f"there is no text file {path}.")
    return paths


def hub_set(name: str, config_name: str | None, root: str, split: str | None = None) -> Any:
    """A set of Hugging Face, cached in ``root``: one split, or all by name.

    Raises:
        ModuleNotFoundError: the package datasets is not installed.
        FileNotFoundError: the set cannot be had.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the set {name!r} needs the package datasets: pip install 'lightning-methods[text]'.", name="datasets"
        ) from error
    try:
        return load_dataset(name, config_name, split=split, cache_dir=root)
    except Exception as error:
        raise FileNotFoundError(
            f"{name!r} is no text file or folder here, and no set of Hugging Face that could be loaded into "
            f"{root} ({type(error).__name__}: {error})."
        ) from error


def hub_documents(found: Any, text_column: str) -> Iterator[list[str]]:
    """The texts of a split, some at a time."""
    for start in range(0, len(found), 1000):
        yield list(found[start : start + 1000][text_column])


def read_documents(
    path: str | Path, documents: Literal["file", "lines", "json"] = "file", text_column: str = "text"
) -> Iterator[str]:
    """The documents of a text file, one after the other; the file may be larger than memory if no document is.

    Args:
        path: the file, UTF-8.
        documents: "file" - the whole file is one document, unless ``<|endoftext|>`` stands between several, as in
            TinyStories; "lines" - one a line, empty lines are skipped; "json" - every line is a JSON string, as in
            BabiStories, or an object with the text in ``text_column``.
        text_column: key of the text in JSON objects.

    Raises:
        ValueError: a line is no such JSON; the message names file and line.
    """
    with Path(path).open(encoding="utf-8") as file:
        if documents == "file":
            yield from _between_ends(file)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield line.strip() if documents == "lines" else _json_text(line, text_column, f"{path}, line {number}")


def _between_ends(file: Iterable[str]) -> Iterator[str]:
    part: list[str] = []
    several = False
    for line in file:
        *ended, rest = line.split(DOCUMENT_END)
        for end in ended:
            several = True
            text = "".join([*part, end]).strip()
            part = []
            if text:
                yield text
        part.append(rest)
    text = "".join(part)
    text = text.strip() if several else text
    if text:
        yield text


def _json_text(line: str, text_column: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None
    value = value.get(text_column) if isinstance(value, dict) else value
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a string, or an object with a string in {text_column!r}.")
    return value


def _some_at_a_time(documents: Iterable[str], most: int = 1000) -> Iterator[list[str]]:
    texts: list[str] = []
    for text in documents:
        texts.append(text)
        if len(texts) == most:
            yield texts
            texts = []
    if texts:
        yield texts


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


class MaskedBlocks(BatchDataset):
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

    def make(self, rows: Tensor) -> dict[str, Tensor]:
        """Blocks with fresh masks."""
        positions = self.indices[rows].numpy()
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
            them (one document a line); else the name of a set for ``datasets.load_dataset``, e.g.
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
        return text_files(self.source)

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
            yield from hub_documents(hub_set(self.source, self.config_name, self.root, "train"), self.text_column)
            return
        for path in files:
            yield from _some_at_a_time(read_documents(path, "lines"))

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


# streams of tokens


def character_tokenizer(characters: Iterable[str]) -> Any:
    """A tokenizer whose tokens are the given characters, white space included, numbered in their order.

    Args:
        characters: different characters.

    Returns:
        A fast transformers tokenizer without special tokens; other characters have no token and are left out.

    Example:
        >>> tokenizer = character_tokenizer("\\n ab")
        >>> tokenizer("ab ba")["input_ids"], tokenizer.decode([2, 1, 3, 0])
        ([2, 3, 1, 3, 2], 'a b\\n')
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def write_token_bin(
    path: str | Path,
    documents: Iterable[str],
    tokenizer: Any,
    dtype: Literal["uint16", "uint32"] = "uint16",
) -> int:
    """Write documents as one stream of token numbers, each followed by the tokenizer's end-of-text token if it has one.

    The file is what nanoGPT and the authors' code read: the plain numbers, without a header. It appears whole or not at
    all.

    Args:
        path: the file; its folder is made.
        documents: texts.
        tokenizer: of transformers, or a callable like one.
        dtype: of the numbers.

    Returns:
        The number of tokens.

    Raises:
        ValueError: a token number that the dtype cannot hold.
    """
    path = Path(path)
    check_choice("dtype", dtype, ("uint16", "uint32"))
    largest = np.iinfo(dtype).max
    end = getattr(tokenizer, "eos_token_id", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with draft.open("wb") as file:
            for texts in _some_at_a_time(documents):
                encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
                numbers = np.fromiter(
                    (token for tokens in encoded for token in (*tokens, *(() if end is None else (end,)))), np.int64
                )
                if len(numbers) and numbers.max() > largest:
                    raise ValueError(f"token {numbers.max()} does not fit into {dtype}: give dtype='uint32'.")
                file.write(numbers.astype(dtype).tobytes())
                count += len(numbers)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return count


class _Stream:
    """Part of a file of token numbers, memory-mapped in every process that reads it."""

    def __init__(self, path: Path, dtype: str, start: float = 0.0, stop: float = 1.0) -> None:
        total = path.stat().st_size // np.dtype(dtype).itemsize
        self.path, self.dtype = path, dtype
        self.start, self.stop = round(start * total), round(stop * total)
        self._tokens: np.ndarray | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """``length`` tokens from each start, int64 [N, length]."""
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
        positions = self.start + starts.numpy()[:, None] + np.arange(length)
        return torch.from_numpy(np.asarray(self._tokens[positions]).astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # a pickle of the map would be all of the file


class TokenWindows(BatchDataset):
    """Windows of a token stream: ``(x, y)``, int64 [T] both, y the next tokens.

    Args:
        stream: has a length and ``windows(starts, length)``.
        block_size: T.
        size: windows in an epoch, at random places that are drawn anew in every epoch; None: the windows that tile the
            stream, in order.
        seed: of the draws.
    """

    def __init__(self, stream: Any, block_size: int, size: int | None = None, seed: int = 0) -> None:
        self.random = size is not None
        count = size if size is not None else max((len(stream) - 1) // block_size, 0)
        super().__init__(torch.arange(count), torch.zeros(count), num_classes=0, seed=seed)
        self.stream = stream
        self.block_size = block_size

    def make(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Windows: at random places, or one after the other."""
        if self.random:
            starts = torch.randint(len(self.stream) - self.block_size, (len(rows),))
        else:
            starts = self.indices[rows] * self.block_size
        tokens = self.stream.windows(starts, self.block_size + 1)
        return tokens[:, :-1], tokens[:, 1:]


class TokenStreamDataModule(BaseDataModule):
    """Text as one stream of tokens: windows of ``block_size`` tokens and the tokens that come next.

    Documents are joined, each followed by the tokenizer's end-of-text token. A training window begins anywhere, at a
    place that depends on the seed, the epoch and its row; validation windows tile their stream in order. Batches are
    ``(x, y)``, int64 [B, block_size], y shifted by one. The test set is the validation set unless the source has one of
    its own.

    Where the tokens come from:

    * ``train_bin`` and ``val_bin``: files of plain token numbers, as nanoGPT and the authors' code prepare them;
    * ``source``: texts, which are tokenized once; the bins are kept under ``root``. A folder, text files, or the name
      of a set of Hugging Face (``roneneldan/TinyStories``). Files of a folder are for training, validation or the test
      as their names say (a word ``train``, ``val`` or ``valid``, ``test``); the others are for training. BabiStories is
      a folder with ``traindataset.txt`` and ``valdataset.txt`` (or ``testdataset.txt``, which then serves for both) of
      the authors' archive (github.com/facebookresearch/MemoryMosaics, BabiStories/data), with ``documents="json"``;
    * by default, generated stories: who has what, and where, is told once and has to be remembered.

    Args:
        train_bin: file of the training tokens.
        val_bin: file of the validation tokens; None holds the end of the training tokens out.
        block_size: tokens that the model sees.
        source: "synthetic", a folder, a text file or several, or the name of a set for ``datasets.load_dataset``.
        val_source: text file or files for validation, if ``source`` is files.
        tokenizer: name or folder of a tokenizer of transformers ("gpt2" in the paper); "characters" takes those that
            occur; None for the words of the generated stories, or if there are only bins.
        documents: what a document is in text files: "file", "lines" or "json", see :func:`read_documents`.
        config_name: configuration of the set of Hugging Face.
        text_column: column or JSON key with the text.
        bin_dtype: of the numbers in bins, "uint16" or "uint32".
        steps_per_epoch: batches in a training epoch; None for as many as tile the stream.
        val_fraction: share of the training stream, at its end, to validate on if there is nothing else.
        num_stories: of the generated source.
        **kwargs: arguments of :class:`BaseDataModule`; ``val_size`` validates on that many windows only.

    Raises:
        ValueError: an option is out of range, or a stream is shorter than one window (in ``setup``).
        FileNotFoundError: a file is missing, or the set cannot be had (in ``prepare_data`` or ``setup``).
    """

    default_val_size = 0
    default_test_size = 0

    def __init__(
        self,
        train_bin: str | None = None,
        val_bin: str | None = None,
        block_size: int = 64,
        source: str | list[str] = "synthetic",
        val_source: str | list[str] | None = None,
        tokenizer: str | None = None,
        documents: Literal["file", "lines", "json"] = "file",
        config_name: str | None = None,
        text_column: str = "text",
        bin_dtype: Literal["uint16", "uint32"] = "uint16",
        steps_per_epoch: int | None = None,
        val_fraction: float = 0.1,
        num_stories: int = 1000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("block_size", block_size, 1)
        check_choice("documents", documents, ("file", "lines", "json"))
        check_choice("bin_dtype", bin_dtype, ("uint16", "uint32"))
        check_range("val_fraction", val_fraction, 0, 1, low_open=True, high_open=True)
        check_range("num_stories", num_stories, 2)
        if steps_per_epoch is not None:
            check_range("steps_per_epoch", steps_per_epoch, 1)
            if self.batch_size is None:
                raise ValueError("batch_size must be a number where steps_per_epoch is given.")
        if train_bin is None and val_bin is not None:
            raise ValueError("val_bin goes with train_bin; for texts give source and val_source.")
        if train_bin is not None and (source != "synthetic" or val_source is not None):
            raise ValueError("give either bins (train_bin, val_bin) or texts (source, val_source), not both.")
        if source != "synthetic" and tokenizer is None:
            raise ValueError("tokenizer must be given for texts: 'gpt2', 'characters', or a folder.")
        if train_bin is None and source == "synthetic" and tokenizer is not None:
            raise ValueError("the generated stories bring their own tokenizer: leave tokenizer out.")
        if val_source is not None and (source == "synthetic" or text_files(source, exist=False) is None):
            raise ValueError("val_source goes with a source of text files.")
        self.train_bin = train_bin
        self.val_bin = val_bin
        self.block_size = block_size
        self.source = source
        self.val_source = val_source
        self.tokenizer_name = tokenizer
        self.documents = documents
        self.config_name = config_name
        self.text_column = text_column
        self.bin_dtype = bin_dtype
        self.steps_per_epoch = steps_per_epoch
        self.val_fraction = val_fraction
        self.num_stories = num_stories
        self._tokenizer: Any = None

    @property
    def downloads(self) -> bool:
        """Whether anything but the generated stories is needed."""
        return self.train_bin is not None or self.source != "synthetic"

    # tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded when it is first asked for; None if there are only bins."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    def _load_tokenizer(self) -> Any:
        from lightning_methods.text import load_tokenizer, word_tokenizer

        if not self.downloads:
            return word_tokenizer(story_words(), chat_template=None)
        if self.tokenizer_name is None:
            return None
        if self.tokenizer_name != "characters":
            return load_tokenizer(self.tokenizer_name, local_files_only=not self.download)
        path = (Path(self.train_bin).parent if self.train_bin else self.folder) / "characters.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: call prepare_data() first.")
        return character_tokenizer(json.loads(path.read_text(encoding="utf-8")))

    @property
    def vocab_size(self) -> int:
        """Number of tokens.

        Raises:
            RuntimeError: there are only bins, which do not tell.
        """
        if self.tokenizer is None:
            raise RuntimeError("bins do not tell the size of the vocabulary: give the tokenizer that made them.")
        return len(self.tokenizer)

    # files

    def _sources(self) -> dict[str, list[Path]]:
        """Text files by split; nothing for a set of Hugging Face."""
        files = text_files(self.source, TEXT_SUFFIXES)
        if files is None:
            return {}
        if self.val_source is not None:
            return {"train": files, "val": text_files(self.val_source, TEXT_SUFFIXES) or []}
        if not (isinstance(self.source, str) and Path(self.source).is_dir()):
            return {"train": files}
        by_name: dict[str, list[Path]] = {}
        for file in files:
            named = SPLIT_NAME.search(file.stem.lower())
            by_name.setdefault(named[1] if named else "train", []).append(file)
        if "train" not in by_name:
            raise FileNotFoundError(f"{self.source} has no text file for training, only {sorted(by_name)}.")
        return by_name

    @property
    def folder(self) -> Path:
        """Where the bins of texts are kept."""
        files = [path for paths in self._sources().values() for path in paths]
        state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        options = (self.config_name, self.text_column, self.tokenizer_name, self.documents, self.bin_dtype)
        key = repr((self.source, self.val_source, *options, state))
        return Path(self.root) / "token_stream" / hashlib.sha256(key.encode()).hexdigest()[:16]

    def prepare_data(self) -> None:
        """Write the bins of texts, once."""
        if self.train_bin is not None or not self.downloads:
            return
        folder = self.folder
        if (folder / "done").is_file():
            return
        splits = self._splits()
        if self.tokenizer_name == "characters":
            found = sorted({character for texts in splits.values() for text in texts() for character in text})
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "characters.json").write_text(json.dumps(found), encoding="utf-8")
        for split, texts in splits.items():
            write_token_bin(folder / f"{split}.bin", texts(), self.tokenizer, self.bin_dtype)
        (folder / "done").touch()

    def _splits(self) -> dict[str, Callable[[], Iterator[str]]]:
        """How to read the documents of each split, as often as it is called."""
        sources = self._sources()
        if sources:
            return {split: functools.partial(self._read, paths) for split, paths in sources.items()}
        found = hub_set(self.source, self.config_name, self.root)
        names = {"train": ("train",), "val": ("validation", "val", "valid"), "test": ("test",)}
        present = {
            split: next((name for name in candidates if name in found), None) for split, candidates in names.items()
        }
        if present["train"] is None:
            raise FileNotFoundError(f"the set {self.source!r} has no split 'train', only {sorted(found)}.")
        return {
            split: functools.partial(self._read_hub, found[name]) for split, name in present.items() if name is not None
        }

    def _read(self, paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            yield from read_documents(path, self.documents, self.text_column)

    def _read_hub(self, split: Any) -> Iterator[str]:
        for texts in hub_documents(split, self.text_column):
            yield from texts

    # windows

    def _stream(self, split: str) -> Any:
        """The tokens of a split, None if it has none of its own."""
        if not self.downloads:
            return self._generated(split)
        given = {"train": self.train_bin, "val": self.val_bin}
        paths = {name: Path(path) for name, path in given.items() if path is not None}
        if self.train_bin is None:
            if not (self.folder / "done").is_file():
                raise FileNotFoundError(f"the bins of {self.source!r} are missing: call prepare_data() first.")
            paths = {path.stem: path for path in self.folder.glob("*.bin")}
        for path in paths.values():
            if not path.is_file():
                raise FileNotFoundError(
                    f"there is no file of tokens {path}. write_token_bin makes one; or give source and tokenizer."
                )
        if split in paths:
            held_out = self.val_fraction if split == "train" and set(paths) == {"train"} else 0.0
            return _Stream(paths[split], self.bin_dtype, stop=1 - held_out)
        if split == "val" and set(paths) == {"train"}:
            return _Stream(paths["train"], self.bin_dtype, start=1 - self.val_fraction)
        return _Stream(paths["test"], self.bin_dtype) if split == "val" else None

    def _generated(self, split: str) -> Any:
        if split == "test":
            return None
        held_out = max(round(self.val_fraction * self.num_stories), 1)
        stories = synthetic_stories(self.num_stories, self.seed)
        chosen = stories[:-held_out] if split == "train" else stories[-held_out:]
        encoded = self.tokenizer(chosen)["input_ids"]
        return _TokensInMemory([token for tokens in encoded for token in (*tokens, self.tokenizer.eos_token_id)])

    def load_split(self, split: str) -> ArrayDataset | None:
        """Windows of the split's stream."""
        stream = self._stream(split)
        if stream is None:
            return None
        if len(stream) <= self.block_size:
            raise ValueError(
                f"the {split} stream has {len(stream)} tokens: a window needs block_size + 1 = {self.block_size + 1}."
            )
        if split != "train":
            return TokenWindows(stream, self.block_size)
        size = (len(stream) - 1) // self.block_size
        if self.steps_per_epoch is not None:
            size = self.steps_per_epoch * self.batch_size
        return TokenWindows(stream, self.block_size, size, self.seed)


class _TokensInMemory:
    """A stream that is no file."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """``length`` tokens from each start, int64 [N, length]."""
        return self.tokens[starts[:, None] + torch.arange(length)]


# generated stories: names, things, colours and places are drawn for each story and come back in it

PEOPLE = ("ann", "ben", "cara", "dan", "eva", "finn", "gus", "hana", "ivo", "june", "kim", "leo")
COLORS = ("red", "blue", "green", "yellow", "black", "white")
THINGS = ("ball", "kite", "book", "cup", "hat", "boat", "drum", "doll")
PLACES = ("garden", "school", "market", "river", "park", "tower", "beach", "farm")
PLOT = (
    ("once there was {a} who lived by the {home} .", "{a} lives by the {home} ."),
    ("{a} has a {color} {thing} .", "{a} found a {color} {thing} in the {home} ."),
    ("one day {a} takes the {thing} to the {place} .", "{a} goes to the {place} with the {thing} ."),
    ("there {a} meets {b} , who likes the {color} {thing} .", "in the {place} {a} sees {b} .", ""),
    ("{a} gives the {thing} to {b} .", "{b} asks : may i have the {thing} ? {a} says : yes , {b} ."),
    ("{a} goes back to the {home} .", "then {a} leaves the {place} and walks to the {home} ."),
    ("where is {a} ? {a} is by the {home} .", "who has the {color} {thing} ? {b} has the {thing} ."),
)


def story_words() -> list[str]:
    """The words of the generated stories."""
    plain = {word for choices in PLOT for sentence in choices for word in sentence.split() if "{" not in word}
    return sorted({*plain, *PEOPLE, *COLORS, *THINGS, *PLACES})


def synthetic_stories(count: int, seed: int = 0) -> list[str]:
    """Random short stories in which a thing changes hands.

    Args:
        count: how many.
        seed: of the draw.
    """
    draw = random.Random(seed)
    stories = []
    for _ in range(count):
        (a, b), (home, place) = draw.sample(PEOPLE, 2), draw.sample(PLACES, 2)
        cast = {
            "a": a,
            "b": b,
            "home": home,
            "place": place,
            "color": draw.choice(COLORS),
            "thing": draw.choice(THINGS),
        }
        sentences = [draw.choice(choices) for choices in PLOT]
        stories.append(" ".join(sentence.format(**cast) for sentence in sentences if sentence))
    return stories


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
    proportion, is held out for validation; the test set is the same unless ``test_size`` is given. With
    ``splits="train+test"`` nothing is held out, and evaluation sees the training pairs.

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

    available_splits = ("train", "test")
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
