"""Tests of printed summaries: accuracies with their numbers of questions, losses with mean and standard deviation.

A paper seldom states which questions were answered, so its accuracies are compared as independent samples. Where both
sides answered the same questions this is conservative; `largest_discordance` says what pairing could have done.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from scipy import stats
from statsmodels.stats.proportion import confint_proportions_2indep, test_proportions_2indep

from aqnpipe.artifacts.base import Statement, statement
from aqnpipe.config.analysis import TestedClaim
from aqnpipe.config.published import AccuracyClaim, DifferencesClaim, LossClaim, Pair, RatioClaim, RunScatter
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.continuous import Summary, paired_p_range, paired_t, welch_t
from aqnpipe.statistics.multiple_testing import claim_p, distance_inside, interval_level

Unit = Literal["points", "nats", "ratio"]
_POINTS = 100.0


@dataclass(frozen=True)
class Proportion:
    """The fraction of correct answers to a number of questions."""

    fraction: float
    num_questions: int

    @property
    def correct(self) -> float:
        """Number of correct answers; not a whole number if the printed figure is impossible."""
        return self.fraction * self.num_questions

    @property
    def variance(self) -> float:
        """Variance of the fraction."""
        return self.fraction * (1 - self.fraction) / self.num_questions


@dataclass(frozen=True)
class Result:
    """A comparison of printed figures in `unit`; `scale` converts fractions (margins) into it.

    `treatment` and `control` name the sides; `sides` has their proportions where each side is a single one.
    """

    treatment: str
    control: str
    unit: Unit
    scale: float
    difference: float
    ci_low: float | None
    ci_high: float | None
    p_value: float | None
    method: Statement
    sides: tuple[Proportion, Proportion] | None = None
    p_paired_low: float | None = None
    p_paired_high: float | None = None


def confidence_of(claim: TestedClaim, alpha: float) -> float:
    """Return the confidence of the interval that decides like the test of the claim."""
    return interval_level(alpha, one_sided=claim.margin is not None)


def accuracies_result(claim: AccuracyClaim, treatment: Proportion, control: Proportion, alpha: float) -> Result:
    """Compare two accuracies as independent samples: Wald z, or Agresti and Caffo's method if a side is 0 or 100 %."""
    extreme = any(side.fraction in (0.0, 1.0) for side in (treatment, control))
    method = "agresti-caffo" if extreme else "wald"
    counts = (treatment.correct, treatment.num_questions, control.correct, control.num_questions)
    low, high = confint_proportions_2indep(
        *counts, compare="diff", method=method, alpha=1 - confidence_of(claim, alpha)
    )

    def p_value(value: float, alternative: str) -> float:
        test = test_proportions_2indep(*counts, value=value, compare="diff", method=method, alternative=alternative)
        return float(test.pvalue)

    found = claim_p(
        (claim.test, claim.margin),
        lambda: p_value(0.0, "two-sided"),
        lambda bound: p_value(bound, "larger"),
        lambda bound: p_value(bound, "smaller"),
    )
    return Result(
        treatment=claim.treatment,
        control=claim.control,
        unit="points",
        scale=_POINTS,
        difference=_POINTS * (treatment.fraction - control.fraction),
        ci_low=_POINTS * float(low),
        ci_high=_POINTS * float(high),
        p_value=found,
        method=statement("method.agresti_caffo" if extreme else "method.wald"),
        sides=(treatment, control),
    )


def differences_result(
    claim: DifferencesClaim | RatioClaim, proportions: Mapping[str, Proportion], alpha: float
) -> Result:
    """Compare two differences of accuracies, each accuracy an independent sample.

    Of a ratio, the interval is Fieller's, which is unbounded if the divisor may be 0, and the p-value that of "the two
    differences are equal", a ratio of 1.
    """
    first, second = _difference(claim.first, proportions), _difference(claim.second, proportions)
    difference, error = first - second, math.sqrt(_variance(claim.first, claim.second, proportions, 1.0))
    quantile = float(stats.norm.ppf((1 + confidence_of(claim, alpha)) / 2))
    found = Result(
        treatment=f"{claim.first.treatment} − {claim.first.control}",
        control=f"{claim.second.treatment} − {claim.second.control}",
        unit="points",
        scale=_POINTS,
        difference=_POINTS * difference,
        ci_low=_POINTS * (difference - quantile * error),
        ci_high=_POINTS * (difference + quantile * error),
        p_value=_p_of(claim, difference, error, stats.norm),
        method=statement("method.two_differences"),
    )
    if isinstance(claim, DifferencesClaim):
        return found
    low, high = _fieller(claim, proportions, float(stats.norm.ppf(1 - alpha / 2)))
    ratio, method = first / second if second else math.inf, statement("method.fieller")
    return replace(found, unit="ratio", scale=1.0, difference=ratio, ci_low=low, ci_high=high, method=method)


def losses_result(
    claim: LossClaim, treatment: Summary, control: Summary, alpha: float, values: tuple[FloatArray, FloatArray] | None
) -> Result:
    """Compare two losses: paired t over `values`[run] of both sides, else Welch's t from means and standard deviations.

    Without values only the range of the paired test's p-value is known.
    """
    difference = treatment.mean - control.mean
    untested = Result(
        treatment=claim.treatment,
        control=claim.control,
        unit="nats",
        scale=1.0,
        difference=difference,
        ci_low=None,
        ci_high=None,
        p_value=None,
        method=statement("method.no_test"),
    )
    if treatment.std == control.std == 0:
        return untested
    width = 1 - confidence_of(claim, alpha)
    test = paired_t(*values, width) if values else welch_t(treatment, control, width)
    freedom, test_name = test.degrees_of_freedom, "paired" if values else "welch"
    same_runs = treatment.num == control.num and claim.margin is None
    low, high = paired_p_range(treatment, control) if same_runs and not values else (None, None)
    return replace(
        untested,
        ci_low=test.ci_low,
        ci_high=test.ci_high,
        p_value=test.p_value
        if claim.margin is None
        else _p_of(claim, difference, test.standard_error, stats.t(freedom)),
        method=statement(f"method.t_test.{test_name}", degrees_of_freedom=freedom, ddof=treatment.ddof),
        p_paired_low=low,
        p_paired_high=high,
    )


def run_to_run_p(claim: AccuracyClaim, difference: float, scatter: RunScatter) -> float:
    """Return p of a difference (points) between single runs against the scatter of identical runs: t with its df."""
    return _p_of(claim, difference, scatter.points * math.sqrt(2), stats.t(scatter.num_runs - 1), scale=_POINTS)


def largest_discordance(result: Result, alpha: float) -> float | None:
    """Return the discordant share of questions up to which the asymptotic McNemar test would reject; None: never.

    The test has z = d*sqrt(n)/sqrt(psi - d^2), so it rejects for psi up to n*d^2/z_alpha^2 + d^2. psi is at least |d|.
    """
    if result.sides is None or result.sides[0].num_questions != result.sides[1].num_questions:
        return None
    difference = result.difference / result.scale
    limit = difference**2 * (result.sides[0].num_questions / float(stats.norm.ppf(1 - alpha / 2)) ** 2 + 1)
    return min(limit, 1.0) if limit > abs(difference) else None


def questions_per_side(claim: TestedClaim, result: Result, alpha: float, power: float) -> int | None:
    """Return the questions per side that would show the observed difference, unpaired; None unless two accuracies."""
    if result.sides is None:
        return None
    distance = distance_inside((claim.test, claim.margin), result.difference / result.scale)
    tail = alpha / 2 if claim.margin is None else alpha
    if distance <= 0:
        return None
    spread = sum(side.fraction * (1 - side.fraction) for side in result.sides)
    quantiles = float(stats.norm.ppf(1 - tail) + stats.norm.ppf(power))
    return math.ceil(quantiles**2 * spread / distance**2)


def _difference(pair: Pair, proportions: Mapping[str, Proportion]) -> float:
    return proportions[pair.treatment].fraction - proportions[pair.control].fraction


def _variance(first: Pair, second: Pair, proportions: Mapping[str, Proportion], factor: float) -> float:
    """Return the variance of first - factor*second; an accuracy in both pairs counts once, its weights added."""
    weights: dict[str, float] = {}
    for name, weight in (
        (first.treatment, 1.0),
        (first.control, -1.0),
        (second.treatment, -factor),
        (second.control, factor),
    ):
        weights[name] = weights.get(name, 0.0) + weight
    return sum(weight**2 * proportions[name].variance for name, weight in weights.items())


def _fieller(
    claim: RatioClaim, proportions: Mapping[str, Proportion], quantile: float
) -> tuple[float | None, float | None]:
    """Solve (a - r*b)^2 = z^2 Var(a - r*b) for r; (None, None) where the set of ratios is unbounded."""
    first, second = _difference(claim.first, proportions), _difference(claim.second, proportions)
    # Var(a - r*b) = var_a - 2r*cov + r^2*var_b, read off at r = 0, 1 and -1.
    var_a, plus, minus = (_variance(claim.first, claim.second, proportions, r) for r in (0.0, 1.0, -1.0))
    var_b, covariance = (plus + minus) / 2 - var_a, (minus - plus) / 4
    square = second**2 - quantile**2 * var_b
    if square <= 0:
        return None, None
    middle = first * second - quantile**2 * covariance
    root = math.sqrt(middle**2 - square * (first**2 - quantile**2 * var_a))
    return (middle - root) / square, (middle + root) / square


def _p_of(claim: TestedClaim, difference: float, error: float, distribution: Any, scale: float = 1.0) -> float:
    """Return the p-value of a claim from an estimate and its standard error; `scale` converts its margin."""
    return claim_p(
        (claim.test, claim.margin),
        lambda: float(2 * distribution.sf(abs(difference) / error)),
        lambda bound: float(distribution.sf((difference - scale * bound) / error)),
        lambda bound: float(distribution.sf((scale * bound - difference) / error)),
    )
