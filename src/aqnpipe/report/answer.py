"""The sentence that answers a study, for the summary and for the end of the terminal output."""

from pathlib import Path

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.report.words import Language, Words, load_words


def answer_text(claims: ClaimsFile, words: Words) -> str | None:
    """Return the sentence on the primary claim; None if the study declares none."""
    return None if claims.answer is None else words.of(claims.answer)


def answer_in(results: Path, language: Language) -> str | None:
    """Return the sentence that answers the study in a results folder; None without claims or a primary claim.

    Raises DataError if the claims are damaged.
    """
    path = results / "claims.json"
    return answer_text(read_json(path, ClaimsFile), load_words(language)) if path.is_file() else None
