"""The strict scorer against a second one that scans the text by hand, without regular expressions."""

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from aqnpipe.data.scoring import is_correct

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
