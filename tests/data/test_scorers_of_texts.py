"""Scorers of answers that are no numbers: boxed answers, letters of choices, texts; values worked out by hand."""

import pytest

from aqnpipe.config.evaluation import expected_scorer
from aqnpipe.data.scoring import extract_answer, grade


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("so \\boxed{42}.", "42"),
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{7} and an open \\boxed{8", "7"),
        ("no box: 42", None),
        ("\\boxed{", None),
    ],
)
def test_the_last_whole_box_counts(response, found):
    assert extract_answer(response, "boxed") == found


@pytest.mark.parametrize(
    ("response", "gold", "right"),
    [
        ("\\boxed{1,000}", "1000.0", True),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", True),
        ("\\boxed{\\text{Monday}}", "Monday", True),
        ("\\boxed{ x + 1 }", "x+1", True),
        ("\\boxed{50\\%}", "50", True),
        ("\\boxed{x+2}", "x+1", False),
        ("\\boxed{}", "1", False),
        ("42", "42", False),
    ],
)
def test_boxed_answers_are_compared_as_numbers_or_formulas(response, gold, right):
    assert grade(response, gold, "boxed").correct is right


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("B", "B"),
        ("(C) because", "C"),
        ("B. two", "B"),
        ("The answer is (D).", "D"),
        ("Answer: **A**", "A"),
        ("The answer is B. No, the answer is C", "C"),
        ("so \\boxed{A}", "A"),
        ("Because of that", None),
        ("A cat sat", "A"),
        ("I think", "I"),
        ("the answer is Apple", None),
        ("", None),
    ],
)
def test_letters_of_choices(response, found):
    assert extract_answer(response, "letter") == found


def test_texts_are_compared_without_regard_to_spaces():
    assert grade("  new\n york ", "new york", "text").correct
    assert not grade("New York", "new york", "text").correct
    assert grade(" ", "x", "text").answer is None


def test_scorers_that_cannot_fit_the_answers_are_named():
    assert expected_scorer("strict", "choice") == "letter for answers of format choice"
    assert expected_scorer("strict", "text") == "text or boxed for answers of format text"
    assert expected_scorer("letter", "gsm8k") == "a scorer of numbers for answers of format gsm8k"
    assert expected_scorer("boxed", "number") is None
