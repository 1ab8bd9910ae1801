"""Prognosis for other numbers of seeds and questions: variance components, the expected test, and sizes.

The test of two arms estimates the variance between seeds by a rule (`statistics.seed_blocks`): with few seeds it keeps
the pair's own variance, or the larger one, more often than a t distribution says. The effects of that rule on the power
of the test and on the median of its estimate are integrated numerically, for arms that scatter alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.crossed_effects import interaction_variance
from aqnpipe.statistics.seed_blocks import SeedVariance, combined_variance, guard_ratio, prior_freedom
from aqnpipe.statistics.spread import SMALLEST_VARIANCE, Spread, VariancePart, spread_of

MAX_SEEDS_SEARCHED = 1000
MAX_QUESTIONS_SEARCHED = 10_000_000

_NODES = (201, 51)
"""Equally probable values of a pair's own variance and of the pool."""

_FLOOR_STEPS = 20

_TRIED_BY_SECANT = 6

_SMALLEST_LEVEL = 1e-300
"""A level whose normal score is finite."""


@dataclass(frozen=True)
class VarianceParts:
    """Components of the variance of a single d[seed, question]; `residual` includes the interaction of both.

    `seed`: between seeds, beyond the residual. `shared`: what seeds do to all arms alike, where it does not cancel.
    `num_arms`: arms that estimate the seeds' part together; below 3 it is estimated by the compared runs alone.
    `evenness`: effective number of units per question or cluster, below 1 for clusters of unlike size.
    """

    seed: float
    question: float
    residual: float
    shared: float = 0.0
    num_arms: int = 1
    evenness: float = 1.0


def variance_parts(
    differences: FloatArray, seed_variance: SeedVariance | None = None, evenness: float = 1.0
) -> VarianceParts:
    """Return the variance components of d[seed, question], that of the seeds without the median error of its estimate.

    From mean squares of a two-way layout, one value per cell. With one seed, all variance is attributed to the
    questions. `seed_variance` is that of `two_way_spread`, `evenness` that of the clusters.
    """
    num_seeds, num_questions = differences.shape
    if num_seeds == 1:
        return VarianceParts(seed=0.0, question=float(differences.var(ddof=1)), residual=0.0, evenness=evenness)
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
        evenness=evenness,
    )


def expected_spread(
    parts: VarianceParts, num_seeds: int, num_questions: int, tail: float, power: float
) -> Spread | None:
    """Return the spread whose noncentral t distribution has the power of the test with other numbers.

    None if nothing varies. With one seed, it is that over questions only.
    """
    of_questions = max(parts.evenness * num_questions - 1.0, 1.0)
    if num_seeds == 1:
        return spread_of(VariancePart((parts.question + parts.residual) / num_questions, of_questions))
    freedom, pool = num_seeds - 1.0, _pool_freedom(parts.num_arms, num_seeds)
    by_answers = parts.residual / num_questions
    variance = parts.seed + by_answers
    floor = by_answers / variance if variance > 0 and pool == 0 and parts.shared == 0 else 0.0
    floor = round(floor * _FLOOR_STEPS) / _FLOOR_STEPS
    inflation, rule_freedom = _inflation_and_freedom(freedom, pool, floor, tail, power)
    return spread_of(
        VariancePart(parts.shared / num_seeds, freedom),
        VariancePart(variance * inflation / num_seeds, rule_freedom),
        VariancePart(parts.question / num_questions, of_questions),
    )


def as_estimated(parts: VarianceParts, num_seeds: int, num_questions: int) -> VarianceParts:
    """Return true components with the mean of what a test estimates of the questions: at least 0, so more than it is.

    With q of the questions and a of the answers, the estimate is (q + a) X - a with X chi-squared over its degrees of
    freedom f, and E[(X - c)+] = P(chi2(f + 2) > c f) - c P(chi2(f) > c f).
    """
    of_answers = parts.residual / num_seeds
    whole = parts.question + of_answers
    if whole == 0:
        return parts
    share, freedom = of_answers / whole, max(parts.evenness * num_questions - 1.0, 1.0)
    tails = stats.chi2.sf(share * freedom, [freedom + 2, freedom])
    return replace(parts, question=whole * float(tails[0] - share * tails[1]))


def _pool_freedom(num_arms: int, num_seeds: int) -> float:
    return max(num_arms - 2, 0) * (num_seeds - 1.0)


@dataclass(frozen=True)
class _PairRule:
    """Variances that the rule gives to pairs whose true variance is 1, all equally probable, with degrees of freedom.

    `own_freedom`: of a pair `is_guarded`, which scatters more than the others. `freedom`: of all other pairs.
    """

    variances: FloatArray
    is_guarded: npt.NDArray[np.bool_]
    own_freedom: float
    freedom: float

    @property
    def median(self) -> float:
        """The median estimated variance divided by the true one."""
        return float(np.median(self.variances))

    def inflation(self, tail: float, power: float) -> float:
        """Return the factor of the true variance at which a noncentral t distribution has the power of the rule."""
        guarded, others = (-special.stdtrit(freedom, tail) for freedom in (self.own_freedom, self.freedom))
        half_widths = np.where(self.is_guarded, guarded, others) * np.sqrt(self.variances)

        def shortfall(distance: float) -> float:
            return power - float(special.ndtr(distance - half_widths).mean())

        # Below the first every pair has less than the power, above the second more.
        lowest, highest = (float(end + special.ndtri(power)) for end in (half_widths.min(), half_widths.max()))
        distance = float(optimize.brentq(shortfall, lowest - 0.01, highest + 0.01))
        return (distance / Spread((VariancePart(1.0, self.freedom),)).minimum_detectable(tail, power)) ** 2


@lru_cache(maxsize=1 << 16)
def _inflation_and_freedom(
    own_freedom: float, pool_freedom: float, floor: float, tail: float, power: float
) -> tuple[float, float]:
    """Return what the rule does to a test, for which every search for a number of seeds asks again."""
    rule = _pair_rule(own_freedom, pool_freedom, floor)
    return rule.inflation(tail, power), rule.freedom


@lru_cache(maxsize=64)
def _pair_rule(own_freedom: float, pool_freedom: float, floor: float) -> _PairRule:
    """Return the rule of `SeedBlocks.of_pair`; without a pool, the own variance is at least the share `floor`."""
    own, pool = (
        2 * special.gammaincinv(freedom / 2, (np.arange(number) + 0.5) / number) / freedom
        for number, freedom in zip(_NODES, (own_freedom, pool_freedom or 1.0), strict=True)
    )
    if pool_freedom == 0:
        return _PairRule(np.maximum(own, floor), np.zeros_like(own, dtype=bool), own_freedom, own_freedom)
    own, pool = (values.ravel() for values in np.meshgrid(own, pool))
    freedom = own_freedom + prior_freedom(own_freedom, pool_freedom)
    is_guarded = own > guard_ratio(own_freedom, pool_freedom) * pool
    combined = combined_variance(own, own_freedom, pool, pool_freedom)
    return _PairRule(np.where(is_guarded, own, combined), is_guarded, own_freedom, freedom)


def seeds_needed(parts: VarianceParts, num_questions: int, distance: float, tail: float, power: float) -> int | None:
    """Return the number of seeds with which a one-sided test at level `tail` detects a true `distance` with `power`.

    Returns None if the distance is not above 0, or if MAX_SEEDS_SEARCHED seeds are too few (the questions are the
    limit).
    """
    of_a_seed = parts.shared + parts.seed + parts.residual / num_questions
    return _smallest(
        lambda number: expected_spread(parts, number, num_questions, tail, power),
        (2, MAX_SEEDS_SEARCHED),
        (parts.question / num_questions, of_a_seed),
        (distance, tail, power),
    )


def questions_needed(parts: VarianceParts, num_seeds: int, distance: float, tail: float, power: float) -> int | None:
    """Return the number of questions with which a test detects `distance`; None as in `seeds_needed`."""
    of_a_question = parts.question + parts.residual / num_seeds
    return _smallest(
        lambda number: expected_spread(parts, num_seeds, number, tail, power),
        (10, MAX_QUESTIONS_SEARCHED),
        ((parts.shared + parts.seed) / num_seeds, of_a_question),
        (distance, tail, power),
    )


def _smallest(
    spread_with: Callable[[int], Spread | None],
    ends: tuple[int, int],
    variance: tuple[float, float],
    test: tuple[float, float, float],
) -> int | None:
    """Return the smallest number of units whose spread makes a distance detectable, by the secant method.

    variance: the part that more units leave, and that of one unit. test: distance, tail, power. The normal score of the
    test grows nearly in proportion to the inverse standard error: the first two numbers are those of a normal test, the
    others those of the line through the last two. Most searches try four.
    """
    distance, tail, power = test
    if distance <= 0:
        return None
    needed, margin = -float(special.ndtri(tail)), float(special.ndtri(power))
    low, high = ends[0] - 1, ends[1] + 1
    wanted, last = needed + margin, (0.0, -margin)
    tried = 0
    while high - low > 1:
        left = (distance / wanted) ** 2 - variance[0] if wanted > 0 else math.inf
        # In case that the line misleads, steps get larger, up to half of what is left.
        away = min(max(2 ** (tried - _TRIED_BY_SECANT), 1), (high - low) // 2)
        number = math.ceil(min(max(variance[1] / left if left > 0 else math.inf, low + away), high - away))
        spread = spread_with(number)
        level = 0.0 if spread is None else spread.detecting_level(distance, power)
        low, high = (low, number) if level <= tail else (number, high)
        place = distance / math.sqrt(max(variance[0] + variance[1] / number, SMALLEST_VARIANCE))
        score = -float(special.ndtri(min(max(level, _SMALLEST_LEVEL), 0.5)))
        slope = (score - last[1]) / (place - last[0]) if place != last[0] else 0.0
        wanted = place + (needed - score) / slope if slope > 0 else math.inf
        last, tried = (place, score), tried + 1
    return None if high > ends[1] else high
