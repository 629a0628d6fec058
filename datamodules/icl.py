"""Tasks that have to be understood within one sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_methods.core.checks import check_range
from lightning_methods.core.random import make_generator

from .base import ArrayDataset, BaseDataModule, BatchDataset

__all__ = ["DFASequences", "InContextDFADataModule", "sample_automata", "sample_strings"]


def sample_automata(
    n: int, num_symbols: int, min_states: int, max_states: int, max_out_degree: int, generator: torch.Generator
) -> Tensor:
    """Random deterministic automata.

    An automaton has between ``min_states`` and ``max_states`` states and an alphabet of 4 to ``num_symbols`` of the
    symbols; in every state 1 to ``max_out_degree`` different symbols lead to different states.

    Args:
        n: number of automata.
        num_symbols: number of symbols V.
        min_states: fewest states.
        max_states: most states S.
        max_out_degree: most symbols in a state.
        generator: source of the random numbers.

    Returns:
        The next state by state and symbol, int64 [n, S, V]; -1 where the symbol is not legal. State 0 is the first.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    states = integers(min_states, max_states, n)
    alphabet_size = integers(min(4, num_symbols), num_symbols, n)
    in_alphabet = uniform(n, num_symbols).argsort(dim=1) < alphabet_size[:, None]
    # A random order of the symbols of the alphabet, and of the states that exist: those that do not come last.
    symbols = (uniform(n, max_states, num_symbols) + 2 * ~in_alphabet[:, None]).argsort(dim=2)
    exists = torch.arange(max_states) < states[:, None]
    targets = (uniform(n, max_states, max_states) + 2 * ~exists[:, None]).argsort(dim=2)
    degree = integers(1, max_out_degree, n, max_states)
    degree = torch.minimum(degree, torch.minimum(alphabet_size, states)[:, None])
    most = min(max_out_degree, num_symbols, max_states)
    leads = torch.where(torch.arange(most) < degree[..., None], targets[..., :most], -1)
    table = torch.full((n, max_states, num_symbols), -1)
    return table.scatter_(2, symbols[..., :most], leads)


def sample_strings(
    table: Tensor, length: int, max_string: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence of each automaton: random walks from its first state, with a separator between them.

    Args:
        table: of :func:`sample_automata`, [n, S, V].
        length: tokens T in a sequence.
        max_string: longest string; lengths are uniform from 1.
        generator: source of the random numbers.

    Returns:
        The tokens, int64 [n, T], with the separator V; which symbols are legal after each token, bool [n, T, V + 1];
        and their probabilities, float32 of the same shape.
    """
    n, _, num_symbols = table.shape
    rows = torch.arange(n)
    legal = table >= 0
    state = torch.zeros(n, dtype=torch.int64)
    left = torch.randint(1, max_string + 1, (n,), generator=generator)
    tokens, visited = [], []
    for _ in range(length):
        pick = torch.multinomial(legal[rows, state].float(), 1, generator=generator)[:, 0]
        ends = left == 0
        fresh = torch.randint(1, max_string + 1, (n,), generator=generator)
        tokens.append(torch.where(ends, num_symbols, pick))
        state = torch.where(ends, 0, table[rows, state, pick])
        left = torch.where(ends, fresh, left - 1)
        visited.append(state)
    after = legal[rows[:, None], torch.stack(visited, dim=1)]
    after = torch.cat([after, after.new_zeros(n, length, 1)], dim=2)
    return torch.stack(tokens, dim=1), after, after.float() / after.sum(dim=2, keepdim=True)


class DFASequences(BatchDataset):
    """Sequences with what may follow at every position.

    A sample is a mapping: ``input_ids`` and ``labels`` (the same; a causal model shifts them) int64 [T], ``legal_mask``
    bool [T, V + 1] and ``true_probs`` float32 [T, V + 1] of the next token, and ``scored_mask`` bool [T].

    Args:
        tokens: [n, T].
        legal: [n, T, V + 1].
        probs: [n, T, V + 1].
        separator: the token between strings; where it comes next nothing is scored.
    """

    def __init__(self, tokens: Tensor, legal: Tensor, probs: Tensor, separator: int) -> None:
        super().__init__(tokens, torch.zeros(len(tokens)), num_classes=0, extras={"legal": legal, "probs": probs})
        follows = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), separator)], dim=1)
        second_half = torch.arange(tokens.shape[1]) >= tokens.shape[1] // 2
        self.extras["scored"] = (follows != separator) & second_half

    def make(self, rows: Tensor) -> dict[str, Tensor]:
        """A batch without a loop over its samples."""
        tokens = self.source[self.indices[rows]]
        return {
            "input_ids": tokens,
            "labels": tokens,
            "legal_mask": self.extras["legal"][rows],
            "true_probs": self.extras["probs"][rows],
            "scored_mask": self.extras["scored"][rows],
        }


class InContextDFADataModule(BaseDataModule):
    """Regular languages in context: every sequence holds strings of an automaton of its own.

    A model cannot know the automaton beforehand; it has to infer from the first strings which symbols may follow. A
    batch is a mapping, see :class:`DFASequences`. Scored is the second half of each sequence, where the next token is
    no separator. Each of training, validation and test has its own automata.

    Modelled on RegBench (Akyurek et al., "In-Context Language Learning: Architectures and Algorithms", ICML 2024); the
    sizes are ours.

    Args:
        num_symbols: number of symbols, at least 2; the separator is token ``num_symbols``.
        min_states: fewest states of an automaton.
        max_states: most states.
        max_out_degree: most symbols that are legal in a state.
        seq_len: tokens in a sequence.
        num_train: training sequences.
        num_val: validation sequences.
        num_test: test sequences; None for as many as for validation.
        max_string: longest string.
        **kwargs: arguments of :class:`BaseDataModule`; ``seed`` draws automata and strings.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        num_symbols: int = 10,
        min_states: int = 4,
        max_states: int = 8,
        max_out_degree: int = 4,
        seq_len: int = 96,
        num_train: int = 4000,
        num_val: int = 64,
        num_test: int | None = None,
        max_string: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("num_symbols", num_symbols, 2)
        check_range("min_states", min_states, 1)
        check_range("max_states", max_states, min_states)
        check_range("max_out_degree", max_out_degree, 1)
        check_range("seq_len", seq_len, 2)
        check_range("max_string", max_string, 1)
        self.num_symbols = num_symbols
        self.min_states = min_states
        self.max_states = max_states
        self.max_out_degree = max_out_degree
        self.seq_len = seq_len
        self.max_string = max_string
        self.counts = {"train": num_train, "val": num_val, "test": num_val if num_test is None else num_test}
        for split, count in self.counts.items():
            check_range(f"num_{split}", count, 1)

    @property
    def vocab_size(self) -> int:
        """Symbols and the separator."""
        return self.num_symbols + 1

    def load_split(self, split: str) -> ArrayDataset:
        """Draw the automata and strings of a part."""
        generator = make_generator(self.seed, "in-context-dfa", split)
        table = sample_automata(
            self.counts[split], self.num_symbols, self.min_states, self.max_states, self.max_out_degree, generator
        )
        return DFASequences(*sample_strings(table, self.seq_len, self.max_string, generator), self.num_symbols)
