"""Every word that the report says itself, in the language of the study: one catalogue, `templates/words.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


@dataclass(frozen=True)
class Words:
    """The catalogue in one language; calling it with a key and the values of its placeholders gives the text."""

    language: Language
    texts: Mapping[str, str]

    def __call__(self, key: str, **values: object) -> str:
        """Return the text of `key`. KeyError where the catalogue has no such key or a placeholder has no value."""
        return self.texts[key].format(**values)


def catalogue() -> dict[str, dict[Language, str]]:
    """Return every key of the catalogue with its text in every language."""
    text = (resources.files("aqnpipe.report") / "templates" / "words.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def load_words(language: Language) -> Words:
    """Return the catalogue in `language`."""
    return Words(language, {key: texts[language] for key, texts in catalogue().items()})
