"""Verdicts on claims as the report shows them: their order, their symbols and their counts."""

from collections import Counter
from collections.abc import Iterable

from aqnpipe.report.words import Words

VERDICT_SYMBOLS = {"supported": "✓", "refuted": "✕", "equivalent": "≈", "not_shown": "?", "invalid": "!"}
"""In the order in which verdicts are counted."""


def counted_verdicts(verdicts: Iterable[str], words: Words) -> str:
    """Return how many claims have each verdict: `1 supported, 3 not shown`."""
    counts = Counter(verdicts)
    parts = [
        words("summary.part", count=counts[verdict], verdict=words(f"verdict.{verdict}"))
        for verdict in VERDICT_SYMBOLS
        if counts[verdict]
    ]
    return words("summary.separator").join(parts)


def summary_line(verdicts: Iterable[str], words: Words) -> str:
    """Return the number of claims and of each verdict in one sentence."""
    listed = list(verdicts)
    if not listed:
        return words("summary.none")
    return words("summary.line", count=len(listed), parts=counted_verdicts(listed, words))
