"""How numbers read: percent, points, p-values, scales, counts, times. A missing number is an en dash."""

import math
from collections.abc import Callable

from aqnpipe.report.words import Words

MISSING = "–"
NBSP = "\u00a0"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Format a fraction as percent without the sign: 0.705 -> 70.5."""
    return MISSING if fraction is None else f"{_no_negative_zero(100 * fraction, digits):.{digits}f}"


def points(fraction: float | None, digits: int = 1) -> str:
    """Format a difference of fractions as signed percentage points: 0.0243 -> +2.4."""
    if fraction is None:
        return MISSING
    return f"{_no_negative_zero(100 * fraction, digits):+.{digits}f}".replace("-", "−")


def span(low: float | None, high: float | None, words: Words, form: Callable[[float | None], str]) -> str:
    """Format an interval, both ends by `form`: +8.3 to +16.1."""
    return MISSING if low is None or high is None else words("span", low=form(low), high=form(high))


def p_value(value: float | None) -> str:
    """Format a p-value: three decimals, two above 0.1, and a bound below 0.001."""
    if value is None:
        return MISSING
    return f"<{NBSP}0.001" if value < 0.001 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def scale(value: float | None) -> str:
    """Format a noise scale or sigma with four significant digits."""
    return MISSING if value is None else f"{value:.4g}"


def metric(value: float | None) -> str:
    """Format a measured quantity of unknown size with four significant digits."""
    return MISSING if value is None or math.isnan(value) else f"{value:.4g}".replace("-", "−")


def count(value: int | None) -> str:
    """Format a count with thousands separators."""
    return MISSING if value is None else f"{value:,}"


def noise_level(level: float) -> str:
    """Format an evaluation noise level as percent: 0.05 -> 5 %."""
    return f"{100 * level:.3g}{NBSP}%"


def confidence(level: float) -> str:
    """Format the confidence of an interval as percent: 0.95 -> 95 %."""
    return f"{100 * level:.3g}{NBSP}%"


def _no_negative_zero(value: float, digits: int) -> float:
    return round(value, digits) + 0.0
