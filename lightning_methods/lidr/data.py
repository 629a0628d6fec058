"""A small world in two languages: things, what is to be said of each, and words for both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from .preference import PreferencePair, language_prompt

__all__ = ["ToyWorld", "language_prompt"]


class ToyWorld(NamedTuple):
    """Entities with one property each, named in a dominant language and in a weaker one with other words for all.

    A prompt is the name of an entity, the answer the name of its property: ``thing7`` -> ``red3`` in the dominant
    language "en", ``ding7`` -> ``rot3`` in the weaker "de". Words are translated one by one. A model that knows the
    facts in one language and the dictionary could answer in both.

    Attributes:
        num_entities: number of things.
        num_answers: number of properties.
        seed: of the facts: which property an entity has, all equally often.

    Example:
        >>> world = ToyWorld(num_entities=4, num_answers=2)
        >>> world.prompts("de")
        ['ding0', 'ding1', 'ding2', 'ding3']
        >>> world.translate("ding0", "en")
        'thing0'
    """

    num_entities: int = 96
    num_answers: int = 12
    seed: int = 0

    @property
    def languages(self) -> tuple[str, str]:
        """The dominant and the weaker language."""
        return ("en", "de")

    @property
    def facts(self) -> list[int]:
        """The property of each entity."""
        facts = [entity % self.num_answers for entity in range(self.num_entities)]
        random.Random(f"facts/{self.seed}").shuffle(facts)
        return facts

    def prompts(self, language: str) -> list[str]:
        """The names of the entities."""
        return [f"{_STEMS[language][0]}{entity}" for entity in range(self.num_entities)]

    def answers(self, language: str) -> list[str]:
        """The right answer to each prompt."""
        return [f"{_STEMS[language][1]}{fact}" for fact in self.facts]

    def dictionary(self, language: str) -> list[str]:
        """All names, of entities and of properties, in the same order in both languages."""
        return self.prompts(language) + [f"{_STEMS[language][1]}{answer}" for answer in range(self.num_answers)]

    def translate(self, text: str, language: str) -> str:
        """A text word by word; words that are no names, or are in the language, stay."""
        other = next(code for code in self.languages if code != language)
        table = dict(zip(self.dictionary(other), self.dictionary(language), strict=True))
        return " ".join(table.get(word, word) for word in text.split())

    def words(self) -> list[str]:
        """The vocabulary: both dictionaries and the words of requests for translation."""
        own = [word for language in self.languages for word in self.dictionary(language)]
        return [*own, *self.languages, "<translated>", "</translated>"]

    @staticmethod
    def translation_prompt(text: str, language: str) -> str:
        """A request for a translation in the shortest form, which the model was pretrained on."""
        return f"{language} {text} "

    def training_texts(self, dominant_known: int, weak_known: Sequence[int] | float) -> list[tuple[str, str]]:
        """What a model reads before it is asked anything: facts and translations, as pairs of prompt and answer.

        Args:
            dominant_known: the facts of how many entities are there in the dominant language.
            weak_known: the entities whose facts are there in the weaker one, or which share of them (by ``seed``).

        Returns:
            ``(prompt, answer)``: the facts, then every word translated both ways.
        """
        order = list(range(self.num_entities))
        random.Random(f"known/{self.seed}").shuffle(order)
        weak = weak_known if not isinstance(weak_known, float) else order[: round(weak_known * self.num_entities)]
        known = (order[len(order) - dominant_known :], weak)
        texts = []
        for language, entities in zip(self.languages, known, strict=True):
            prompts, answers = self.prompts(language), self.answers(language)
            texts += [(f"{prompts[entity]} ", answers[entity]) for entity in sorted(entities)]
        for language, other in (self.languages, self.languages[::-1]):
            for word, translated in zip(self.dictionary(other), self.dictionary(language), strict=True):
                request = self.translation_prompt(word, language) + "<translated> "
                texts.append((request, f"{translated} </translated>"))
        return texts

    def pairs(self) -> list[PreferencePair]:
        """Preference pairs as the method would make them of a model that errs in the weaker language.

        In the weaker language the right answer is preferred over a wrong one; in the dominant language over the
        translation of that wrong one.
        """
        draw = random.Random(f"pairs/{self.seed}")
        facts = self.facts
        wrong = [draw.choice([a for a in range(self.num_answers) if a != fact]) for fact in facts]
        pairs = []
        for language in self.languages:
            names = self.dictionary(language)[self.num_entities :]
            rows = zip(self.prompts(language), self.answers(language), wrong, strict=True)
            pairs += [
                PreferencePair(str(entity), language, prompt, answer, names[other])
                for entity, (prompt, answer, other) in enumerate(rows)
            ]
        return pairs


_STEMS = {"en": ("thing", "red"), "de": ("ding", "rot")}
