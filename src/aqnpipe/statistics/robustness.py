"""Accuracy of an arm as a function of the noise level: the slope of a least-squares line."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.seed_blocks import SeedVariance

SLOPE_UNIT = 0.1
"""Slopes are per this difference in relative noise scale."""


def mean_slopes(levels: Sequence[float], outcomes: Sequence[FloatArray]) -> FloatArray:
    """Return the slope of every seed from outcomes[level][seed, noise seed, question]."""
    slopes: FloatArray = slope_per_question(levels, _means(outcomes)).mean(axis=1)
    return slopes


def robustness_row(
    levels: Sequence[float],
    outcomes: Sequence[FloatArray],
    seed_variance: SeedVariance | None,
    alpha: float,
    clusters: Clusters | None = None,
) -> dict[str, Any]:
    """Return the columns of `artifacts.RobustnessTable` computed from outcomes[level][seed, noise seed, question].

    There must be at least two levels. With several seeds, the error of the slope includes the seed variance
    (`seed_variance`: see `SeedBlocks.of_arm`).
    """
    means = _means(outcomes)
    slopes = slope_per_question(levels, means)
    estimate = estimate_difference(slopes, np.zeros_like(slopes), seed_variance, clusters)
    low, high = estimate.interval(1 - alpha) if estimate.spread is not None else (None, None)
    return {
        "num_seeds": means.shape[1],
        "num_questions": means.shape[2],
        "num_levels": len(levels),
        "highest_level": float(levels[-1]),
        "accuracy_lowest_level": float(means[0].mean()),
        "accuracy_highest_level": float(means[-1].mean()),
        "slope": estimate.difference,
        "slope_ci_low": low,
        "slope_ci_high": high,
        "slope_p": estimate.two_sided_p() if estimate.spread is not None else None,
    }


def _means(outcomes: Sequence[FloatArray]) -> FloatArray:
    """Return the means over noise seeds: [level, seed, question]."""
    return np.stack([scores.mean(axis=1) for scores in outcomes])


def slope_per_question(levels: Sequence[float], means: FloatArray) -> FloatArray:
    """Return the least-squares slopes [seed, question], per 0.1 of noise scale, of means[level, seed, question]."""
    centred = np.asarray(levels, dtype=np.float64) - np.mean(levels)
    weights = centred / np.sum(centred**2) * SLOPE_UNIT
    return np.tensordot(weights, means, axes=(0, 0))
