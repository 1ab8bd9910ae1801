"""Terminal output when a study is finished: the verdicts with their differences, and its answer at the end."""

import unicodedata
from collections.abc import Mapping
from pathlib import Path

from aqnpipe.artifacts.comparisons import ClaimsFile, ComparisonTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.report import numbers
from aqnpipe.report.claims import VERDICT_SYMBOLS, answer_text, claim_text, summary_line
from aqnpipe.report.words import Language, Words, load_words, visible

MAX_CLAIMS = 20
"""Verdicts shown; the decided ones come first, and the others are counted."""


def closing_lines(results: Path, language: Language, noises: Mapping[float, str]) -> list[str]:
    """Return the lines for the terminal; none without claims. Raises DataError if the claims are damaged.

    `noises`: names of the study's named noises by level.
    """
    path = results / "claims.json"
    if not path.is_file():
        return []
    claims, words = read_json(path, ClaimsFile), load_words(language, noises)
    answer = answer_text(claims, words)
    return [
        summary_line((claim.verdict for claim in claims.claims), words),
        *_verdict_lines(claims, results, words),
        *([] if answer is None else [visible(answer)]),
    ]


def _verdict_lines(claims: ClaimsFile, results: Path, words: Words) -> list[str]:
    table = read_table(results / "comparisons.parquet", ComparisonTable)
    rows = {row["comparison_id"]: row for row in table.iter_rows(named=True)}
    ordered = sorted(claims.claims, key=lambda claim: claim.verdict == "not_shown")
    width = max((_width(words(f"verdict.{verdict}")) for verdict in VERDICT_SYMBOLS), default=0)
    lines = []
    for claim in ordered[:MAX_CLAIMS]:
        row, verdict = rows.get(claim.comparison_id, {}), words(f"verdict.{claim.verdict}")
        interval = words.span(row.get("ci_low"), row.get("ci_high"), numbers.points)
        padding = " " * (width - _width(verdict))
        amount = f"{numbers.points(row.get('difference')):>6} ({interval})"
        lines.append(f"  {verdict}{padding}  {amount:<24}  {visible(claim_text(claim, words))}")
    left = len(ordered) - MAX_CLAIMS
    return lines + ([f"  {words('more', count=left)}"] if left > 0 else [])


def _width(text: str) -> int:
    """Return the columns that `text` takes on a terminal: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
