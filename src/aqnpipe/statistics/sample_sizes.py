"""What other numbers of seeds and questions would find: variance components, the expected test, and sizes.

The test of two arms estimates the variance between seeds by a rule (`statistics.seed_blocks`): with few seeds it keeps
the pair's own variance, or the larger one, more often than a t distribution says. The effects of that rule on the power
of the test and on the median of its estimate are integrated numerically, for arms that scatter alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from aqnpipe.statistics.crossed_effects import interaction_variance
from aqnpipe.statistics.seed_blocks import SeedVariance, combined_variance, guard_ratio, prior_freedom
from aqnpipe.statistics.spread import Spread, VariancePart, spread_of

FloatArray = npt.NDArray[np.float64]

MAX_SEEDS_SEARCHED = 1000
MAX_QUESTIONS_SEARCHED = 10_000_000

_NODES = (201, 51)
"""Equally probable values of a pair's own variance and of the pool."""

_FLOOR_STEPS = 20


@dataclass(frozen=True)
class VarianceParts:
    """Components of the variance of a single d[seed, question]; `residual` includes the interaction of both.

    `seed`: between seeds, beyond the residual. `shared`: what seeds do to all arms alike, where it does not cancel.
    `num_arms`: arms that estimate the seeds' part together; below 3 it is estimated by the compared runs alone.
    """

    seed: float
    question: float
    residual: float
    shared: float = 0.0
    num_arms: int = 1


def variance_parts(differences: FloatArray, seed_variance: SeedVariance | None = None) -> VarianceParts:
    """Return the variance components of d[seed, question], that of the seeds without the median error of its estimate.

    From mean squares of a two-way layout, one value per cell. With one seed, all variance is attributed to the
    questions. `seed_variance` is that of `two_way_spread`.
    """
    num_seeds, num_questions = differences.shape
    if num_seeds == 1:
        return VarianceParts(seed=0.0, question=float(differences.var(ddof=1)), residual=0.0)
    residual = interaction_variance(differences)
    freedom = num_seeds - 1.0
    seeds = seed_variance or SeedVariance(VariancePart(float(differences.mean(axis=1).var(ddof=1)), freedom))
    own = seeds.own.variance / _pair_rule(freedom, _pool_freedom(seeds.num_arms, num_seeds), 0.0).median
    return VarianceParts(
        seed=max(own - residual / num_questions, 0.0),
        question=max(float(differences.mean(axis=0).var(ddof=1)) - residual / num_seeds, 0.0),
        residual=residual,
        shared=0.0 if seeds.shared is None else seeds.shared.variance / float(stats.chi2.median(freedom) / freedom),
        num_arms=seeds.num_arms,
    )


def expected_spread(
    parts: VarianceParts, num_seeds: int, num_questions: int, tail: float, power: float
) -> Spread | None:
    """Return the spread whose noncentral t distribution has the power of the test with other numbers.

    None if nothing varies. With one seed, it is that over questions only.
    """
    if num_seeds == 1:
        return spread_of(VariancePart((parts.question + parts.residual) / num_questions, num_questions - 1.0))
    freedom, pool = num_seeds - 1.0, _pool_freedom(parts.num_arms, num_seeds)
    by_answers = parts.residual / num_questions
    variance = parts.seed + by_answers
    floor = by_answers / variance if variance > 0 and pool == 0 and parts.shared == 0 else 0.0
    rule = _pair_rule(freedom, pool, round(floor * _FLOOR_STEPS) / _FLOOR_STEPS)
    return spread_of(
        VariancePart(parts.shared / num_seeds, freedom),
        VariancePart(variance * rule.inflation(tail, power) / num_seeds, rule.freedom),
        VariancePart(parts.question / num_questions, num_questions - 1.0),
    )


def _pool_freedom(num_arms: int, num_seeds: int) -> float:
    return max(num_arms - 2, 0) * (num_seeds - 1.0)


@dataclass(frozen=True)
class _PairRule:
    """Variances and degrees of freedom that the rule gives to pairs whose true variance is 1, all equally probable.

    `freedom`: of a pair that does not scatter more than the others.
    """

    variances: FloatArray
    test_freedom: FloatArray
    freedom: float

    @property
    def median(self) -> float:
        """The median estimated variance divided by the true one."""
        return float(np.median(self.variances))

    @lru_cache(maxsize=256)  # noqa: B019 - rules are cached too, and few
    def inflation(self, tail: float, power: float) -> float:
        """Return the factor of the true variance at which a noncentral t distribution has the power of the rule."""
        values, inverse = np.unique(self.test_freedom, return_inverse=True)
        half_widths = stats.t.isf(tail, values)[inverse] * np.sqrt(self.variances)

        def shortfall(distance: float) -> float:
            return power - float(special.ndtr(distance - half_widths).mean())

        distance = float(optimize.brentq(shortfall, 0.0, 10 * float(half_widths.max()) + 10))
        return (distance / Spread((VariancePart(1.0, self.freedom),)).minimum_detectable(tail, power)) ** 2

    __hash__ = object.__hash__


@lru_cache(maxsize=1024)
def _pair_rule(own_freedom: float, pool_freedom: float, floor: float) -> _PairRule:
    """Return the rule of `SeedBlocks.of_pair`; without a pool, the own variance is at least the share `floor`."""
    own, pool = (
        stats.chi2.ppf((np.arange(number) + 0.5) / number, freedom) / freedom
        for number, freedom in zip(_NODES, (own_freedom, pool_freedom or 1.0), strict=True)
    )
    if pool_freedom == 0:
        return _PairRule(np.maximum(own, floor), np.full_like(own, own_freedom), own_freedom)
    own, pool = (values.ravel() for values in np.meshgrid(own, pool))
    freedom = own_freedom + prior_freedom(own_freedom, pool_freedom)
    is_guarded = own > guard_ratio(own_freedom, pool_freedom) * pool
    combined = combined_variance(own, own_freedom, pool, pool_freedom)
    return _PairRule(np.where(is_guarded, own, combined), np.where(is_guarded, own_freedom, freedom), freedom)


def seeds_needed(parts: VarianceParts, num_questions: int, distance: float, tail: float, power: float) -> int | None:
    """Return the number of seeds with which a one-sided test at level `tail` detects a true `distance` with `power`.

    Returns None if the distance is not above 0, or if MAX_SEEDS_SEARCHED seeds are too few (the questions are the
    limit).
    """
    return _smallest(
        lambda number: expected_spread(parts, number, num_questions, tail, power),
        (2, MAX_SEEDS_SEARCHED),
        distance,
        tail,
        power,
    )


def questions_needed(parts: VarianceParts, num_seeds: int, distance: float, tail: float, power: float) -> int | None:
    """Return the number of questions with which a test detects `distance`; None as in `seeds_needed`."""
    return _smallest(
        lambda number: expected_spread(parts, num_seeds, number, tail, power),
        (10, MAX_QUESTIONS_SEARCHED),
        distance,
        tail,
        power,
    )


def _smallest(
    spread_with: Callable[[int], Spread | None], ends: tuple[int, int], distance: float, tail: float, power: float
) -> int | None:
    """Return the smallest number whose spread makes `distance` detectable, by bisection."""

    def enough(number: int) -> bool:
        spread = spread_with(number)
        return spread is None or spread.detects(distance, tail, power)

    lowest, highest = ends
    if distance <= 0 or not enough(highest):
        return None
    low, high = lowest - 1, highest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
