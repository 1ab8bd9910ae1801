"""Ids of comparisons and the families that share an error rate.

They are apart from the statistics, whose imports every start of the workflow would wait for.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from aqnpipe.config.analysis import Comparison


def comparison_ids(comparisons: Sequence[Comparison]) -> dict[str, Comparison]:
    """Return every comparison by its id; comparisons of equal sides get numbered ids."""
    named: dict[str, Comparison] = {}
    counts: Counter[str] = Counter()
    for comparison in comparisons:
        wanted = _comparison_id(comparison)
        counts[wanted] += 1
        named[wanted if counts[wanted] == 1 else f"{wanted}#{counts[wanted]}"] = comparison
    return named


def error_families(named: Mapping[str, Comparison]) -> dict[str, tuple[str, str]]:
    """Return by id the family whose error rate a claim shares: the primary claim and each control have one alone."""
    return {name: (claim.role, claim.family if claim.role == "secondary" else name) for name, claim in named.items()}


def _comparison_id(comparison: Comparison) -> str:
    if comparison.kind == "levels":
        return f"{comparison.arm}@{comparison.noise_level:g}-vs-0"
    sides = f"{comparison.treatment}-vs-{comparison.control}"
    levels = f"0-to-{comparison.noise_level:g}" if comparison.kind == "degradation" else f"{comparison.noise_level:g}"
    return f"{sides}@{levels}"
