"""Untrusted text made safe to display: invisible characters are shown as codes, and long text is cut."""

import re
import unicodedata

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
