"""Answers from responses: the one scorer that reward and evaluation share."""

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

Scorer = Literal["strict", "last_number"]

# GSM8K writes thousands separators and currency signs; an answer after `####` may carry both.
_NUMBER = r"-?\$?-?\d[\d,]*(?:\.\d+)?"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)


def extract_answer(response: str, scorer: Scorer) -> str | None:
    """Return the normalised number that `scorer` finds in `response`, or None.

    strict: the number after the first `####`. last_number: the last number anywhere in the text.
    """
    if scorer == "strict":
        match = _STRICT.search(response)
        return normalise_number(match.group(1)) if match else None
    numbers = _ANY_NUMBER.findall(response)
    return normalise_number(numbers[-1]) if numbers else None


def normalise_number(text: str) -> str | None:
    """Return `text` as a canonical decimal ("1,000.50" -> "1000.5", "-0" -> "0"), or None if it is no number."""
    try:
        value = Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    if not value.is_finite():
        return None
    canonical = format(value.normalize() + 0, "f")
    return "0" if canonical == "-0" else canonical


def is_correct(response: str, gold_answer: str, scorer: Scorer) -> bool:
    """Tell whether the number that `scorer` finds equals the gold answer (compared as canonical decimals)."""
    found = extract_answer(response, scorer)
    return found is not None and found == normalise_number(gold_answer)
