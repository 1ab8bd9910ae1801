"""The catalogue of words: every text that a study shows to people, in English and Chinese, in `templates/words.yaml`.

A text has placeholders in braces. A placeholder says how its number is shown, for example `{difference:signed_points}`;
`report.numbers.FORMATS` has the forms. A value may also be a statement of an artifact, which is put in as text, or
several, which are put in as a list.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import yaml

from aqnpipe.artifacts.statements import Statement
from aqnpipe.report import numbers

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

_BETWEEN_SENTENCES: dict[Language, str] = {"en": " ", "zh": ""}


class Words:
    """The catalogue in one language; calling it with a key and the values of its placeholders returns the text.

    `noises`: names of the named noises by level, shown in place of a level.
    """

    def __init__(
        self, language: Language, texts: Mapping[str, str], noises: Mapping[float, str] = MappingProxyType({})
    ) -> None:
        self.language = language
        self.noises = noises
        self._texts = texts
        self._formatter = _Formatter(self)

    def __call__(self, key: str, /, **values: object) -> str:
        """Return the text of `key`. Raises KeyError if the catalogue lacks the key or a placeholder has no value."""
        return self._formatter.vformat(self._texts[key], (), values)

    def level(self, level: float) -> str:
        """Return a noise level as percent, or the name of the noise that it stands for."""
        return self.noises.get(level) or numbers.level(level)

    def of(self, statement: Statement) -> str:
        """Return the text of a statement."""
        return self(statement.key, **statement.values)

    def all_of(self, statements: Sequence[Statement]) -> str:
        """Return the texts of several statements as one paragraph."""
        return self.paragraph([self.of(statement) for statement in statements])

    def paragraph(self, sentences: Sequence[str]) -> str:
        """Join sentences as the language does."""
        return _BETWEEN_SENTENCES[self.language].join(sentences)

    def span(self, low: float | None, high: float | None, form: Callable[[float | None], str]) -> str:
        """Return an interval with both ends formatted by `form`: +8.3 to +16.1; a dash if an end is missing."""
        return numbers.MISSING if low is None or high is None else self("span", low=form(low), high=form(high))


class _Formatter(string.Formatter):
    """Fills placeholders with numbers in the forms of `report.numbers` and with the texts of statements."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Statement):
            return self._words.of(value)
        if isinstance(value, tuple):
            return self._words("list.separator").join(self._words.of(part) for part in value)
        if format_spec == "level" and isinstance(value, float | int):
            return self._words.level(value)
        return numbers.formatted(value, format_spec)


@cache
def catalogue() -> dict[str, dict[Language, str]]:
    """Return every key of the catalogue with its text in each language."""
    text = (resources.files("aqnpipe.report") / "templates" / "words.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def load_words(language: Language, noises: Mapping[float, str] = MappingProxyType({})) -> Words:
    """Return the catalogue in `language`; `noises`: names of the study's named noises by level."""
    return Words(language, {key: texts[language] for key, texts in catalogue().items()}, noises)
