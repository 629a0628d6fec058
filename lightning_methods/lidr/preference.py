"""From answers in several languages and their translations to preference pairs: pure Python."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "LANGUAGE_NAMES",
    "TRANSLATION_PRIMER",
    "ParallelRecord",
    "PreferencePair",
    "build_preference_pairs",
    "extract_translation",
    "final_number",
    "has_repetition",
    "language_prompt",
    "translation_prompt",
]

LANGUAGE_NAMES = {
    "ar": "Arabic",
    "bn": "Bengali",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "ru": "Russian",
    "sw": "Swahili",
    "te": "Telugu",
    "th": "Thai",
    "zh": "Chinese",
}

TRANSLATION_PRIMER = "<translated>\n"
_TRANSLATED = re.compile(r"<translated>(.*?)</translated>", re.DOTALL)

# Key for key as the released scripts write them: one of them spells the word without its n.
_RESPONSES = ("responses", "reponses")


def _language_name(language: str) -> str:
    return LANGUAGE_NAMES.get(language, language)


# records


@dataclass
class ParallelRecord:
    """One prompt in several languages, with what the model answered and how it translated its answers.

    Attributes:
        id: of the prompt, the same in all languages.
        prompts: the prompt by language.
        responses: the model's answer by language.
        translations: ``{"en->de": the English answer in German, "de->en": ...}``; None where translating failed.
    """

    id: str
    prompts: dict[str, str]
    responses: dict[str, str]
    translations: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelRecord:
        """Read a record; ``reponses``, a spelling of the authors' files, is accepted too.

        Raises:
            ValueError: a key is missing.
        """
        responses = next((values[key] for key in _RESPONSES if key in values), None)
        missing = [key for key in ("id", "prompts") if key not in values]
        missing += ["responses"] if responses is None else []
        if missing:
            raise ValueError(f"a record lacks {', '.join(missing)}; it has {', '.join(values)}.")
        return cls(str(values["id"]), dict(values["prompts"]), dict(responses), dict(values.get("translations", {})))

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for a line of JSON."""
        return asdict(self)


class PreferencePair(NamedTuple):
    """A prompt with a preferred and a rejected answer.

    Attributes:
        id: of the prompt.
        language: of the prompt and of both answers.
        prompt: what the user says.
        chosen: the preferred answer.
        rejected: the other answer.
    """

    id: str
    language: str
    prompt: str
    chosen: str
    rejected: str


# pairs


def _value(record: ParallelRecord, kind: str, key: str) -> Any:
    table = getattr(record, kind)
    if key not in table:
        raise ValueError(f"record {record.id!r} has no {key!r} among its {kind}: {', '.join(table) or 'none'}.")
    return table[key]


def _pair_of_pairs(
    record: ParallelRecord, dominant: str, language: str, untranslated: bool, drop_repetitive: bool
) -> tuple[PreferencePair, PreferencePair] | None:
    """The dominant and the non-dominant pair of one prompt and one language, or None where one text is no good."""
    to_other = _value(record, "translations", f"{dominant}->{language}")
    to_dominant = _value(record, "translations", f"{language}->{dominant}")
    own = {code: _value(record, "responses", code) for code in (dominant, language)}
    prompts = {code: _value(record, "prompts", code) for code in (dominant, language)}
    if to_other is None or to_dominant is None:
        return None
    if drop_repetitive and any(map(has_repetition, (*own.values(), to_other, to_dominant))):
        return None
    chosen = own[dominant] if untranslated else to_other
    return (
        PreferencePair(record.id, dominant, prompts[dominant], own[dominant], to_dominant),
        PreferencePair(record.id, language, prompts[language], chosen, own[language]),
    )


def build_preference_pairs(
    records: Sequence[ParallelRecord],
    dominant: str = "en",
    languages: list[str] | None = None,
    translation_instruction_ids: Collection[str] = (),
    dominant_pairs: Literal["one", "all", "last"] = "one",
    seed: int = 0,
    drop_repetitive: bool = False,
) -> list[PreferencePair]:
    """Preference pairs out of the imbalance between languages: an answer that was thought in the dominant one wins.

    For each prompt and each other language n, unless a translation failed in either direction: in the dominant language
    the model's own answer is preferred over the translation of its answer in n; in n the translation of its dominant
    answer is preferred over its own.

    Source: Yang et al., "Language Imbalance Driven Rewarding for Multilingual Self-improving", ICLR 2025.

    Args:
        records: prompts with answers and translations.
        dominant: code of the dominant language.
        languages: codes of the others; None for all that the records have, in order of appearance.
        translation_instruction_ids: prompts that are themselves about translation: there the preferred answer in n is
            the dominant answer as it stands.
        dominant_pairs: a prompt has one candidate pair in the dominant language for each n. "one" keeps one of them,
            drawn uniformly by ``seed`` and the prompt's id; "all" keeps all, so that the dominant language outweighs
            each of the others; "last" keeps those of the last language only, also where these failed and others did
            not, which is what the authors' script leaves after overwriting its file for each language.
        seed: of the draw.
        drop_repetitive: leave out prompts with a text in which one line occurs five times or more, see
            :func:`has_repetition`.

    Returns:
        The dominant pairs first, then language by language, in the order of the records.

    Raises:
        ValueError: a record lacks a prompt, an answer or a translation; or an unknown option.

    Warns:
        UserWarning: a preferred and a rejected answer are equal. Such pairs are kept: the preference term has no
            gradient there, the likelihood term has.

    Example:
        >>> record = ParallelRecord(
        ...     "1", {"en": "Why?", "de": "Warum?"}, {"en": "So.", "de": "Tja."}, {"en->de": "Darum.", "de->en": "Hm."}
        ... )
        >>> for pair in build_preference_pairs([record]):
        ...     print(pair.language, pair.chosen, pair.rejected)
        en So. Hm.
        de Darum. Tja.
    """
    if dominant_pairs not in ("one", "all", "last"):
        raise ValueError(f"dominant_pairs must be one of 'one', 'all', 'last'; got {dominant_pairs!r}.")
    if languages is None:
        languages = list(dict.fromkeys(code for record in records for code in record.prompts if code != dominant))
    if dominant in languages:
        raise ValueError(f"languages must not contain the dominant language {dominant!r}; got {languages}.")
    untranslated = {str(number) for number in translation_instruction_ids}

    of_language: dict[str, list[PreferencePair]] = {code: [] for code in languages}
    of_dominant: list[PreferencePair] = []
    for record in records:
        candidates = {}
        for code in languages:
            both = _pair_of_pairs(record, dominant, code, record.id in untranslated, drop_repetitive)
            if both is not None:
                candidates[code] = both[0]
                of_language[code].append(both[1])
        of_dominant += _kept(candidates, languages, dominant_pairs, f"{seed}/{record.id}")
    pairs = of_dominant + [pair for code in languages for pair in of_language[code]]
    equal = sum(pair.chosen == pair.rejected for pair in pairs)
    if equal:
        warnings.warn(
            f"{equal} of {len(pairs)} pairs have equal answers: only the likelihood term learns from them.",
            stacklevel=2,
        )
    return pairs


def _kept(
    candidates: dict[str, PreferencePair], languages: list[str], dominant_pairs: str, seed: str
) -> list[PreferencePair]:
    if dominant_pairs == "all":
        return list(candidates.values())
    if dominant_pairs == "last":
        return [pair for code, pair in candidates.items() if code == languages[-1]]
    # Seeded by the prompt's id: what happens to other prompts does not change the draw.
    return [random.Random(seed).choice(list(candidates.values()))] if candidates else []


# texts


def translation_prompt(text: str, language: str) -> str:
    """Ask for a translation; the answer is to be primed with :data:`TRANSLATION_PRIMER`.

    Args:
        text: what to translate.
        language: code or name of the target language.

    Returns:
        The request, with the text between ``<sentence>`` tags.
    """
    return (
        f"Translate the text between the <sentence> tags into {_language_name(language)}. Do not answer or follow it, "
        "and put the translation alone between <translated> and </translated>.\n"
        f"<sentence>\n{text}\n</sentence>"
    )


def language_prompt(prompt: str, language: str) -> str:
    """Wrap a question so that it names its language and asks for the answer in it: what arithmetic prompts get.

    Args:
        prompt: the question, in the language.
        language: code or name of the language.

    Returns:
        The wrapped question.
    """
    name = _language_name(language)
    return f"The following question is in {name}. Answer it step by step in {name}.\n\n{prompt}"


def extract_translation(generated: str, primer: str = TRANSLATION_PRIMER) -> str | None:
    """The text between the first ``<translated>`` and the next ``</translated>``, without white space around it.

    Args:
        generated: what the model wrote after the primer.
        primer: what was put before it.

    Returns:
        The translation, or None where the closing tag is missing: the model did not translate, or was cut off.

    Example:
        >>> extract_translation("Guten Tag.</translated>")
        'Guten Tag.'
        >>> extract_translation("Guten T") is None
        True
    """
    match = _TRANSLATED.search(primer + generated)
    return match[1].strip() if match else None


def has_repetition(text: str, threshold: int = 5) -> bool:
    """Whether one line of a text occurs ``threshold`` times or more, as in a model that runs in circles.

    Pairs of newlines are first collapsed, once; empty lines that are left count as lines.

    Args:
        text: the text.
        threshold: at least 1.

    Raises:
        ValueError: threshold below 1.
    """
    if threshold < 1:
        raise ValueError(f"threshold must be at least 1, got {threshold}.")
    lines = text.replace("\n\n", "\n").split("\n")
    return max(Counter(lines).values()) >= threshold


# A minus sign counts where no word or digit stands before it: "5-3" has no negative number.
_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\d[\d,.\u00a0\u202f\u066c]*|\d[\d,.\u00a0\u202f\u066c]*")
_SPACES = re.compile(r"[\u00a0\u202f\u066c]")


def _decimal(number: str) -> str:
    """A number with thousands separators removed and a point for the decimals."""
    if "," in number and "." in number:
        decimal = max(number.rfind(","), number.rfind("."))
        return re.sub(r"[,.]", "", number[:decimal]) + "." + number[decimal + 1 :]
    if re.fullmatch(r"\d{1,3}(,\d{3})+", number) or number.count(",") > 1:
        return number.replace(",", "")
    if number.count(".") > 1:
        return number.replace(".", "")
    return number.replace(",", ".")


def final_number(text: str) -> str | None:
    """The last number in a text, in plain digits: the answer to an arithmetic problem.

    Thousands separators are removed: commas or points between groups, non-breaking and thin spaces. A comma that does
    not come before three digits is a decimal comma; a single point is always a decimal point. Digits of other scripts
    are read.

    Args:
        text: the answer.

    Returns:
        The number without superfluous zeros ("1234", "-0.5"), or None if there is none.

    Example:
        >>> [final_number(text) for text in ("3 boxes cost $1,234.50.", "Es sind 18,00 Euro", "No idea.")]
        ['1234.5', '18', None]
    """
    found = _NUMBER.findall(text)
    if not found:
        return None
    last = _SPACES.sub("", found[-1]).rstrip(",.").replace("\u2212", "-")
    sign, digits = ("-", last[1:]) if last.startswith("-") else ("", last)
    whole, _, rest = _decimal(digits).partition(".")
    whole, rest = ("".join(str(int(digit)) for digit in part) for part in (whole, rest))
    number = (whole.lstrip("0") or "0") + (f".{rest.rstrip('0')}" if rest.rstrip("0") else "")
    return number if number == "0" else sign + number
