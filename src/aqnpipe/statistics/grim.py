"""What a printed number may stand for: counts behind a rounded percentage, and agreement at the printed precision."""

import math
from collections.abc import Sequence
from decimal import Decimal

COMMON_SIZES = (50, 64, 100, 128, 150, 200, 250, 256, 300, 400, 500, 512, 640, 1000, 1024, 1319, 2000, 5000, 7473)
"""Numbers of questions that people use; GSM8K has 7,473 training and 1,319 test questions."""

_SLACK = 1e-9


def half_unit(printed: str) -> float:
    """Return half a unit of the last printed digit."""
    return 0.5 * 10.0 ** int(Decimal(printed).as_tuple().exponent)


def possible_counts(percent: str, num_questions: int) -> tuple[int, ...]:
    """Return the numbers of right answers that print as `percent`; exact halves may have been rounded either way."""
    value, slack = float(percent), half_unit(percent) + _SLACK
    low = math.ceil((value - slack) / 100 * num_questions)
    high = math.floor((value + slack) / 100 * num_questions)
    return tuple(range(max(low, 0), min(high, num_questions) + 1))


def nearest_percentages(percent: str, num_questions: int) -> tuple[float, float]:
    """Return the possible percentages on both sides of `percent`."""
    count = float(percent) / 100 * num_questions
    return 100 * math.floor(count) / num_questions, 100 * math.ceil(count) / num_questions


def possible_sizes(percent: str, sizes: Sequence[int] = COMMON_SIZES, largest: int = 100_000) -> tuple[int, ...]:
    """Return numbers of questions that allow `percent`: the smallest one of all, then those of `sizes`."""
    smallest = next((number for number in range(1, largest) if possible_counts(percent, number)), None)
    common = tuple(number for number in sizes if possible_counts(percent, number))
    return common if smallest is None or smallest in common else (smallest, *common)


def agrees(value: float, printed: str, units: float = 0.5) -> bool:
    """Whether `value` rounds to `printed`; `units` of the last digit are allowed between them."""
    return abs(value - float(printed)) <= 2 * units * half_unit(printed) + _SLACK
