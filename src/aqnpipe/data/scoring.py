"""Scorers: extraction and grading of answers, shared by the reward, the evaluation and `aqnpipe score`."""

import re
from decimal import Context, Decimal, InvalidOperation, Overflow
from typing import NamedTuple

from aqnpipe.config.evaluation import Scorer

SCORERS: tuple[Scorer, ...] = ("strict", "last_number", "harness_strict", "harness_flexible")
"""Scorers of numbers, which every evaluation applies. Others are applied where they are the primary one."""

NUMBER_SCORERS: tuple[Scorer, ...] = (*SCORERS, "verl_strict")
"""All scorers of numbers."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

# GSM8K writes thousands separators and currency signs; an answer after `####` may carry both.
_NUMBER = r"-?\$?-?\d[\d,]*(?:\.\d+)?"
_STRICT = re.compile(rf"####\s*({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)

# From lm_eval/tasks/gsm8k/gsm8k.yaml, version 3 of the task; verl has the same expression.
_HARNESS_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_HARNESS_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_VERL_CHARACTERS = 300
_HARNESS_IGNORED = tuple(map(re.compile, (",", r"\$", r"(?s).*#### ", r"\.$")))


# "the answer is (B)", "Answer: **B**": the last one counts; else a response that begins with a letter, "B." or "(B)".
_NAMED_LETTER = re.compile(r"(?i:answer(?:\s+is)?)\s*:?\s*[*(\[]*([A-Z])(?![A-Za-z])")
_FIRST_LETTER = re.compile(r"\s*[*(\[]*([A-Z])(?=[\s.):,\]*]|$)")

# Ways to write the same in LaTeX that comparisons ignore.
_LATEX_IGNORED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\\$|\$|\\%|%|\s+")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")


class Graded(NamedTuple):
    """The answer that a scorer found in a response (None: no answer), and whether it is correct."""

    answer: str | None
    correct: bool


def extract_answer(response: str, scorer: Scorer) -> str | None:
    """Return the answer that `scorer` finds in `response`, in the form in which it is compared; None if it finds none.

    strict and last_number return a canonical decimal; the two harness scorers return text without commas, dollar signs
    and a final period, verl_strict text without commas; boxed returns the content of the box, letter a capital letter,
    text the response.
    """
    match scorer:
        case "strict":
            first = _STRICT.search(response)
            return normalise_number(first.group(1)) if first else None
        case "last_number":
            numbers = _ANY_NUMBER.findall(response)
            return normalise_number(numbers[-1]) if numbers else None
        case "harness_strict":
            first = _HARNESS_STRICT.search(response)
            return _harness_text(first.group(1)) if first else None
        case "harness_flexible":
            pairs = _HARNESS_FLEXIBLE.findall(response)
            return _harness_text(pairs[-1][0] or pairs[-1][1]) if pairs else None
        case "verl_strict":
            numbers = _HARNESS_STRICT.findall(response[-_VERL_CHARACTERS:])
            return numbers[-1].replace(",", "") if numbers else None
        case "boxed":
            return boxed_answer(response)
        case "letter":
            return _letter_answer(response)
        case "text":
            return response.strip() or None


def boxed_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose braces are balanced; None if there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, first = 0, start + len("\\boxed")
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first + 1 : place].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def _letter_answer(response: str) -> str | None:
    boxed = boxed_answer(response)
    named = [boxed] if boxed and boxed in LETTERS and len(boxed) == 1 else _NAMED_LETTER.findall(response)
    if named:
        return str(named[-1])
    first = _FIRST_LETTER.match(response)
    return first.group(1) if first else None


def _same_formula(found: str, gold: str) -> bool:
    """Return whether two answers are the same number, or the same text but for spaces and common ways to write it."""
    first, second = (_plain_formula(text) for text in (found, gold))
    number = normalise_number(first)
    return first == second or (number is not None and number == normalise_number(second))


def _plain_formula(text: str) -> str:
    plain = _LATEX_TEXT.sub(r"\1", text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _LATEX_IGNORED.sub("", plain).removesuffix(".")


def normalise_number(text: str) -> str | None:
    """Return `text` as a canonical decimal ("1,000.50" -> "1000.5", "-0" -> "0"), or None if it is not a number."""
    digits = text.replace(",", "").replace("$", "").strip()
    try:
        # The default precision of 28 digits would round different long numbers to the same value.
        value = Decimal(digits).normalize(Context(prec=len(digits) + 1))
    except (InvalidOperation, Overflow):
        return None
    if not value.is_finite():
        return None
    canonical = format(value, "f")
    return "0" if canonical == "-0" else canonical


def grade(response: str, gold_answer: str, scorer: Scorer) -> Graded:
    """Return the answer that `scorer` finds in `response`, and whether it equals `gold_answer` for that scorer."""
    found = extract_answer(response, scorer)
    if scorer == "boxed":
        return Graded(found, found is not None and _same_formula(found, gold_answer))
    if scorer in ("letter", "text"):
        return Graded(found, found is not None and found.split() == gold_answer.split())
    if scorer == "verl_strict":
        return Graded(found, found == gold_answer.replace(",", ""))
    harness = scorer in ("harness_strict", "harness_flexible")
    gold = _harness_text(gold_answer) if harness else normalise_number(gold_answer)
    return Graded(found, found is not None and found == gold)


def is_correct(response: str, gold_answer: str, scorer: Scorer) -> bool:
    """Return whether the answer that `scorer` finds in `response` equals `gold_answer`."""
    return grade(response, gold_answer, scorer).correct


def _harness_text(text: str) -> str:
    """Return `text` as exact_match of the harness compares it. It also ignores case, which numbers do not have."""
    for ignored in _HARNESS_IGNORED:
        text = ignored.sub("", text)
    return text
