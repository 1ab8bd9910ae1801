"""Error of an estimate whose variance is a sum of separately estimated variances with different degrees of freedom.

The mean difference between two arms has such an error: one variance comes from a few training seeds (few degrees of
freedom), another from many questions. No single t distribution fits.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np
from scipy import optimize, special, stats

from aqnpipe.statistics.arrays import FloatArray

_SMALLEST_TAIL = 1e-12
_MANY_FREEDOM = 30.0
_KNOWN_FREEDOM = 1e4
"""Above this, a variance counts as known."""

_NEAR_LIMIT = 4.0

_EXACT = 1e-10
"""Size of the last step towards a quantile, relative to one more than it; the error after it is about its square."""

_MOST_STEPS = 100

_FAR = 30.0
"""Standard errors beyond which every test of interest has its power; no noncentral t distribution is computed there."""

SMALLEST_VARIANCE = 1e-20
"""Variances of means below this are rounding errors: one changed answer in 100,000 questions gives about 1e-15."""


@dataclass(frozen=True)
class VariancePart:
    """A part of the variance of an estimate.

    `degrees_of_freedom` are those of the test. `limit`: the largest variance that is held possible.
    """

    variance: float
    degrees_of_freedom: float
    limit: float = math.inf

    def times(self, factor: float) -> "VariancePart":
        """Return the part with its variance multiplied."""
        return replace(self, variance=self.variance * factor, limit=self.limit * factor)

    @property
    def largest_ratio(self) -> float:
        """The largest true variance divided by the estimated one; an estimate near the limit sets it aside."""
        ratio = self.limit / self.variance
        return ratio if ratio > _NEAR_LIMIT else math.inf


@dataclass(frozen=True)
class Spread:
    """The parts of the variance of an estimate; at least one variance is above 0.

    The error is treated as a sum of independent t-distributed errors, each scaled by the root of its variance: the
    distribution of Behrens and Fisher. With one part it is the t distribution. With several, a test at any level
    rejects at most at that level, whatever the true variances are, which no single t distribution and no weighted mean
    of two quantiles achieves (Robinson 1976, Ann. Statist. 4:963; simulated rates: docs/decisions/0008).
    """

    parts: tuple[VariancePart, ...]

    @cached_property
    def variance(self) -> float:
        """Variance of the estimate."""
        return sum(part.variance for part in self.parts)

    @cached_property
    def standard_error(self) -> float:
        """Standard error of the estimate."""
        return math.sqrt(self.variance)

    @cached_property
    def degrees_of_freedom(self) -> float:
        """Degrees of freedom of the variance, all parts together (Satterthwaite 1946, Biometrics Bull. 2:110)."""
        return self.variance**2 / sum(part.variance**2 / part.degrees_of_freedom for part in self.parts)

    @cached_property
    def _scales(self) -> tuple[FloatArray, FloatArray]:
        """Quadrature of the unknown standard errors, relative to the estimated one, with their probabilities."""
        variances, weights = np.zeros(1), np.ones(1)
        for part in self.parts:
            ratios, probabilities = _variance_ratios(part.degrees_of_freedom, part.largest_ratio)
            variances = (variances[:, None] + part.variance / self.variance * ratios).ravel()
            weights = (weights[:, None] * probabilities).ravel()
        return np.sqrt(variances), weights

    @property
    def is_t(self) -> bool:
        """Return whether the estimate has a t distribution: a single part without a limit."""
        return len(self.parts) == 1 and math.isinf(self.parts[0].largest_ratio)

    def _tail(self, value: float) -> float:
        if self.is_t:
            return float(special.stdtr(self.parts[0].degrees_of_freedom, -value))
        scales, weights = self._scales
        return float(weights @ special.ndtr(-value / scales))

    def quantile(self, probability: float) -> float:
        """Quantile of the estimate divided by its standard error; `probability` in (0, 1)."""
        if probability < 0.5:
            return -self.quantile(1 - probability)
        if self.is_t:
            return float(special.stdtrit(self.parts[0].degrees_of_freedom, probability))
        scales, weights = self._scales
        heights = weights / scales
        value = float(special.stdtrit(self.degrees_of_freedom, probability))
        for _ in range(_MOST_STEPS):
            # The tail is convex: above the quantile a step leads below it, and from there all lead upwards.
            ratios = value / scales
            density = float(heights @ np.exp(-(ratios**2) / 2)) / math.sqrt(2 * math.pi)
            excess = float(weights @ special.ndtr(-ratios)) - (1 - probability)
            # Far above it there is no density; a step takes half of the value at most.
            step = max(excess / density, -value / 2) if density else -value / 2
            value += step
            if abs(step) <= _EXACT * (1 + value):
                return value
        raise RuntimeError(f"no quantile at {probability} of {self.parts}; this is a bug")

    def half_width(self, level: float) -> float:
        """Half the width of the two-sided interval at confidence `level`."""
        return self.quantile((1 + level) / 2) * self.standard_error

    def upper_tail(self, distance: float) -> float:
        """One-sided p-value of an estimate that is `distance` above the hypothesis."""
        return max(self._tail(distance / self.standard_error), _SMALLEST_TAIL)

    def detecting_level(self, distance: float, power: float) -> float:
        """Return the level at which a one-sided test detects `distance`, above 0, with `power`.

        It is at most `tail` if and only if `minimum_detectable` at `tail` is at most `distance`, in a hundredth of the
        time: the estimate exceeds the lower point of the noncentral t distribution with probability `power`, so it is
        enough that the test rejects there.
        """
        freedom, location = self.degrees_of_freedom, distance / self.standard_error
        if freedom > _KNOWN_FREEDOM:
            return self._tail(location - float(special.ndtri(power)))
        return self._tail(float(special.nctdtrit(freedom, min(location, _FAR), 1 - power)))

    def minimum_detectable(self, tail: float, power: float) -> float:
        """Smallest true distance from the hypothesis that a one-sided test at level `tail` detects with `power`.

        From the noncentral t distribution, because the test estimates the standard error, with the variances of this
        spread as the true ones.
        """
        critical, freedom = self.quantile(1 - tail), self.degrees_of_freedom
        if freedom > _KNOWN_FREEDOM:
            return (critical + float(stats.norm.ppf(power))) * self.standard_error

        def shortfall(distance: float) -> float:
            return power - 1 + float(special.nctdtr(freedom, distance, critical))

        highest = critical + 1.0
        while shortfall(highest) > 0:
            highest *= 2
        return float(optimize.brentq(shortfall, 0.0, highest)) * self.standard_error


def spread_of(*parts: VariancePart) -> Spread | None:
    """Return the spread of the parts that vary; None if none does."""
    varying = tuple(part for part in parts if part.variance > SMALLEST_VARIANCE)
    return Spread(varying) if varying else None


@lru_cache(maxsize=4096)
def _variance_ratios(degrees_of_freedom: float, largest: float) -> tuple[FloatArray, FloatArray]:
    """Return quadrature nodes and weights of df/chi-squared(df), the true variance divided by the estimated one.

    Gauss-Legendre nodes in the fourth root of the probability, which are dense where the variance is underestimated.
    Ratios above `largest` have probability 0.
    """
    if degrees_of_freedom > _KNOWN_FREEDOM:
        return np.ones(1), np.ones(1)
    few = degrees_of_freedom < _MANY_FREEDOM
    nodes, weights = _gauss_legendre(48 if few else 12)
    power = 4 if few else 1
    half = degrees_of_freedom / 2
    lowest = float(special.gammainc(half, half / largest)) if math.isfinite(largest) else 0.0
    start = lowest ** (1 / power)
    roots = start + (1 - start) * (nodes + 1) / 2
    shares = weights * roots ** (power - 1)
    ratios = half / special.gammaincinv(half, roots**power)
    return ratios, shares / shares.sum()


@cache
def _gauss_legendre(number: int) -> tuple[FloatArray, FloatArray]:
    return np.polynomial.legendre.leggauss(number)
