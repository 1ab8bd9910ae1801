"""Accuracy of an arm over noise levels: is it the same at all of them, and how fast does it fall?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats
from statsmodels.stats.contingency_tables import cochrans_q

from aqnpipe.statistics.crossed_effects import SeedVariance, estimate_difference, pooled_seed_variance

FloatArray = npt.NDArray[np.float64]

JOINT_METHOD = "Hotelling's T2, questions as clusters"
SLOPE_UNIT = 0.1
"""Slopes are per this much relative noise scale."""


def slope_seed_variance(levels: Sequence[float], arms: Sequence[Sequence[FloatArray]]) -> SeedVariance | None:
    """Return the seed_variance of training in a slope, pooled over arms of outcomes[level][seed, noise seed, question]."""
    if not arms:
        return None
    slopes = [slope_per_question(levels, _means(one)).mean(axis=1) for one in arms]
    return pooled_seed_variance(slopes, [len(slopes[0])])


def robustness_row(
    levels: Sequence[float], outcomes: Sequence[FloatArray], seed_variance: SeedVariance | None, alpha: float
) -> dict[str, Any]:
    """Return the numbers of `artifacts.RobustnessTable` from outcomes[level][seed, noise seed, question].

    Needs at least two levels. The joint test takes the trained weights and the noise seeds as given; the slope covers
    the seed_variance of training where there are several seeds (`seed_variance`: from all arms).
    """
    means = _means(outcomes)
    slopes = slope_per_question(levels, means)
    estimate = estimate_difference(slopes, np.zeros_like(slopes), seed_variance)
    low, high = estimate.interval(1 - alpha) if estimate.spread is not None else (None, None)
    # Shares of several samples are neither yes nor no.
    binary = all(one.shape[:2] == (1, 1) and np.isin(one, (0.0, 1.0)).all() for one in outcomes)
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
        **joint_test(means.mean(axis=1)),
        "cochran_q_p": cochran_q_p(np.stack([one[0, 0] for one in outcomes])) if binary else None,
    }


def _means(outcomes: Sequence[FloatArray]) -> FloatArray:
    """Average over noise seeds: [level, seed, question]."""
    return np.stack([one.mean(axis=1) for one in outcomes])


def slope_per_question(levels: Sequence[float], means: FloatArray) -> FloatArray:
    """Least-squares slope per 0.1 of noise scale for every [seed, question] of means[level, seed, question]."""
    centred = np.asarray(levels, dtype=np.float64) - np.mean(levels)
    weights = centred / np.sum(centred**2) * SLOPE_UNIT
    return np.tensordot(weights, means, axes=(0, 0))


def joint_test(means: FloatArray) -> Mapping[str, float | None]:
    """Test that accuracy is the same at all levels, from means[level, question]; null where nothing varies.

    Hotelling's T2 on the differences from the first level: the Wald test of a GEE with questions as clusters and an
    exchangeable or independent working correlation, referred to F instead of chi-squared. Differences that are constant
    or repeat each other carry no information and are left out (rank of the covariance).
    """
    differences = (means[1:] - means[0]).T
    num_questions = len(differences)
    mean, covariance = differences.mean(axis=0), np.atleast_2d(np.cov(differences, rowvar=False))
    rank = int(np.linalg.matrix_rank(covariance, hermitian=True))
    nothing: dict[str, float | None] = {"joint_f": None, "joint_df1": None, "joint_df2": None, "joint_p": None}
    if rank == 0 or num_questions <= rank:
        return nothing
    squared = num_questions * float(mean @ np.linalg.pinv(covariance, hermitian=True) @ mean)
    freedom = num_questions - rank
    value = squared * freedom / (rank * (num_questions - 1))
    return {
        "joint_f": value,
        "joint_df1": float(rank),
        "joint_df2": float(freedom),
        "joint_p": float(stats.f.sf(value, rank, freedom)),
    }


def cochran_q_p(outcomes: FloatArray) -> float:
    """Cochran's Q for yes or no outcomes[level, question] of one pass per level; 1 where no question changes."""
    if np.all(outcomes == outcomes[0]):
        return 1.0
    return float(cochrans_q(outcomes.T).pvalue)
