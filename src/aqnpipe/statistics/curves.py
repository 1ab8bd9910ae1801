"""Curves: two groups of training runs step by step, and the accuracy of an arm as a function of the noise level.

The former have a band from the scatter between seeds, and a mean over steps; the latter the slope of a least-squares
line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.seed_blocks import SeedVariance

SLOPE_UNIT = 0.1
"""Slopes are per this difference in relative noise scale."""

_LEAST_VARIANCE = 0.01
"""Least variance between seeds at a step, as a share of the median over steps: two seeds may agree by chance."""


@dataclass(frozen=True)
class CurveDifference:
    """Second minus first, in the units of the curves. `at_step` and `band` [steps]; `mean` is over all steps.

    `band`: half width beyond which the difference at any step lies with probability alpha / 2 at most, if both groups
    are runs of one machine. `p_value` is adjusted for both questions, the steps and the mean, by Bonferroni's method.
    """

    at_step: FloatArray
    band: FloatArray
    mean: float
    ci_low: float
    ci_high: float
    p_value: float

    @property
    def first_beyond(self) -> int | None:
        """Index of the first step beyond the band; None if there is none."""
        beyond = np.flatnonzero(np.abs(self.at_step) > self.band)
        return int(beyond[0]) if len(beyond) else None


def compare_curves(first: FloatArray, second: FloatArray, alpha: float, *, paired: bool) -> CurveDifference | None:
    """Compare curves [runs, steps] of two groups; None where no group has two runs, so that nothing scatters.

    paired: run n of both groups has the same seed, whose effect cancels. Otherwise both groups share one variance at
    each step. Student's t-tests, Bonferroni over the steps: valid however much steps depend on one another.
    """
    if paired:
        groups, scale, freedom = [second - first], 1 / len(first), len(first) - 1
    else:
        groups, scale, freedom = [first, second], 1 / len(first) + 1 / len(second), len(first) + len(second) - 2
    if freedom < 1:
        return None
    at_step = second.mean(0) - first.mean(0)
    variance = sum(((group - group.mean(0)) ** 2).sum(0) for group in groups) / freedom
    variance = np.maximum(variance, _LEAST_VARIANCE * np.median(variance))
    means = [group.mean(1) for group in groups]
    of_means = sum(((values - values.mean()) ** 2).sum() for values in means) / freedom
    of_means = max(of_means, float(variance.mean()) / first.shape[1] * _LEAST_VARIANCE)
    errors, error = np.sqrt(variance * scale), float(np.sqrt(of_means * scale))
    tail, mean = alpha / 4, float(at_step.mean())
    half = float(stats.t.ppf(1 - tail, freedom)) * error
    return CurveDifference(
        at_step=at_step,
        band=float(stats.t.ppf(1 - tail / len(at_step), freedom)) * errors,
        mean=mean,
        ci_low=mean - half,
        ci_high=mean + half,
        p_value=min(1.0, 2 * _p(mean, error, freedom), 2 * len(at_step) * _p(at_step, errors, freedom)),
    )


def _p(differences: FloatArray | float, errors: FloatArray | float, freedom: int) -> float:
    """Return the smallest two-sided p-value; differences without scatter are equal, or differ for certain."""
    sizes, scale = np.abs(differences), np.asarray(errors)
    ratios = np.divide(sizes, scale, out=np.where(sizes > 0, np.inf, 0.0), where=scale > 0)
    return float(2 * stats.t.sf(ratios.max(), freedom))


def slope_per_question(levels: Sequence[float], means: FloatArray) -> FloatArray:
    """Return the least-squares slopes [seed, question], per 0.1 of noise scale, of means[level, seed, question]."""
    centred = np.asarray(levels, dtype=np.float64) - np.mean(levels)
    weights = centred / np.sum(centred**2) * SLOPE_UNIT
    return np.tensordot(weights, means, axes=(0, 0))


def robustness_row(
    levels: Sequence[float],
    means: FloatArray,
    seed_variance: SeedVariance | None,
    alpha: float,
    clusters: Clusters | None = None,
) -> dict[str, Any]:
    """Return the columns of `artifacts.RobustnessTable` computed from means[level, seed, question].

    There must be at least two levels. With several seeds, the error of the slope includes the seed variance
    (`seed_variance`: see `SeedBlocks.of_arm`).
    """
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
