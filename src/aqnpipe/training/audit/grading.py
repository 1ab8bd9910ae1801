"""Rewards and group advantages, computed again from texts and gold answers by code of their own.

`data.scoring` grades for the trainer and for the evaluation; an error there must not be hidden by using it here.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

_MARK = "####"
_STD_OFFSET = 1e-4
"""GRPO's constant that keeps the advantage finite where all rewards of a group are equal."""


def rewards(texts: Sequence[str], golds: Sequence[str], stop_text: str | None) -> list[float]:
    """Return the study's reward of every completion: 1 if it is correct, otherwise 0."""
    return [float(is_right) for is_right in grades(texts, golds, stop_text)]


def centred(of_rewards: Sequence[float], group_size: int) -> list[float]:
    """Return reward - mean within each group of consecutive rewards: advantages that are not normalised."""
    groups = [of_rewards[start : start + group_size] for start in range(0, len(of_rewards), group_size)]
    return [reward - math.fsum(group) / len(group) for group in groups for reward in group]


def grades(texts: Sequence[str], golds: Sequence[str], stop_text: str | None) -> list[bool]:
    """Return True for every text whose first number behind a `####`, before `stop_text`, is the gold answer."""
    cut = [text if stop_text is None else text.partition(stop_text)[0] for text in texts]
    return [_is_right(text, gold) for text, gold in zip(cut, golds, strict=True)]


def advantages(of_rewards: Sequence[float], group_size: int) -> list[float]:
    """Return (reward - mean) / (standard deviation + 1e-4) within each group of consecutive rewards."""
    found: list[float] = []
    for start in range(0, len(of_rewards), group_size):
        group = of_rewards[start : start + group_size]
        mean = math.fsum(group) / len(group)
        variance = math.fsum((reward - mean) ** 2 for reward in group) / (len(group) - 1)
        found.extend((reward - mean) / (math.sqrt(variance) + _STD_OFFSET) for reward in group)
    return found


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
