"""Replacements in the texts of files. What the file no longer contains fails, so that no test loses its subject."""

import re
from pathlib import Path
from typing import AnyStr


def replaced(text: AnyStr, old: AnyStr, new: AnyStr, times: int = 1) -> AnyStr:
    """Replace `old` by `new` in a text that contains it exactly `times` times."""
    found = text.count(old)
    assert found == times, f"found {found} times, expected {times}: {old!r}"
    return text.replace(old, new)


def substituted(text: AnyStr, pattern: AnyStr | re.Pattern[AnyStr], new: AnyStr, times: int = 1) -> AnyStr:
    """Replace what a regular expression matches in a text that it matches exactly `times` times."""
    result, found = re.subn(pattern, new, text)
    assert found == times, f"found {found} times, expected {times}: {pattern!r}"
    return result


def replace_in(path: Path, *replacements: tuple[str, str]) -> None:
    """Replace each `old` by its `new` in a file that contains it exactly once."""
    text = path.read_text(encoding="utf-8")
    for old, new in replacements:
        text = replaced(text, old, new)
    path.write_text(text, encoding="utf-8")
