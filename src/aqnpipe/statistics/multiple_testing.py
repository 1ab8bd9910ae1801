"""Several tests at once: Holm's correction within families, and the interval that decides like the test."""

from collections.abc import Sequence

from statsmodels.stats.multitest import multipletests


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]


def holm_within_families(families: Sequence[str], p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order; `families[i]` is the family of `p_values[i]`.

    >>> holm_within_families(["a", "b", "a"], [0.01, 0.03, 0.04])
    [0.02, 0.03, 0.04]
    """
    adjusted: dict[int, float] = {}
    for family in dict.fromkeys(families):
        members = [index for index, name in enumerate(families) if name == family]
        adjusted |= dict(zip(members, holm([p_values[index] for index in members]), strict=True))
    return [adjusted[index] for index in range(len(p_values))]


def interval_level(alpha: float, *, one_sided: bool) -> float:
    """Return the confidence of the two-sided interval that decides like a test at `alpha`.

    A one-sided test against a margin goes with the interval at 1 - 2*alpha (Schuirmann 1987).
    """
    return 1 - 2 * alpha if one_sided else 1 - alpha
