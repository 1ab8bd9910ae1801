"""Group-sequential tests: a study looks at its data several times, and all looks together keep the error rate.

The error rate is spent over the looks by a spending function (Lan & DeMets 1983) of the number of seeds. The level of a
look comes from the joint distribution of the statistics (Armitage, McPherson & Rowe 1969) and is applied to the p-value
of that look, whatever test it is from (the significance-level approach for t-tests: Jennison & Turnbull 2000, sections
3.8 and 11.4). A look-adjusted p-value is the smallest error rate at which its look would have rejected (Liu & Anderson
2008). Holm's adjustment of such p-values controls the family over all looks (Maurer & Bretz 2013).

The questions are the same at all looks, so the statistics of two looks correlate more than their numbers of seeds say.
Then the levels are conservative. benchmarks/sequential.py measures by how much.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from aqnpipe.statistics.arrays import FloatArray

SPENDING_POWER = 2
"""Share of the error rate spent with a share t of the seeds: t**2 (Kim & DeMets 1987)."""

_NODES = 160
_LOWEST_Z = -8.5
"""Lower end of the integration: the probability below is 1e-17."""
_SMALLEST_TAIL = 1e-12


@dataclass(frozen=True)
class Looks:
    """The looks of a study: after `start` seeds and then after every `step` more, as planned up to `planned` seeds.

    `reserve` is the share of the error rate that the planned looks leave to looks after them. The j-th of those spends
    1 / (j * (j + 1)) of it, so that any number of looks may follow and the levels of no look depend on how many do.
    """

    start: int
    step: int
    planned: int
    reserve: float

    @property
    def num_planned(self) -> int:
        """Number of looks up to `planned` seeds."""
        return 1 + (self.planned - self.start) // self.step

    def seeds_at(self, look: int) -> int:
        """Return the number of seeds at a look; the first look is 1."""
        return self.start + (look - 1) * self.step

    def spent(self, look: int) -> float:
        """Return the share of the error rate that may be spent up to a look.

        >>> looks = Looks(start=2, step=2, planned=8, reserve=0.1)
        >>> [round(looks.spent(number), 4) for number in range(1, 7)]
        [0.0563, 0.225, 0.5062, 0.9, 0.95, 0.9667]
        """
        within = (1 - self.reserve) * min(self.seeds_at(look) / self.planned, 1.0) ** SPENDING_POWER
        after = max(look - self.num_planned, 0)
        return within + self.reserve * (1 - 1 / (after + 1))


@lru_cache(maxsize=512)
def nominal_tails(looks: Looks, tail: float, number: int) -> tuple[float, ...]:
    """Return the one-sided levels of the first `number` looks that together spend the one-sided error rate `tail`."""
    information = [float(looks.seeds_at(look)) for look in range(1, number + 1)]
    shares = [looks.spent(look) for look in range(1, number + 1)]
    spends = tail * np.diff([0.0, *shares])
    return tuple(float(special.ndtr(-bound)) for bound in bounds(information, spends.tolist()))


def bounds(information: list[float], spends: list[float]) -> list[float]:
    """Return the upper bounds of z at looks with the given information, each crossed first with the given probability.

    Numerical integration over the density of z on the paths that crossed no bound before. A look that spends nothing
    has the bound infinity.
    """
    found: list[float] = []
    nodes, weights = np.empty(0), np.empty(0)
    for look, spend in enumerate(spends):
        if look == 0:
            bound = -float(special.ndtri(spend))
            nodes, weights = _nodes(bound)
            weights = weights * _density(nodes)
        else:
            previous, now = information[look - 1], information[look]
            means, width = nodes * np.sqrt(previous / now), np.sqrt((now - previous) / now)
            bound = _bound(means, width, weights, spend)
            nodes, next_weights = _nodes(bound)
            density = _density((nodes[:, None] - means[None, :]) / width) / width
            weights = next_weights * (density @ weights)
        found.append(bound)
    return found


def look_adjusted_tail(looks: Looks, look: int, tail: float) -> float:
    """Return the smallest one-sided error rate over all looks at which a one-sided p-value `tail` at `look` rejects."""
    if tail >= 0.5:
        return 1.0
    floor = max(tail, _SMALLEST_TAIL)

    def excess(log_rate: float) -> float:
        return nominal_tails(looks, float(np.exp(log_rate)), look)[-1] - floor

    low, high = np.log(_SMALLEST_TAIL), np.log(0.5)
    if excess(high) <= 0:
        return 1.0
    return float(np.exp(optimize.brentq(excess, low, high, xtol=1e-7)))


def look_adjusted_p(looks: Looks, look: int, p_value: float, *, one_sided: bool) -> float:
    """Return a p-value of one look adjusted for all looks; a two-sided test is two one-sided ones at half the level."""
    if one_sided:
        return look_adjusted_tail(looks, look, p_value)
    return min(1.0, 2 * look_adjusted_tail(looks, look, p_value / 2))


def _density(values: FloatArray) -> FloatArray:
    """Return the standard normal density; scipy's own checks its arguments, which takes most of the time here."""
    return np.exp(-(values**2) / 2) / np.sqrt(2 * np.pi)


def _nodes(bound: float) -> tuple[FloatArray, FloatArray]:
    """Gauss-Legendre nodes and weights from the lowest z to `bound`."""
    nodes, weights = _legendre()
    half = (min(bound, -_LOWEST_Z) - _LOWEST_Z) / 2
    return _LOWEST_Z + half * (nodes + 1), half * weights


@lru_cache(maxsize=1)
def _legendre() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights


def _bound(means: FloatArray, width: float, weights: FloatArray, spend: float) -> float:
    """Return the z above which the paths with the given means and weights lie with probability `spend`."""
    if spend <= 0:
        return float("inf")

    def excess(bound: float) -> float:
        return float(weights @ special.ndtr((means - bound) / width)) - spend

    return float(optimize.brentq(excess, _LOWEST_Z, -_LOWEST_Z, xtol=1e-10))
