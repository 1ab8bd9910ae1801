"""Several tests at once: Holm's correction within families, and the level at which each test is then made."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Adjusted:
    """A p-value adjusted by Holm's method, and the level that decides alike on the p-value before.

    Holm's method stops with some tests not rejected; alpha divided by their number (at least 1) is the level of its
    last step. A test of the family is rejected if and only if its own p-value is below that level, so an interval at
    this level says what the verdict says.
    """

    p_value: float
    level: float


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order."""
    values = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(np.arange(len(values), 0, -1) * values[order]), 1.0)
    return [float(p) for p in adjusted]


def holm_within_families(families: Sequence[Hashable], p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order; `families[i]` is the family of `p_values[i]`.

    >>> holm_within_families(["a", "b", "a"], [0.01, 0.03, 0.04])
    [0.02, 0.03, 0.04]
    """
    of_family: dict[Hashable, list[int]] = {}
    for index, family in enumerate(families):
        of_family.setdefault(family, []).append(index)
    adjusted: dict[int, float] = {}
    for members in of_family.values():
        adjusted |= dict(zip(members, holm([p_values[index] for index in members]), strict=True))
    return [adjusted[index] for index in range(len(p_values))]


def adjusted_within_families(families: Sequence[Hashable], p_values: Sequence[float], alpha: float) -> list[Adjusted]:
    """Return Holm-adjusted p-values with their levels, in the given order."""
    found = holm_within_families(families, p_values)
    left = Counter(family for family, p in zip(families, found, strict=True) if p >= alpha)
    return [Adjusted(p, alpha / max(left[family], 1)) for family, p in zip(families, found, strict=True)]


def interval_level(alpha: float, *, one_sided: bool) -> float:
    """Return the confidence of the two-sided interval that decides like a test at `alpha`.

    A one-sided test against a margin goes with the interval at 1 - 2*alpha (Schuirmann 1987).
    """
    return 1 - 2 * alpha if one_sided else 1 - alpha
