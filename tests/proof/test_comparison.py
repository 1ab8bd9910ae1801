"""Of several random numbers, the audit takes those that explain a result."""

import pytest

from aqnpipe.proof.comparison import best_explained


def columns(found_expected, *, wrong=0, requested=1.0, found=1.0):
    return {
        "wrong": wrong,
        "found_expected": found_expected,
        "requested_squares": requested,
        "found_squares": found,
    }


EXACT, NEAR, FAR, WRONG = columns(1.0), columns(0.7), columns(-0.2), columns(1.0, wrong=3)


@pytest.mark.parametrize(
    ("tried", "chosen"),
    [
        ([FAR, NEAR, EXACT, FAR], EXACT),
        ([FAR, NEAR, FAR], NEAR),
        ([WRONG, FAR], FAR),
        ([WRONG, columns(0.5, wrong=1)], WRONG),
        # An error without random numbers has no size to compare.
        ([columns(0.0, requested=0.0), EXACT], columns(0.0, requested=0.0)),
    ],
)
def test_the_numbers_that_explain_a_result_are_taken(tried, chosen):
    assert best_explained(iter(tried)) == chosen


def test_numbers_behind_those_that_explain_it_are_not_tried():
    tried = iter([FAR, EXACT, NEAR])
    best_explained(tried)
    assert next(tried) is NEAR
