"""Texts of a study in the language of the page, and whether the study lacks them in that language."""

from dataclasses import dataclass

from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class Text:
    """A text of the study; `untranslated` where the page is in Chinese and the study gives it in English alone."""

    text: str
    untranslated: bool


def in_language(text: str, chinese: str | None, words: Words) -> Text:
    """Return the text in the language of the page, or the English one marked as not translated."""
    if words.language == "en":
        return Text(text, untranslated=False)
    return Text(chinese or text, untranslated=not chinese and bool(text))


def title(study: Study, words: Words) -> Text:
    """Return the title of the report."""
    return in_language(study.config.report.title, study.config.report.title_zh, words)


def question(study: Study, words: Words) -> Text:
    """Return the question of the study."""
    return in_language(study.config.report.question, study.config.report.question_zh, words)


def description(arm: Arm, words: Words) -> Text:
    """Return what an arm is."""
    return in_language(arm.description, arm.description_zh, words)
