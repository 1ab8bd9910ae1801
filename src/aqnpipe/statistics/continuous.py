"""Numeric outcomes, such as a loss per seed: paired and Welch t-tests; and how exactly a scale is measured."""

import math
from dataclasses import dataclass

from scipy import stats

from aqnpipe.statistics.arrays import FloatArray


@dataclass(frozen=True)
class MeanDifference:
    """Treatment minus control, with the degrees of freedom, p-value and interval of a two-sided t-test."""

    difference: float
    standard_error: float
    degrees_of_freedom: float
    p_value: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation of `num` runs. `ddof`: 1 if the deviation was divided by num - 1, 0 if by num."""

    mean: float
    std: float
    num: int
    ddof: int = 1

    @property
    def sample_std(self) -> float:
        """The standard deviation with divisor num - 1."""
        return self.std * math.sqrt((self.num - self.ddof) / (self.num - 1))


def paired_t(treatment: FloatArray, control: FloatArray, alpha: float) -> MeanDifference:
    """Paired t-test of two aligned vectors [run], such as losses of the same seeds."""
    result = stats.ttest_rel(treatment, control)
    interval = result.confidence_interval(1 - alpha)
    differences = treatment - control
    return MeanDifference(
        difference=float(differences.mean()),
        standard_error=float(differences.std(ddof=1)) / math.sqrt(len(differences)),
        degrees_of_freedom=float(result.df),
        p_value=float(result.pvalue),
        ci_low=float(interval.low),
        ci_high=float(interval.high),
    )


def welch_t(treatment: Summary, control: Summary, alpha: float) -> MeanDifference:
    """Welch's t-test from means and standard deviations; one side may have standard deviation 0, else ValueError."""
    variances = [side.sample_std**2 / side.num for side in (treatment, control)]
    total = sum(variances)
    difference = treatment.mean - control.mean
    if total == 0:
        raise ValueError("neither side varies: no t-test exists")
    freedom = total**2 / sum(v**2 / (side.num - 1) for v, side in zip(variances, (treatment, control), strict=True))
    error = math.sqrt(total)
    half = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    return MeanDifference(
        difference=difference,
        standard_error=error,
        degrees_of_freedom=freedom,
        p_value=float(2 * stats.t.sf(abs(difference) / error, freedom)),
        ci_low=difference - half,
        ci_high=difference + half,
    )


def paired_p_range(treatment: Summary, control: Summary) -> tuple[float, float]:
    """Smallest and largest p-value of a paired t-test consistent with the two summaries: correlation 1 and -1.

    A paired test depends on the correlation between the sides, which means and standard deviations do not determine.
    """
    return paired_p(treatment, control, 1.0), paired_p(treatment, control, -1.0)


def paired_p(treatment: Summary, control: Summary, correlation: float) -> float:
    """Two-sided p-value of a paired t-test for a given correlation; both sides have equally many runs."""
    first, second = treatment.sample_std, control.sample_std
    variance = first**2 + second**2 - 2 * correlation * first * second
    difference = treatment.mean - control.mean
    if variance <= 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stats.t.sf(abs(difference) / math.sqrt(variance / treatment.num), treatment.num - 1))


def implied_correlation(treatment: Summary, control: Summary, p_value: float) -> float | None:
    """Return the correlation for which a paired t-test gives `p_value`; None if it is not in [-1, 1]."""
    first, second = treatment.sample_std, control.sample_std
    if first * second == 0:
        return None
    error = abs(treatment.mean - control.mean) / float(stats.t.isf(p_value / 2, treatment.num - 1))
    correlation = (first**2 + second**2 - treatment.num * error**2) / (2 * first * second)
    return correlation if abs(correlation) <= 1 else None


def scale_standard_error(num_elements: int) -> float:
    """Return the standard error of a measured scale as a fraction of it, for independent Gaussian errors."""
    # The mean square of n errors of known mean 0 has variance 2 sigma^4 / n, so its root has sigma / sqrt(2 n): Ahn and
    # Fessler 2003, "Standard Errors of Mean, Variance, and Standard Deviation Estimators".
    return float((2 * num_elements) ** -0.5)
