"""How much a difference varies between training seeds, where runs of equal seed share prompts, order and sampling keys.

Such seeds are blocks: what a seed does to all arms alike cancels in a difference of two arms, and only the arm x seed
interaction is error. Two or three seeds estimate it badly, so it is moderated: the variance of the compared pair is
combined with that of the other arms, as if the latter were known with a few prior degrees of freedom (Smyth 2004, Stat.
Appl. Genet. Mol. Biol. 3:3). The prior degrees of freedom are fixed, because a handful of arms cannot estimate them,
and a pair that scatters significantly more than the others uses its own variance alone (the idea of the robust variant
by Phipson et al. 2016, Ann. Appl. Stat. 10:946). Both constants were chosen by simulation: docs/decisions/0008.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
from scipy import stats

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.spread import VariancePart

PRIOR_FREEDOM = 4.0
"""Degrees of freedom with which the other arms' variance predicts that of a pair, if it were known exactly."""

PRIOR_FREEDOM_OF_TWO = 1.75
"""The same with two seeds, which cannot tell whether a pair scatters more than the other arms."""

GUARD_LEVEL = 0.25
"""Level of the F-test by which a pair that scatters more than the other arms keeps its own variance."""

LARGEST_SEED_SD = 0.15
"""Standard deviation between runs, as a fraction, above which an arm's own seeds are not held to vary.

Without a limit two seeds, which have one degree of freedom, could not show that an arm loses 30 points to noise, even
if both lose 30: a standard deviation of 20 points would remain possible.
"""

_SMALLEST_EIGENVALUE = 1e-9


VarianceSource = Literal["own", "moderated", "larger", "guarded", "arm", "arm_of_two", "arm_alone"]
"""own: by the compared runs alone. moderated: with the other arms'. larger: with two seeds, the larger one of both.

guarded: alone, because it is larger than the others'. arm, arm_of_two: of one arm against a constant, in two parts.
arm_alone: by its own seeds alone.
"""


@dataclass(frozen=True)
class SeedVariance:
    """Variance between seeds of the difference of one seed, in one part or two.

    `shared`: what a seed does to all arms alike, where it does not cancel (one arm against a constant). `own`: the
    interaction of arms and seeds, or the variance of the arm where it has no others. `num_arms`: arms that estimate it,
    1 if it is that of the compared runs alone. `source`: how it was estimated.
    """

    own: VariancePart
    shared: VariancePart | None = None
    num_arms: int = 1
    source: VarianceSource = "own"

    @property
    def parts(self) -> tuple[VariancePart, ...]:
        """The parts that are there."""
        return (self.own,) if self.shared is None else (self.shared, self.own)

    @property
    def variance(self) -> float:
        """Sum of the parts."""
        return sum(part.variance for part in self.parts)


@dataclass(frozen=True)
class SeedBlocks:
    """Mean scores [arm, seed] of runs whose seeds are blocks; NaN where a run is missing, or repeats another run."""

    means: FloatArray

    @cached_property
    def _interaction(self) -> tuple[float, float]:
        """Sum of squares and degrees of freedom of all arms together, which every pair needs."""
        return _interaction(self.means)

    @cached_property
    def _num_arms(self) -> int:
        return int((np.isfinite(self.means).sum(axis=1) > 0).sum())

    def of_pair(self, first: int, second: int) -> SeedVariance | None:
        """Return the variance of row `first` minus row `second`; None if they have fewer than two common seeds."""
        differences = self.means[first] - self.means[second]
        own = _variance(differences)
        if own is None:
            return None
        freedom = float(np.isfinite(differences).sum() - 1)
        squares, total_freedom = self._interaction
        rest_freedom = total_freedom - freedom
        rest = max(squares - own * freedom / 2, 0.0)
        pool = VariancePart(2 * rest / rest_freedom, rest_freedom) if rest_freedom >= 1 else None
        part = VariancePart(own, freedom)
        if pool is None:
            return SeedVariance(part, num_arms=self._num_arms)
        combined: VarianceSource = "moderated" if freedom > 1 else "larger"
        source = "guarded" if _scatters_more(part, pool) else combined
        return SeedVariance(moderated(part, pool), num_arms=self._num_arms, source=source)

    def of_arm(self, row: int) -> SeedVariance | None:
        """Return the variance of one row against a constant; None if it has fewer than two seeds.

        The arm's score is the mean over all arms of its seeds, which contains what seeds share and has only the degrees
        of freedom of the seeds, plus its distance from that mean, whose variance is moderated. Their covariance, which
        is 0 where all arms scatter alike, is added where it is positive.
        """
        values = self.means[row]
        variance, seeds = _variance(values), np.isfinite(values)
        if variance is None:
            return None
        freedom = float(seeds.sum() - 1)
        alone = SeedVariance(_limited(VariancePart(variance, freedom)), source="arm_alone")
        table = self.means[:, seeds]
        complete = table[np.isfinite(table).all(axis=1)]
        number = len(complete)
        if number < 2:
            return alone
        block_means = complete.mean(axis=0)
        share = 1 - 1 / number
        own = float((values[seeds] - block_means).var(ddof=1)) / share
        squares = float(np.sum((complete - block_means - complete.mean(axis=1, keepdims=True) + complete.mean()) ** 2))
        rest_freedom = (number - 2) * freedom
        pool = VariancePart(max(squares - own * freedom, 0.0) / rest_freedom, rest_freedom) if rest_freedom else None
        if pool is not None and _scatters_more(VariancePart(own, freedom), pool):
            return alone
        shared = float(block_means.var(ddof=1))
        covariance = max(variance - shared - own * share, 0.0)
        return SeedVariance(
            own=moderated(VariancePart(own, freedom), pool).times(share),
            shared=_limited(VariancePart(shared + covariance, freedom)),
            num_arms=number,
            source="arm" if freedom > 1 else "arm_of_two",
        )


def distinct_runs(means: FloatArray, identities: Sequence[Sequence[str | None]]) -> FloatArray:
    """Return means[arm, seed] with NaN for runs whose identity, such as a digest of weights, occurred before.

    Runs with the same weights are one run: counted as several they would understate the variance between runs.
    """
    known = [identity for row in identities for identity in row if identity is not None]
    if len(set(known)) == len(known):
        return means
    seen: set[str] = set()
    kept = means.copy()
    for arm, row in enumerate(identities):
        for seed, identity in enumerate(row):
            if identity is not None and identity in seen:
                kept[arm, seed] = np.nan
            elif identity is not None:
                seen.add(identity)
    return kept


def moderated(own: VariancePart, pool: VariancePart | None) -> VariancePart:
    """Return the own variance combined with that of a pool; the own one where there is no pool or it scatters more.

    With two seeds it is the larger of the two.
    """
    if pool is None or _scatters_more(own, pool):
        return own
    freedom = own.degrees_of_freedom
    return VariancePart(
        float(combined_variance(own.variance, freedom, pool.variance, pool.degrees_of_freedom)),
        freedom + prior_freedom(freedom, pool.degrees_of_freedom),
    )


def combined_variance(
    own: FloatArray | float, own_freedom: float, pool: FloatArray | float, pool_freedom: float
) -> FloatArray:
    """Return the variance of a pair that does not scatter more than the others; elementwise."""
    if own_freedom <= 1:
        return np.maximum(own, pool)
    prior = prior_freedom(own_freedom, pool_freedom)
    return np.asarray((own_freedom * own + prior * pool) / (own_freedom + prior))


def prior_freedom(own_freedom: float, pool_freedom: float) -> float:
    """Return the weight of a pool in degrees of freedom: it is less sure the fewer degrees of freedom it has itself."""
    return 1 / (1 / (PRIOR_FREEDOM_OF_TWO if own_freedom <= 1 else PRIOR_FREEDOM) + 1 / pool_freedom)


def _limited(part: VariancePart) -> VariancePart:
    return replace(part, limit=LARGEST_SEED_SD**2)


def _scatters_more(own: VariancePart, pool: VariancePart) -> bool:
    return own.variance > guard_ratio(own.degrees_of_freedom, pool.degrees_of_freedom) * pool.variance


@cache
def guard_ratio(own_freedom: float, pool_freedom: float) -> float:
    """Return the ratio of a pair's variance to the pool's above which the pair keeps its own; two seeds cannot tell."""
    return math.inf if own_freedom <= 1 else float(stats.f.isf(GUARD_LEVEL, own_freedom, pool_freedom))


def _variance(values: FloatArray) -> float | None:
    found = values[np.isfinite(values)]
    return float(found.var(ddof=1)) if len(found) > 1 else None


def _interaction(means: FloatArray) -> tuple[float, float]:
    """Return the sum of squares and the degrees of freedom left by additive effects of arms and seeds.

    The effects of the longer side are eliminated: those of the shorter side solve the reduced normal equations of a
    design with two crossed factors (Searle 1971, Linear Models, chapter 7). 10,000 cells take milliseconds.
    """
    table = means if means.shape[0] >= means.shape[1] else means.T
    present = np.isfinite(table)
    table, present = table[present.any(axis=1)], present[present.any(axis=1)]
    weights = present.astype(np.float64)
    per_row = weights.sum(axis=1, keepdims=True)
    values = np.where(present, table, 0.0)
    centred = np.where(present, values - values.sum(axis=1, keepdims=True) / per_row, 0.0)
    reduced = np.diag(weights.sum(axis=0)) - weights.T @ (weights / per_row)
    eigenvalues, vectors = np.linalg.eigh(reduced)
    kept = eigenvalues > _SMALLEST_EIGENVALUE * eigenvalues.max()  # One per group of linked seeds is 0 up to rounding.
    rank = int(kept.sum())
    effects = vectors[:, kept] @ (vectors[:, kept].T @ centred.sum(axis=0) / eigenvalues[kept])
    left = centred - np.where(present, effects - (weights @ effects)[:, None] / per_row, 0.0)
    return float(np.sum(left**2)), float(present.sum() - len(table) - rank)
