"""The GRIM test (Brown & Heathers 2017): which counts round to a printed percentage, and whether a figure is possible.

An accuracy over n questions is a multiple of 1/n. A printed percentage that no multiple rounds to cannot be correct.
"""

import math
from collections.abc import Sequence
from decimal import Decimal

COMMON_SIZES = (50, 64, 100, 128, 150, 200, 250, 256, 300, 400, 500, 512, 640, 1000, 1024, 1319, 2000, 5000, 7473)
"""Common numbers of questions; GSM8K has 7,473 training and 1,319 test questions."""

_SLACK = 1e-9


def half_unit(printed: str) -> float:
    """Return half a unit of the last printed digit."""
    return 0.5 * 10.0 ** int(Decimal(printed).as_tuple().exponent)


def possible_counts(percent: str, num_questions: int) -> tuple[int, ...]:
    """Return the numbers of correct answers that round to `percent`; exact halves may be rounded either way."""
    value, slack = float(percent), half_unit(percent) + _SLACK
    low = math.ceil((value - slack) / 100 * num_questions)
    high = math.floor((value + slack) / 100 * num_questions)
    return tuple(range(max(low, 0), min(high, num_questions) + 1))


def nearest_percentages(percent: str, num_questions: int) -> tuple[float, float]:
    """Return the nearest possible percentages below and above `percent`."""
    count = float(percent) / 100 * num_questions
    return 100 * math.floor(count) / num_questions, 100 * math.ceil(count) / num_questions


def possible_sizes(percent: str, sizes: Sequence[int] = COMMON_SIZES, largest: int = 100_000) -> tuple[int, ...]:
    """Return numbers of questions for which `percent` is possible: the smallest, then those in `sizes`."""
    smallest = next((number for number in range(1, largest) if possible_counts(percent, number)), None)
    common = tuple(number for number in sizes if possible_counts(percent, number))
    return common if smallest is None or smallest in common else (smallest, *common)


def agrees(value: float, printed: str, units: float = 0.5) -> bool:
    """Return whether `value` agrees with `printed` within `units` of its last digit (0.5: it rounds to `printed`)."""
    return abs(value - float(printed)) <= 2 * units * half_unit(printed) + _SLACK
