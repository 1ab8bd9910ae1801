"""The test of a claim, and several tests at once: Holm's correction within families, and the level of each test."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from statsmodels.stats.multitest import multipletests

TestAndMargin = tuple[str, float | None]
"""superiority, non_inferiority or equivalence; and the margin of the latter two."""


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
        of_members = multipletests([p_values[index] for index in members], method="holm")[1]
        adjusted |= dict(zip(members, map(float, of_members), strict=True))
    return [adjusted[index] for index in range(len(p_values))]


def adjusted_within_families(
    families: Sequence[Hashable], p_values: Sequence[float], alpha: float
) -> list[tuple[float, float]]:
    """Return each p-value adjusted by Holm's method, with the level that decides alike on the p-value before.

    Holm's method stops with some tests not rejected; alpha divided by their number (at least 1) is the level of its
    last step. A test of the family is rejected if and only if its own p-value is below that level, so an interval at
    this level says what the verdict says.
    """
    found = holm_within_families(families, p_values)
    left = Counter(family for family, p in zip(families, found, strict=True) if p >= alpha)
    return [(p, alpha / max(left[family], 1)) for family, p in zip(families, found, strict=True)]


def claim_p(
    claim: TestAndMargin,
    two_sided: Callable[[], float],
    above: Callable[[float], float],
    below: Callable[[float], float],
) -> float:
    """Return the p-value of the test that a claim declares, from its tests against 0 and, one-sided, against a bound.

    A small p is evidence for the claim or its opposite. superiority: two-sided against 0. non_inferiority: one-sided
    against -margin. equivalence: two one-sided tests (Schuirmann 1987), the larger p.
    """
    test, margin = claim
    if margin is None:
        return two_sided()
    return above(-margin) if test == "non_inferiority" else max(above(-margin), below(margin))


def distance_inside(claim: TestAndMargin, difference: float) -> float:
    """Return how far a difference is inside the margin of a claim, below 0 beyond it; from 0 without a margin."""
    test, margin = claim
    if margin is None:
        return abs(difference)
    return difference + margin if test == "non_inferiority" else margin - abs(difference)


def interval_level(alpha: float, *, one_sided: bool) -> float:
    """Return the confidence of the two-sided interval that decides like a test at `alpha`.

    A one-sided test against a margin goes with the interval at 1 - 2*alpha (Schuirmann 1987).
    """
    return 1 - 2 * alpha if one_sided else 1 - alpha
