"""The sentence that answers a study, for the summary and for the end of the terminal output."""

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.report.words import Words


def answer_text(claims: ClaimsFile, words: Words) -> str | None:
    """Return the sentence on the primary claim; None if the study declares none."""
    return None if claims.answer is None else words.of(claims.answer)
