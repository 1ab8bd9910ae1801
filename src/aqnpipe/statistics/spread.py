"""Error of an estimate whose variance is a sum of separately estimated variances with different degrees of freedom.

The mean difference between two arms has such an error: one variance comes from a few training seeds (few degrees of
freedom), another from many questions. No single t distribution fits, so the quantiles of two are combined.
"""

import math
from dataclasses import dataclass

from scipy import optimize, stats


@dataclass(frozen=True)
class Spread:
    """Variances of the one or two parts of an error and their degrees of freedom; at least one variance is above 0.

    `overlap`: variance contained in both parts, subtracted from the first. Quantiles follow Cochran & Cox (1950,
    Experimental Designs, 4.14): the t quantiles of the parts, weighted by their variances. With one part this is the t
    distribution. With two parts the test keeps its level (bounds by Mickey & Brown 1966, Ann. Math. Statist. 37:639),
    whereas Satterthwaite's degrees of freedom reject up to 12 % at a nominal 5 % if the part with one degree of freedom
    dominates. The weight of the first part includes the overlap, because the overlap is estimated just as roughly.
    """

    variances: tuple[float, ...]
    degrees_of_freedom: tuple[float, ...]
    overlap: float = 0.0

    @property
    def variance(self) -> float:
        """Variance of the estimate; that of the larger part if the estimated overlap cancels the total."""
        total = max(self.variances[0] - self.overlap, 0.0) + sum(self.variances[1:])
        return total if total > 0 else max(self.variances)

    @property
    def standard_error(self) -> float:
        """Standard error of the estimate."""
        return math.sqrt(self.variance)

    def quantile(self, probability: float) -> float:
        """Quantile of the estimate divided by its standard error; `probability` in (0, 1)."""
        quantiles = stats.t.ppf(probability, self.degrees_of_freedom)
        if len(self.variances) == 1:
            return float(quantiles[0])
        weight = min(self.variances[0] / self.variance, 1.0)
        return float(weight * quantiles[0] + (1 - weight) * quantiles[1])

    def half_width(self, level: float) -> float:
        """Half the width of the two-sided interval at confidence `level`."""
        return self.quantile((1 + level) / 2) * self.standard_error

    def upper_tail(self, distance: float) -> float:
        """One-sided p-value of an estimate that is `distance` above the hypothesis."""
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
        """Smallest true distance from the hypothesis that a one-sided test at level `tail` detects with `power`."""
        return (self.quantile(1 - tail) + self.quantile(power)) * self.standard_error
