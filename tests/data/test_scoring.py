"""Scorers: hand-made cases, and comparison with the filters and metric of lm-evaluation-harness."""

import json
import os
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_harness import FILTERS, harness_grades

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
