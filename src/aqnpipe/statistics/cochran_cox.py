"""The error of an estimate as a sum of independently estimated variances, each with its own degrees of freedom."""

import math
from dataclasses import dataclass

from scipy import optimize, stats


@dataclass(frozen=True)
class Spread:
    """Variances of one or two parts of an estimate's error, and their degrees of freedom; one must be above 0.

    `overlap`: variance that both parts contain, taken off the first one. Quantiles are those of Cochran & Cox (1950,
    Experimental Designs, 4.14): the t quantiles of the parts, weighted by the parts' variances. One part gives the t
    distribution. With two the test keeps its level (Mickey & Brown 1966, Ann. Math. Statist. 37:639, bound the
    distribution), where Satterthwaite's degrees of freedom reject up to 12 % at a nominal 5 % if the part with one
    degree of freedom is the large one. The first part's weight includes the overlap, which is estimated as roughly.
    """

    variances: tuple[float, ...]
    degrees_of_freedom: tuple[float, ...]
    overlap: float = 0.0

    @property
    def variance(self) -> float:
        """Variance of the estimate; the largest part's where the overlap, itself estimated, takes off all there is."""
        total = max(self.variances[0] - self.overlap, 0.0) + sum(self.variances[1:])
        return total if total > 0 else max(self.variances)

    @property
    def standard_error(self) -> float:
        """Standard error of the estimate."""
        return math.sqrt(self.variance)

    def quantile(self, probability: float) -> float:
        """Quantile of estimate/error, `probability` in (0, 1)."""
        quantiles = stats.t.ppf(probability, self.degrees_of_freedom)
        if len(self.variances) == 1:
            return float(quantiles[0])
        weight = min(self.variances[0] / self.variance, 1.0)
        return float(weight * quantiles[0] + (1 - weight) * quantiles[1])

    def half_width(self, level: float) -> float:
        """Half of the width of the two-sided interval at confidence `level`."""
        return self.quantile((1 + level) / 2) * self.standard_error

    def upper_tail(self, distance: float) -> float:
        """One-sided p of an estimate that lies `distance` above the hypothesis."""
        value = distance / self.standard_error
        if len(self.variances) == 1:
            return float(stats.t.sf(value, self.degrees_of_freedom[0]))
        if value < 0:
            return 1 - self.upper_tail(-distance)
        if value == 0:
            return 0.5
        smallest = 1e-12
        if self.quantile(1 - smallest) < value:
            return smallest
        return float(optimize.brentq(lambda p: self.quantile(1 - p) - value, smallest, 0.5, xtol=1e-13))

    def minimum_detectable(self, tail: float, power: float) -> float:
        """Smallest true distance from the hypothesis that a one-sided test at `tail` finds with `power`."""
        return (self.quantile(1 - tail) + self.quantile(power)) * self.standard_error
