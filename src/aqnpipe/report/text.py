"""Untrusted text made harmless to look at: what a reader cannot see is shown, and what is too long is cut."""

import re
import unicodedata

_KEPT = "\n\t"
_SUSPECT = re.compile(r"[^\x20-\x7e\xa0-\xac\xae-\u02ff\u3000-\u30ff\u4e00-\u9fff\n\t]")
"""Characters outside the common printable ranges, which are worth a look at their category."""

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """Show control, formatting, bidirectional-override, private and unassigned characters as their code, `⟨U+202E⟩`.

    Line feeds and tabs stay. What is left cannot reorder, hide or break the text around it.
    """
    return _SUSPECT.sub(_shown, text)


def clipped(text: str, limit: int) -> tuple[str, int]:
    """Return at most `limit` characters of `text`, and how many were left out."""
    return text[:limit], max(len(text) - limit, 0)


def _shown(match: re.Match[str]) -> str:
    character = match.group()
    unseen = character not in _KEPT and unicodedata.category(character) in _UNSEEN
    return f"⟨U+{ord(character):04X}⟩" if unseen else character
