"""The catalogue: both languages say everything, with the same values, and nothing is in it that nobody says."""

import re
import string
from pathlib import Path

import pytest

import aqnpipe.report
from aqnpipe.report.words import LANGUAGES, catalogue, load_words

PACKAGE = Path(aqnpipe.report.__file__).parent
SOURCES = "\n".join(path.read_text() for path in [*PACKAGE.glob("*.py"), PACKAGE / "templates" / "report.html.jinja"])


def placeholders(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_text_is_there_in_every_language_with_the_same_values():
    for key, texts in catalogue().items():
        assert set(texts) == set(LANGUAGES), key
        assert all(isinstance(text, str) and text for text in texts.values()), key
        assert len({frozenset(placeholders(text)) for text in texts.values()}) == 1, key


def test_chinese_is_chinese():
    same = {key for key, texts in catalogue().items() if texts["en"] == texts["zh"]}
    assert same <= {"column.p", "column.strict", "column.mcnemar", "axis.sigma", "column.sigma"}


def test_every_key_is_used():
    """A key stands in the sources as it is, or its last part does where the first is put before it."""
    for key in catalogue():
        stem, _, last = key.rpartition(".")
        whole = f'"{key}"' in SOURCES
        built = (f'"{stem}.{{' in SOURCES or f'"{stem}." ~' in SOURCES) if stem else False
        assert whole or built, key
        if not whole and stem == "column":
            assert f'"{last}"' in SOURCES, key


def test_every_key_that_is_used_whole_exists():
    used = set(re.findall(r'\b(?:words|w)\(\s*"([a-z_.]+[a-z_])"[,)]', SOURCES))
    assert len(used) > 60
    assert used <= set(catalogue())


@pytest.mark.parametrize("language", LANGUAGES)
def test_values_are_put_in(language):
    assert "17" in load_words(language)("training.stride", stride=17)


def test_a_wrong_key_or_a_missing_value_is_an_error():
    words = load_words("en")
    with pytest.raises(KeyError):
        words("no.such.key")
    with pytest.raises(KeyError):
        words("training.stride")
