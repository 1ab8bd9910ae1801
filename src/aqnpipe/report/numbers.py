"""How numbers are shown: percent, points, p-values, scales, counts. A missing number is an en dash."""

import math
from collections.abc import Callable, Mapping, Sequence

MISSING = "–"
NBSP = "\u00a0"


def percent(fraction: float | None, digits: int = 1) -> str:
    """Format a fraction as percent without the sign: 0.705 -> 70.5."""
    return MISSING if fraction is None else f"{_no_negative_zero(100 * fraction, digits):.{digits}f}"


def points(fraction: float | None, digits: int = 1) -> str:
    """Format a difference of fractions as signed percentage points: 0.0243 -> +2.4."""
    return MISSING if fraction is None else signed(100 * fraction, digits)


def signed(value: float, digits: int) -> str:
    """Format a difference with its sign, a true minus: -0.0123 -> −0.012."""
    return _true_minus(f"{_no_negative_zero(value, digits):+.{digits}f}")


def p_value(value: float | None) -> str:
    """Format a p-value: three decimals, two above 0.1; two digits below 0.001, and a bound below 1e-15."""
    if value is None:
        return MISSING
    if value < 0.001:
        return f"<{NBSP}1e−15" if value < 1e-15 else _true_minus(f"{value:.1e}").replace("−0", "−")
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def scale(value: float | None) -> str:
    """Format a noise scale or sigma with four significant digits."""
    return MISSING if value is None else f"{value:.4g}"


def metric(value: float | None) -> str:
    """Format a measured quantity of unknown size with four significant digits."""
    return MISSING if value is None or math.isnan(value) else _true_minus(f"{value:.4g}")


def count(value: int | None) -> str:
    """Format a count with thousands separators."""
    return MISSING if value is None else f"{value:,}"


def times(value: float) -> str:
    """Format a multiple with two significant digits, or all of a whole number; ∞ without anything to compare with.

    >>> times(23.84), times(1234.5), times(0.0312)
    ('24', '1,234', '0.031')
    """
    if value == math.inf:
        return "∞"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def level(fraction: float) -> str:
    """Format a noise level, a confidence or a power as percent with its sign: 0.05 -> 5 %."""
    return f"{100 * fraction:.3g}{NBSP}%"


def _p_with_relation(value: float) -> str:
    text = p_value(value)
    return f"p{NBSP}{text}" if text.startswith("<") else f"p{NBSP}={NBSP}{text}"


FORMATS: Mapping[str, Callable[[float], str]] = {
    "percent": lambda fraction: _true_minus(f"{percent(fraction)}{NBSP}%"),
    "level": level,
    "points": percent,
    "points_2": lambda value: percent(value, 2),
    "signed_points": points,
    "signed_nats": lambda value: signed(value, 4),
    "signed_2": lambda value: signed(value, 2),
    "p": _p_with_relation,
    "p_value": p_value,
    "scale": scale,
    "metric": metric,
    "times": times,
}
"""Forms of placeholders in the catalogue of words, and of columns; fractions become percent and points.

Besides, `count` with thousands separators, `count question|questions` with the noun, `spaced` of a name with
underscores, and Python's own (`.2f`).
"""


def formatted(value: object, form: str) -> str:
    """Return `value` in the form that a placeholder of the catalogue names; text stays as it is, None is a dash.

    >>> formatted(0.0243, "signed_points"), formatted(1, "count seed|seeds"), formatted(1319, "count seed|seeds")
    ('+2.4', '1 seed', '1,319 seeds')
    """
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value.replace("_", " ") if form == "spaced" else format(value, form)
    if isinstance(value, float | int) and form in FORMATS:
        return FORMATS[form](value)
    name, _, nouns = form.partition(" ")
    if isinstance(value, int) and name == "count":
        return f"{count(value)} {_noun(value, nouns)}".rstrip()
    return _true_minus(format(value, form))


def _noun(number: int, nouns: str) -> str:
    singular, _, plural = nouns.partition("|")
    return singular if number == 1 else plural


def _no_negative_zero(value: float, digits: int) -> float:
    return round(value, digits) + 0.0


def _true_minus(text: str) -> str:
    return text.replace("-", "−")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown; cells with a `|` must be escaped, see `in_markdown_cell`."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def in_markdown_cell(value: object) -> str:
    """Return a value as the text of a cell of a table in Markdown."""
    return str(value).replace("|", "\\|")


def number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, runs of three and more as `first-last`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
