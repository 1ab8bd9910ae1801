"""Rewards and advantages of the audit are those of the scorer, by code of their own."""

import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aqnpipe.data.scoring import is_correct
from aqnpipe.training.audit import grading

RESPONSES = st.text(alphabet="#-$,. 0157ab\n٣", max_size=24)


@given(RESPONSES, st.text(alphabet="-$,.015", max_size=6))
@example("--5", "5")
@example(" abc #### 1,000.50", "1000.5")
@example("#5", "5")
@example("-0", "0")
def test_the_audit_grades_as_the_strict_scorer_does(text, gold):
    for response in (text, f"####{text}"):
        for right in (gold, response.replace("#", "").strip()):
            assert grading.grades([response], [right], None) == [is_correct(response, right, "strict")]


def test_what_follows_the_stop_text_does_not_count():
    response = "#### 4\nQuestion: 1 + 1\n#### 7"
    assert grading.grades([response] * 2, ["4", "7"], "Question:") == [True, False]
    assert grading.grades(["Question: #### 7"] * 2, ["7", "7"], None) == [True, True]
    assert grading.rewards(["#### 7", "7"], ["7", "7"], None) == [1.0, 0.0]


def test_advantages_by_hand():
    """One group of three with one correct answer, and one without any."""
    found = grading.advantages([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3)
    deviation = statistics.stdev([1, 0, 0]) + 1e-4
    assert found == pytest.approx([2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, 0, 0, 0])
    assert grading.centred([1.0, 0.0, 1.0, 1.0], 2) == [0.5, -0.5, 0.0, 0.0]
