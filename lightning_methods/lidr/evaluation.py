"""Arithmetic in many languages, the language of an answer, and comparisons of answers by a judge."""

from __future__ import annotations

import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics import MeanMetric

from .generate import SYSTEM, ResponseGenerator
from .preference import LANGUAGE_NAMES, final_number

__all__ = [
    "Judge",
    "ModelOutputs",
    "MultilingualEvaluation",
    "head_to_head",
    "identify_language",
    "judge_prompt",
    "mgsm_correct",
    "off_target_rate",
    "read_preferences",
    "weighted_preference",
    "win_rates",
    "write_model_outputs",
]


# arithmetic


def mgsm_correct(answer: str, gold: str | float) -> bool:
    """Whether the last number of an answer is the right one.

    Args:
        answer: the model's answer.
        gold: the right number.

    Example:
        >>> mgsm_correct("Das macht 1.234.567 Euro.", "1234567")
        True
    """
    found, right = final_number(answer), final_number(str(gold))
    return found is not None and found == right


# the language of an answer

_SCRIPTS = {
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "CYRILLIC": "ru",
    "THAI": "th",
    "BENGALI": "bn",
    "TELUGU": "te",
    "ARABIC": "ar",
    "CJK": "zh",
}
_STOP_WORDS = {
    "de": "der die das und ist nicht ein eine zu den mit von auf für sich dem es im wir er sie hat pro also",
    "en": "the and is of to in that it for was with on as are this be at have has so each he she",
    "es": "el la los las y es de que en un una por con para su se no del al cada más entonces",
    "fr": "le la les et est de des que en un une pour dans il elle du ne pas au par donc chaque",
    "it": "il la le e è di che in un una per con non del della si gli al ogni quindi",
    "sw": "na ya wa kwa ni la za katika kila hii hiyo yake kuwa ana alikuwa jumla cha vya",
}
_STOP_SETS = {language: frozenset(words.split()) for language, words in _STOP_WORDS.items()}


def identify_language(text: str) -> str | None:
    """A guess at the language of a text: by its script, and by frequent words where the script is Latin.

    Meant for answers of a sentence or more; short ones are unreliable.

    Args:
        text: the text.

    Returns:
        A code of ar, bn, de, en, es, fr, it, ja, ko, ru, sw, te, th, zh; None where nothing tells.

    Example:
        >>> identify_language("Das ist nicht der richtige Weg."), identify_language("42")
        ('de', None)
    """
    letters = [unicodedata.name(character, "").split(" ")[0] for character in text if character.isalpha()]
    scripts = Counter(letters)
    # Japanese mixes its own signs into Chinese ones.
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.05 * len(letters):
        return "ja"
    known = Counter({name: scripts[name] for name in _SCRIPTS if scripts[name]})
    if known and known.most_common(1)[0][1] > scripts["LATIN"] / 2:
        return _SCRIPTS[known.most_common(1)[0][0]]
    words = re.findall(r"[^\W\d_]+", text.lower())
    counts = {language: sum(word in frequent for word in words) for language, frequent in _STOP_SETS.items()}
    best = max(counts, key=lambda language: counts[language])
    return best if counts[best] else None


def off_target_rate(
    answers: Sequence[str], language: str, identify: Callable[[str], str | None] = identify_language
) -> float:
    """Share of answers that are in another language than they should be; where nothing tells, they are not counted so.

    Args:
        answers: the answers.
        language: code of the language that they should be in.
        identify: gives a text's language, or None.

    Raises:
        ValueError: there is no answer.
    """
    if not answers:
        raise ValueError("there is no answer to look at.")
    found = [identify(answer) for answer in answers]
    return sum(code is not None and code != language for code in found) / len(answers)


# comparisons


@runtime_checkable
class Judge(Protocol):
    """Whoever compares answers: a person, a model, a service."""

    def compare(self, instruction: str, first: str, second: str, language: str) -> float:
        """How much the second answer is preferred, in [0, 1]: 1 the second, 0 the first, 0.5 neither."""


class HeadToHead(NamedTuple):
    """Shares of instructions."""

    win: float
    tie: float
    lose: float


def head_to_head(
    judge: Judge | Callable[[str, str, str, str], float],
    instructions: Sequence[str],
    outputs_a: Sequence[str],
    outputs_b: Sequence[str],
    language: str = "en",
    order: Literal["both", "random", "given"] = "both",
    seed: int = 0,
) -> HeadToHead:
    """Let a judge compare the answers of two models.

    Args:
        judge: an object with ``compare``, or a function with its arguments.
        instructions: what was asked.
        outputs_a: answers of the model whose wins are counted.
        outputs_b: answers of the other.
        language: code of the language of the instructions.
        order: "both" asks twice, with the answers exchanged, and takes the mean, because judges favour a position;
            "random" asks once in an order drawn by ``seed``; "given" shows b first and a second.
        seed: of the order.

    Returns:
        Shares of instructions in which a wins (more than 0.5), neither, or b.

    Raises:
        ValueError: the numbers of instructions and answers differ, or there is none, or a verdict is outside [0, 1].

    Example:
        >>> longer = lambda instruction, first, second, language: (
        ...     0.5 if len(first) == len(second) else float(len(second) > len(first))
        ... )
        >>> head_to_head(longer, ["?", "?"], ["yes", "no"], ["no", "no"])
        HeadToHead(win=0.5, tie=0.5, lose=0.0)
    """
    if not len(instructions) == len(outputs_a) == len(outputs_b) or not instructions:
        raise ValueError(
            f"as many answers as instructions are needed, and at least one: got {len(instructions)} instructions, "
            f"{len(outputs_a)} and {len(outputs_b)} answers."
        )
    compare = judge.compare if hasattr(judge, "compare") else judge
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    for instruction, a, b in zip(instructions, outputs_a, outputs_b, strict=True):
        flips = {"both": (False, True), "given": (False,), "random": (draw.random() < 0.5,)}[order]
        verdicts = []
        for flip in flips:
            verdict = float(compare(instruction, *((a, b) if flip else (b, a)), language))
            if not 0 <= verdict <= 1:
                raise ValueError(f"a judge's verdict must be in [0, 1], got {verdict}.")
            verdicts.append(1 - verdict if flip else verdict)
        preference = sum(verdicts) / len(verdicts)
        counts["win" if preference > 0.5 else "lose" if preference < 0.5 else "tie"] += 1
    total = len(instructions)
    return HeadToHead(counts["win"] / total, counts["tie"] / total, counts["lose"] / total)


def judge_prompt(instruction: str, first: str, second: str, language: str) -> str:
    """Ask a model to compare two answers by one token, ``m`` or ``M``, as AlpacaEval 2 does, in any language.

    Args:
        instruction: what was asked.
        first: the answer called m.
        second: the answer called M.
        language: code or name of the instruction's language: a good answer is in it.
    """
    name = LANGUAGE_NAMES.get(language, language)
    return (
        "Two models, m and M, answered an instruction. Say which answer people would prefer. A good answer follows the "
        f"instruction, is right and is written in the language of the instruction, which is {name}.\n\n"
        f"<instruction>\n{instruction}\n</instruction>\n<m>\n{first}\n</m>\n<M>\n{second}\n</M>\n\n"
        "Reply with the name of the better model alone: m or M."
    )


def weighted_preference(log_probs: Mapping[str, float], first: str = "m", second: str = "M") -> float | None:
    """How much a judge that names a model by one token prefers the second, from its log-probabilities.

    Args:
        log_probs: the likeliest tokens at the place of the verdict with their log-probabilities.
        first: the token of the first answer.
        second: the token of the second answer.

    Returns:
        p(second) / (p(first) + p(second)), in [0, 1]; None where neither token is among them.

    Example:
        >>> round(weighted_preference({"M": -0.1, "m": -2.5, "The": -4.0}), 3)
        0.917
    """
    found = [log_probs.get(token, -math.inf) for token in (first, second)]
    if max(found) == -math.inf:
        return None
    p_first, p_second = (math.exp(value - max(found)) for value in found)
    return p_second / (p_first + p_second)


def write_model_outputs(
    path: str | Path,
    generator: str,
    rows: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
) -> None:
    """Write answers in the format of AlpacaEval: a JSON list of ``generator, dataset, id, instruction, output``.

    Args:
        path: the file, e.g. ``model_outputs.json``.
        generator: name of the model.
        rows: the instructions, with ``id``, ``instruction`` and, where it is known, ``dataset``.
        outputs: one answer for each.

    Raises:
        ValueError: the numbers differ.
    """
    if len(rows) != len(outputs):
        raise ValueError(f"one output for each instruction is needed, got {len(outputs)} for {len(rows)}.")
    table = [
        {
            "generator": generator,
            "dataset": row.get("dataset", ""),
            "id": row["id"],
            "instruction": row["instruction"],
            "output": output,
        }
        for row, output in zip(rows, outputs, strict=True)
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps(table, ensure_ascii=False, indent=2), encoding="utf-8")
    draft.replace(path)


def read_preferences(path: str | Path) -> list[float | None]:
    """The verdicts of AlpacaEval's annotations, as preferences for the second model in [0, 1].

    Args:
        path: a JSON list of objects with ``preference``: 1 the reference, 2 the model, 1.5 neither, or anything
            between where the judge's probabilities weigh it; null where the judge gave no verdict.

    Raises:
        ValueError: an object has no preference, or one outside of 0 and [1, 2].
    """
    found: list[float | None] = []
    for number, row in enumerate(json.loads(Path(path).read_text(encoding="utf-8"))):
        if "preference" not in row:
            raise ValueError(f"{path}, entry {number}: no 'preference'; it has {', '.join(row)}.")
        value = row["preference"]
        if value is None:
            found.append(None)
        elif value == 0:  # how older versions write a draw
            found.append(0.5)
        elif 1 <= value <= 2:
            found.append(value - 1)
        else:
            raise ValueError(f"{path}, entry {number}: preference {value} is outside of [1, 2].")
    return found


def win_rates(preferences: Sequence[float | None]) -> float:
    """Mean preference for the model, in [0, 1]; missing verdicts are left out.

    Args:
        preferences: in [0, 1], as :func:`read_preferences` gives them.

    Raises:
        ValueError: there is no verdict.
    """
    known = [value for value in preferences if value is not None]
    if not known:
        raise ValueError("there is no verdict to average.")
    return sum(known) / len(known)


# by the command line


class MultilingualEvaluation(LightningModule):
    """Answers the prompts of an evaluation set: ``test`` scores arithmetic, ``predict`` returns the answers.

    ``python train.py test --config configs/lidr/mgsm.yaml`` logs ``test/acc``, ``test/off_target`` and, by language,
    ``test/acc_<language>`` and ``test/off_target_<language>``, with batches of
    :class:`~datamodules.MGSMDataModule`. The overall numbers are means over the languages.

    Args:
        model: name or folder of the model; or an object with ``generate(list[str]) -> list[str]``.
        tokenizer: name or folder; None for that of the model.
        chat_template: put prompts into the tokenizer's conversation template.
        max_new_tokens: longest answer.
        repetition_penalty: of the answers; keep it equal between runs that are compared.
        batch_size: prompts at a time in generation.
        system: system line of the conversation.
        dtype: of the weights, e.g. "bfloat16".
        identify: gives a text's language, or None.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        chat_template: bool = True,
        max_new_tokens: int = 2048,
        repetition_penalty: float = 1.1,
        batch_size: int = 16,
        system: str | None = SYSTEM,
        dtype: str | None = None,
        identify: Callable[[str], str | None] = identify_language,
    ) -> None:
        super().__init__()
        # Not a submodule: there is nothing to train or to save, and a strategy would wrap it.
        self._generator: list[ResponseGenerator] = []
        self._options = {
            "model": model,
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "max_new_tokens": max_new_tokens,
            "repetition_penalty": repetition_penalty,
            "batch_size": batch_size,
            "system": system,
            "dtype": dtype,
        }
        self.identify = identify
        self._scores: dict[str, MeanMetric] = {}

    @property
    def generator(self) -> ResponseGenerator:
        """The model with its settings; loaded when it is first asked."""
        if not self._generator:
            options = dict(self._options)
            if isinstance(options["model"], str):
                options["device"] = str(self.device)
            self._generator.append(ResponseGenerator(**options))
        return self._generator[0]

    def _answers(self, batch: Mapping[str, Any]) -> list[str]:
        from ..text.generation import generate_text

        own = self.generator  # not `respond`: the loader has shared the prompts among the ranks already
        return generate_text(
            own.model,
            own.tokenizer,
            batch["prompt"],
            batch_size=own.batch_size,
            max_new_tokens=own.max_new_tokens,
            chat_template=own.chat_template,
            system=own.system,
            repetition_penalty=own.repetition_penalty,
        )

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[str]:
        """One answer to each prompt."""
        return self._answers(batch)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Score the answers to arithmetic problems."""
        for answer, gold, language in zip(self._answers(batch), batch["answer"], batch["language"], strict=True):
            found = self.identify(answer)
            scores = {"acc": mgsm_correct(answer, gold), "off_target": found is not None and found != language}
            for name, score in scores.items():
                key = f"{name}_{language}"
                if key not in self._scores:
                    self._scores[key] = MeanMetric().to(self.device)
                self._scores[key].update(float(score))

    def on_test_epoch_start(self) -> None:
        """Start counting; all ranks count all languages, whatever their share of the prompts holds."""
        languages = getattr(getattr(self.trainer, "datamodule", None), "languages", None) or ()
        self._scores = {
            f"{name}_{language}": MeanMetric().to(self.device)
            for language in languages
            for name in ("acc", "off_target")
        }

    def on_test_epoch_end(self) -> None:
        """Log the shares."""
        values = {key: metric.compute() for key, metric in self._scores.items()}
        self.log_dict({f"test/{key}": value for key, value in values.items()})
        for name in ("acc", "off_target"):
            mine = [value for key, value in values.items() if key.startswith(f"{name}_")]
            if mine:
                self.log(f"test/{name}", sum(mine) / len(mine))

    def configure_optimizers(self) -> None:
        """Nothing is trained."""


class ModelOutputs(Callback):
    """Write the answers of ``predict`` in the format of AlpacaEval, one file for each language.

    For several processes one file each, ``<language>.rank<r>.json``.

    Args:
        folder: where to.
        generator: name of the model in the files.
    """

    def __init__(self, folder: str, generator: str = "model") -> None:
        self.folder = str(folder)
        self.generator = generator
        self._rows: dict[str, list[tuple[dict[str, Any], str]]] = {}

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with nothing."""
        self._rows = {}

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the answers."""
        for i, output in enumerate(outputs):
            row = {"id": batch["id"][i], "instruction": batch["prompt"][i], "dataset": batch["dataset"][i]}
            self._rows.setdefault(batch["language"][i], []).append((row, output))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files."""
        for language, rows in self._rows.items():
            suffix = f".rank{trainer.global_rank}" if trainer.world_size > 1 else ""
            path = Path(self.folder) / f"{language}{suffix}.json"
            write_model_outputs(path, self.generator, [row for row, _ in rows], [output for _, output in rows])
