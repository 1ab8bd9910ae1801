"""The catalogue of words: every text that a study shows to people, in English and Chinese, in `templates/words.yaml`.

A text has placeholders in braces. A placeholder says how its number is shown, for example `{difference:signed_points}`;
`report.numbers.FORMATS` has the forms. A value may also be a statement of an artifact, which is put in as text, or
several, which are put in as a list.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal

import yaml

from aqnpipe.artifacts.base import Statement
from aqnpipe.report import numbers

_KEPT = "\n\t"
_SUSPECT = re.compile(r"[^\x20-\x7e\xa0-\xac\xae-\u02ff\u3000-\u30ff\u4e00-\u9fff\n\t]")
"""Characters outside the common printable ranges; their Unicode category decides."""

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """Show control, formatting, bidirectional-override, private and unassigned characters as their code, `⟨U+202E⟩`.

    Line feeds and tabs stay. The result cannot reorder, hide or break the text around it.
    """
    return _SUSPECT.sub(_shown, text)


def clipped(text: str, limit: int) -> tuple[str, int]:
    """Return at most `limit` characters of `text`, and the number of characters left out."""
    return text[:limit], max(len(text) - limit, 0)


def _shown(match: re.Match[str]) -> str:
    character = match.group()
    unseen = character not in _KEPT and unicodedata.category(character) in _UNSEEN
    return f"⟨U+{ord(character):04X}⟩" if unseen else character


Language = Literal["en", "zh"]

_BETWEEN_SENTENCES: dict[Language, str] = {"en": " ", "zh": ""}


@dataclass(frozen=True)
class Text:
    """A text of the study; `untranslated` where the page is in Chinese and the study gives it in English alone."""

    text: str
    untranslated: bool


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

    def own(self, text: str, chinese: str | None) -> Text:
        """Return a text of the study in the language of the page, or the English one marked as not translated."""
        if self.language == "en":
            return Text(text, untranslated=False)
        return Text(chinese or text, untranslated=not chinese and bool(text))

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


def at_noise(level: float, words: Words) -> str:
    """Return at which noise something is, or that it is without."""
    return words("noise.at", level=level) if level else words("noise.without")
