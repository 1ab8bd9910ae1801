"""Scorers: cases by hand, the filters and metric of lm-evaluation-harness, and a second strict scorer."""

import json
import os
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lm_harness import FILTERS, harness_grades

from aqnpipe.config.evaluation import expected_scorer
from aqnpipe.data.scoring import SCORERS, extract_answer, grade, is_correct, normalise_number

TRANSCRIPTS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "support" / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()
]
TWINS = (("strict", "harness_strict"), ("last_number", "harness_flexible"))


@pytest.mark.parametrize(
    ("response", "strict", "last_number"),
    [
        ("3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,234", "1234", "1234"),
        ("#### $18.00", "18", "18"),
        ("#### -5", "-5", "-5"),
        ("####7 and then 9", "7", "9"),
        ("the answer is 12", None, "12"),
        ("no number at all", None, None),
        ("#### seven", None, None),
        ("#### 1 #### 2", "1", "2"),
        ("", None, None),
    ],
)
def test_extraction_by_hand(response, strict, last_number):
    assert extract_answer(response, "strict") == strict
    assert extract_answer(response, "last_number") == last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("007", "7"), ("1e3", "1000"), ("2.50", "2.5"), ("-0", "0"), ("1,000,000", "1000000"), ("x", None), ("NaN", None)],
)
def test_numbers_are_canonical(text, number):
    assert normalise_number(text) == number


def test_correct_compares_numbers_not_texts():
    assert is_correct("#### 42.0", "42", "strict")
    assert not is_correct("42", "42", "strict")
    assert is_correct("42", "42", "last_number")


def test_long_numbers_are_compared_to_the_last_digit():
    number = "1" + "0" * 50
    assert not is_correct(f"#### {number}1", f"{number}2", "strict")
    assert is_correct(f"#### {number},001", f"{number}001", "strict")
    assert normalise_number("1e999999999999") is None


@pytest.mark.parametrize(
    ("response", "found", "correct"),
    [
        ("so #### 42", "42", True),
        ("#### 1,234", "1234", False),
        ("#### -42", "-42", False),
        ("#### 42 dollars", "42", True),
        # Wrong here, right for `strict`.
        ("#### $42", None, False),
        ("####42", None, False),
        ("####  42", None, False),
        ("#### 42.00", "42.00", False),
        ("#### 42.", "42.", False),
        ("#### 042", "042", False),
        ("#### 42" + " " * 294, None, False),
        # Right here, wrong for `strict`: the last one counts.
        ("#### 41 no, #### 42", "42", True),
        ("no number", None, False),
        ("x" * 1000 + "#### 42" + "." + "y" * 292, "42.", False),
        ("x" * 1000 + "#### 42" + " " + "y" * 292, "42", True),
    ],
)
def test_verl_grades_by_hand(response, found, correct):
    assert grade(response, "42", "verl_strict") == (found, correct)


@pytest.mark.parametrize(("response", "strict"), [("#### 1,234", True), ("#### $1,234", True), ("#### 1,234.0", True)])
def test_verl_ignores_commas_and_nothing_else(response, strict):
    assert is_correct(response, "1,234", "strict") == strict
    assert is_correct(response, "1,234", "verl_strict") == (response == "#### 1,234")


@given(st.integers(), st.integers(min_value=0, max_value=6))
def test_every_way_of_writing_a_number_is_the_same_number(number, zeros):
    written = f"{number:,}" + ("." + "0" * zeros if zeros else "")
    assert normalise_number(written) == str(number)
    assert is_correct(f"so #### {written}.", str(number), "strict")
    assert is_correct(f"so it is {written}", str(number), "last_number")


@pytest.mark.parametrize(
    ("response", "gold", "found", "correct"),
    [
        ("#### 1,000.", "1000", "1000", True),
        ("#### 1,000.", "1,000", "1000", True),
        ("#### 42.0", "42", "42.0", False),
        ("####42", "42", None, False),
        ("#### $42", "42", None, False),
    ],
)
def test_the_harnesss_strict_match_by_hand(response, gold, found, correct):
    assert grade(response, gold, "harness_strict") == (found, correct)


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra dev): the harness's own code is not at hand")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield lambda golds, responses: harness_grades(tmp_path_factory.mktemp("harness"), golds, responses)


def as_compared(text):
    """The harness strips these only when it compares; our scorers of its name hand out what they compare."""
    return None if text is None else re.sub(r"\.$", "", re.sub(r"[,$]", "", text))


def assert_equal_to_the_harness(harness, golds, responses):
    for scorer, expected in harness(golds, responses).items():
        ours = [grade(response, gold, scorer) for response, gold in zip(responses, golds, strict=True)]
        assert ours == [(as_compared(found), correct) for found, correct in expected], scorer


def test_hard_transcripts_are_scored_as_by_the_harness(harness):
    assert set(FILTERS) < set(SCORERS)
    assert_equal_to_the_harness(
        harness, [case["gold_answer"] for case in TRANSCRIPTS], [case["response"] for case in TRANSCRIPTS]
    )


def test_random_texts_are_scored_as_by_the_harness(harness):
    draws = random.Random(6)
    pieces = ["#### ", "####", " ", "-", "$", ",", ".", "0", "1", "42", "7", "\n", "x", "\u0664", "%"]
    responses = ["".join(draws.choices(pieces, k=draws.randrange(12))) for _ in range(3000)]
    golds = draws.choices(["42", "7", "-1", "1,042", "0"], k=len(responses))
    assert_equal_to_the_harness(harness, golds, responses)
    right = sum(grade(*pair, "harness_flexible").correct for pair in zip(responses, golds, strict=True))
    assert 100 < right < 2900


def test_the_table_in_the_docs_counts_the_hard_cases(harness):
    graded = harness([case["gold_answer"] for case in TRANSCRIPTS], [case["response"] for case in TRANSCRIPTS])
    table = (Path(__file__).parents[2] / "docs" / "scorers.md").read_text(encoding="utf-8")
    assert f"hard cases ({len(TRANSCRIPTS)})" in table
    for scorer in SCORERS:
        ours = [grade(case["response"], case["gold_answer"], scorer).correct for case in TRANSCRIPTS]
        same = [sum(mine == correct for mine, (_, correct) in zip(ours, graded[twin], strict=True)) for twin in FILTERS]
        assert f"| `{scorer}` | {same[0]} | {same[1]} |" in table


def test_ours_differ_from_the_harness_where_the_transcripts_say_why():
    """And nowhere else: `why` stands at each difference in judgement or in whether there is an answer."""
    for case in TRANSCRIPTS:
        pairs = [
            [grade(case["response"], case["gold_answer"], scorer) for scorer in (ours, theirs)]
            for ours, theirs in TWINS
        ]
        differs = any(
            first.correct != second.correct or (first.answer is None) != (second.answer is None)
            for first, second in pairs
        )
        assert differs == ("why" in case), case


def test_the_gold_solutions_of_gsm8k_are_right_under_every_scorer(harness):
    folder = os.environ.get("AQNPIPE_GSM8K_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("AQNPIPE_GSM8K_DIR names no folder with the real GSM8K")
    lines = Path(folder, "test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    golds = [answer.rsplit("#### ")[-1] for answer in answers]
    assert_equal_to_the_harness(harness, golds, answers)
    for scorer in SCORERS:
        assert all(is_correct(answer, gold, scorer) for answer, gold in zip(answers, golds, strict=True))


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


_MARK = "####"
RESPONSES = st.text(alphabet="#-$,. 0157ab\n٣", max_size=24)


@given(RESPONSES, st.text(alphabet="-$,.015", max_size=6))
@example("--5", "5")
@example(" abc #### 1,000.50", "1000.5")
@example("#5", "5")
@example("-0", "0")
def test_the_strict_scorer_grades_as_a_second_one_does(text, gold):
    for response in (text, f"####{text}"):
        for right in (gold, response.replace("#", "").strip()):
            assert _is_right(response, right) == is_correct(response, right, "strict")


def _is_right(text: str, gold: str) -> bool:
    answer = _marked_number(text)
    return answer is not None and _value(answer) is not None and _value(answer) == _value(gold)


def _marked_number(text: str) -> str | None:
    """Return the first number that directly follows a mark, with its signs and separators; None if there is none."""
    place = text.find(_MARK)
    while place >= 0:
        number = _number_at(text[place + len(_MARK) :].lstrip())
        if number:
            return number
        place = text.find(_MARK, place + 1)
    return None


def _number_at(text: str) -> str:
    """Return the number at the start of `text`: signs and a currency sign, digits with commas, and decimals."""
    sign = 0
    for allowed in "-$-":
        sign += text[sign : sign + 1] == allowed
    end = sign
    while end < len(text) and (text[end].isdecimal() or (text[end] == "," and end > sign)):
        end += 1
    if end == sign:
        return ""
    decimals = end + 1
    while decimals < len(text) and text[decimals].isdecimal():
        decimals += 1
    return text[: decimals if text[end : end + 1] == "." and decimals > end + 1 else end]


def _value(number: str) -> Fraction | None:
    """Return the exact value of a number as written in a text; None if it is not a number."""
    plain = number.replace(",", "").replace("$", "").strip()
    try:
        return Fraction(plain) if "/" not in plain else None
    except ValueError:
        return None
