"""Paired yes/no outcomes of the same questions under two conditions: counts, score tests, interval and power."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PairedCounts:
    """Numbers of questions that one side alone answered correctly, of `num_questions` in all."""

    only_treatment: int
    only_control: int
    num_questions: int

    @property
    def difference(self) -> float:
        """Accuracy of treatment minus accuracy of control, as a fraction."""
        return (self.only_treatment - self.only_control) / self.num_questions

    def swapped(self) -> "PairedCounts":
        """Return the counts with treatment and control exchanged."""
        return PairedCounts(self.only_control, self.only_treatment, self.num_questions)


def paired_counts(treatment: BoolArray, control: BoolArray) -> PairedCounts:
    """Return the counts of two aligned boolean arrays [question]; ValueError if their shapes differ or are empty."""
    if treatment.shape != control.shape or treatment.ndim != 1 or not treatment.size:
        raise ValueError(
            f"need two equally long, non-empty vectors, found shapes {treatment.shape} and {control.shape}"
        )
    only_treatment, only_control = (np.count_nonzero(part) for part in (treatment & ~control, ~treatment & control))
    return PairedCounts(int(only_treatment), int(only_control), treatment.size)


def score_p(counts: PairedCounts) -> float:
    """Two-sided p-value of McNemar's score test: is a disagreement equally likely to favour either side?

    It is Tango's test at 0, both sides, so it decides like `score_interval`. Over all shares of disagreements its error
    is at most 5.3 % at a nominal 5 %, and below the level at 1.25 % and less (Fagerland et al. 2013, BMC Med. Res.
    Methodol. 13:91).
    """
    return min(1.0, 2 * min(tango_p(counts, 0.0), tango_p(counts.swapped(), 0.0)))


def score_interval(counts: PairedCounts, alpha: float) -> tuple[float, float]:
    """Interval of the paired difference of proportions: the values that Tango's test at alpha / 2 does not reject."""
    return _lower_limit(counts, alpha / 2), -_lower_limit(counts.swapped(), alpha / 2)


@lru_cache(maxsize=1 << 16)  # The seeds of a large study have the same few counts.
def _lower_limit(counts: PairedCounts, tail: float) -> float:
    def excess(bound: float) -> float:
        return tango_p(counts, bound) - tail

    lowest = -1 + 1e-9
    return -1.0 if excess(lowest) > 0 else float(optimize.brentq(excess, lowest, counts.difference))


def tango_p(counts: PairedCounts, bound: float) -> float:
    """One-sided p-value against "the true difference is at most `bound`", with `bound` in (-1, 1).

    This is the score test of Tango (1998), Statist. Med. 17:891. It is asymptotic, but stays valid if the sides
    disagree on few or no questions, where a Wald test divides by 0.
    """
    only_treatment, only_control, num = counts.only_treatment, counts.only_control, counts.num_questions
    surplus = only_treatment - only_control - num * bound
    linear = -only_treatment - only_control + (2 * num - only_treatment + only_control) * bound
    constant = -only_control * bound * (1 - bound)
    share = (math.sqrt(max(linear**2 - 8 * num * constant, 0.0)) - linear) / (4 * num)
    variance = num * (2 * share + bound * (1 - bound))
    if variance <= 0:
        return 0.5 if surplus == 0 else float(surplus < 0)
    return float(special.ndtr(-surplus / math.sqrt(variance)))


def minimum_detectable_difference(
    num_questions: int, discordant_fraction: float, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Smallest true paired difference that a two-sided McNemar test detects with `power`; 1.0 if there is none.

    Connor (1987), Biometrics 43:207: `n*d^2 = (z_a*sqrt(psi) + z_b*sqrt(psi - d^2))^2`, where psi is the share of
    questions on which the sides disagree. It is asymptotic.
    """
    z_alpha, z_power = stats.norm.ppf(1 - alpha / 2), stats.norm.ppf(power)

    def surplus(difference: float) -> float:
        spread = z_alpha * math.sqrt(discordant_fraction)
        spread += z_power * math.sqrt(max(discordant_fraction - difference**2, 0.0))
        return difference * math.sqrt(num_questions) - spread

    if surplus(discordant_fraction) < 0:
        return 1.0
    return float(optimize.brentq(surplus, 0.0, discordant_fraction))
