"""Differences over several training seeds: seeds and questions both count as draws from a population.

d[seed, question] is the treatment's correctness minus the control's on the same question, averaged over noise seeds.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from aqnpipe.statistics.paired import mcnemar_exact_p, newcombe_interval, paired_counts

FloatArray = npt.NDArray[np.float64]
Method = Literal["two_way", "questions", "mcnemar", "no_variance"]

MAX_SEEDS_SEARCHED = 1000


@dataclass(frozen=True)
class Estimate:
    """A difference of accuracies (fractions) with its uncertainty.

    `covers_training_luck`: whether more than one training seed entered, so that the interval is about the arm and not
    about one run. `standard_error` and `degrees_of_freedom` are null for methods that need none.
    """

    method: Method
    num_seeds: int
    num_questions: int
    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    standard_error: float | None
    degrees_of_freedom: float | None
    covers_training_luck: bool


@dataclass(frozen=True)
class VarianceParts:
    """Components of the variance of one d[seed, question]; `residual` holds the interaction."""

    seed: float
    question: float
    residual: float


def estimate_difference(treatment: FloatArray, control: FloatArray, alpha: float) -> Estimate:
    """Return the mean of d = treatment - control with interval and two-sided p; the method follows from the data.

    Both are correctness [seed, question] in [0, 1]; a control of one seed is compared with every treatment seed.
    two_way: several seeds. mcnemar: one seed, right or wrong. questions: one seed, averaged over noise seeds.
    no_variance: no difference varies, so no standard error exists; exact test and interval over the questions.
    """
    differences = treatment - control
    num_seeds, num_questions = differences.shape
    if num_seeds < 1 or num_questions < 2:
        raise ValueError(f"need at least 1 seed and 2 questions, found shape {differences.shape}")
    variance = two_way_variance(differences)[0] if num_seeds > 1 else float(differences.var())
    if variance == 0:
        return _exact(treatment, control, alpha, "no_variance")
    if num_seeds > 1:
        return _two_way(differences, alpha)
    if all(np.isin(side, (0.0, 1.0)).all() for side in (treatment, control)):
        return _exact(treatment, control, alpha, "mcnemar")
    return _over_questions(differences[0], alpha)


def two_way_variance(differences: FloatArray) -> tuple[float, float]:
    """Return (variance of the mean, Satterthwaite degrees of freedom) with seed and question as crossed random effects.

    V = V_seed + V_question, each the variance of the respective means over their number. The interaction is in both
    and is not subtracted, which errs on the safe side (Cameron, Gelbach & Miller 2011 subtract it). Simulated type-I
    error at a nominal 5 %: 1-5 % for 2 to 10 seeds whose luck is about 1 point. Where luck is far above the question
    noise (4 points, 1,000 questions) Satterthwaite's approximation is too hopeful: 11 % with 2 seeds, 5 % with 5.
    """
    num_seeds, num_questions = differences.shape
    by_seed = float(differences.mean(axis=1).var(ddof=1)) / num_seeds
    by_question = float(differences.mean(axis=0).var(ddof=1)) / num_questions
    total = by_seed + by_question
    weight = by_seed**2 / (num_seeds - 1) + by_question**2 / (num_questions - 1)
    return total, total**2 / weight if weight > 0 else math.inf


def _two_way(differences: FloatArray, alpha: float) -> Estimate:
    variance, freedom = two_way_variance(differences)
    return _from_t(differences, math.sqrt(variance), freedom, alpha, "two_way")


def _over_questions(differences: FloatArray, alpha: float) -> Estimate:
    error = float(differences.std(ddof=1)) / math.sqrt(differences.size)
    return _from_t(differences[None, :], error, differences.size - 1, alpha, "questions")


def _from_t(differences: FloatArray, error: float, freedom: float, alpha: float, method: Method) -> Estimate:
    mean = float(differences.mean())
    half = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    return Estimate(
        method=method,
        num_seeds=differences.shape[0],
        num_questions=differences.shape[1],
        difference=mean,
        ci_low=max(mean - half, -1.0),
        ci_high=min(mean + half, 1.0),
        p_value=float(2 * stats.t.sf(abs(mean) / error, freedom)),
        standard_error=error,
        degrees_of_freedom=freedom,
        covers_training_luck=method == "two_way",
    )


def _exact(treatment: FloatArray, control: FloatArray, alpha: float, method: Method) -> Estimate:
    """Exact McNemar and Newcombe's interval on the first seed (every seed says the same where nothing varies)."""
    counts = paired_counts(treatment[0] > 0.5, control[0] > 0.5)
    if method == "no_variance" and treatment[0].mean() == control[0].mean():
        counts = paired_counts(treatment[0] > 0.5, treatment[0] > 0.5)
    low, high = newcombe_interval(counts, alpha)
    differences = treatment - control
    num_questions = differences.shape[1]
    error = float(differences[0].std(ddof=1)) / math.sqrt(num_questions) if method == "mcnemar" else None
    return Estimate(
        method=method,
        num_seeds=differences.shape[0],
        num_questions=num_questions,
        difference=float(differences.mean()),
        ci_low=low,
        ci_high=high,
        p_value=mcnemar_exact_p(counts),
        standard_error=error,
        degrees_of_freedom=num_questions - 1.0 if error is not None else None,
        covers_training_luck=differences.shape[0] > 1,
    )


def minimum_detectable(standard_error: float, degrees_of_freedom: float, alpha: float, power: float) -> float:
    """Smallest true difference that a two-sided t-test at `alpha` finds with `power`, given the error actually seen."""
    quantiles = stats.t.ppf(1 - alpha / 2, degrees_of_freedom) + stats.t.ppf(power, degrees_of_freedom)
    return float(quantiles) * standard_error


def variance_parts(differences: FloatArray) -> VarianceParts:
    """Split the variance of d[seed, question] by the mean squares of a two-way layout without replication."""
    num_seeds, num_questions = differences.shape
    seed_means, question_means = differences.mean(axis=1), differences.mean(axis=0)
    left = differences - seed_means[:, None] - question_means[None, :] + differences.mean()
    residual = float(np.sum(left**2)) / ((num_seeds - 1) * (num_questions - 1))
    return VarianceParts(
        seed=max(float(seed_means.var(ddof=1)) - residual / num_questions, 0.0),
        question=max(float(question_means.var(ddof=1)) - residual / num_seeds, 0.0),
        residual=residual,
    )


def seeds_needed(differences: FloatArray, alpha: float, power: float) -> int | None:
    """Return how many seeds would show the observed difference with `power` at the variances seen.

    None where the difference is 0 or where even MAX_SEEDS_SEARCHED seeds would not do (the questions are the limit).
    """
    target = abs(float(differences.mean()))
    num_questions = differences.shape[1]
    parts = variance_parts(differences)

    def surplus(num_seeds: int) -> float:
        by_seed = (parts.seed + parts.residual / num_questions) / num_seeds
        by_question = (parts.question + parts.residual / num_seeds) / num_questions
        total = by_seed + by_question
        freedom = total**2 / (by_seed**2 / (num_seeds - 1) + by_question**2 / (num_questions - 1))
        return target - minimum_detectable(math.sqrt(total), freedom, alpha, power)

    if target == 0 or parts.residual == 0 or surplus(MAX_SEEDS_SEARCHED) < 0:
        return None
    return next((n for n in range(2, MAX_SEEDS_SEARCHED) if surplus(n) >= 0), MAX_SEEDS_SEARCHED)


def questions_needed(
    standard_error: float, num_questions: int, difference: float, alpha: float, power: float
) -> int | None:
    """Return how many questions would show `difference` with `power`, for one run; None where it is 0."""
    if difference == 0 or standard_error == 0:
        return None
    spread = standard_error * math.sqrt(num_questions)

    def surplus(number: float) -> float:
        return abs(difference) - minimum_detectable(spread / math.sqrt(number), number - 1, alpha, power)

    if surplus(4) >= 0:
        return 4
    upper = 4.0
    while surplus(upper) < 0:
        upper *= 2
    return math.ceil(optimize.brentq(surplus, 4, upper))
