import pytest

from aqnpipe.scoring import extract_answer, is_correct, normalise_number


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
