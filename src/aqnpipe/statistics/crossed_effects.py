"""Differences over several training seeds, with seeds and questions as crossed random effects.

d[seed, question] is the correctness of the treatment minus that of the control on the same question, averaged over
noise seeds. A claim about arms must hold for other seeds and other questions, so both count as samples of a population.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.paired import PairedCounts, paired_counts, score_interval, score_p, tango_p
from aqnpipe.statistics.seed_blocks import SeedVariance
from aqnpipe.statistics.spread import SMALLEST_VARIANCE, Spread, VariancePart, spread_of

Method = Literal["two_way", "questions", "mcnemar", "no_variance"]


@dataclass(frozen=True)
class Estimate:
    """A difference of accuracies (fractions) and the quantities from which its tests and intervals are computed.

    `spread` is None where nothing varies. `counts` is None unless tests of counts apply: one run with yes/no outcomes,
    or differences that do not vary. `analysis`: the method with the parts of it that
    this estimate uses, as keys. `num_units`: questions, or their clusters.
    """

    method: Method
    num_seeds: int
    num_questions: int
    difference: float
    spread: Spread | None
    counts: PairedCounts | None
    analysis: tuple[str, ...]
    num_units: int

    @property
    def covers_seed_variance(self) -> bool:
        """Return whether there are several training seeds, so the estimate is about the arm and not about one run."""
        return self.num_seeds > 1

    @property
    def varying_spread(self) -> Spread:
        """The spread; ValueError if nothing varies. Every estimate without counts has a spread."""
        if self.spread is None:
            raise ValueError("no difference varies, so there is no standard error")
        return self.spread

    def interval(self, level: float) -> tuple[float, float]:
        """Two-sided interval at confidence `level`: Tango's for counts, else from the spread and not clipped."""
        if self.counts is not None:
            return score_interval(self.counts, 1 - level)
        half = self.varying_spread.half_width(level)
        return self.difference - half, self.difference + half

    def columns(self, level: float, bound: float = 1.0) -> dict[str, float]:
        """Return the difference and its interval at confidence `level`, within the possible values, as artifacts do.

        bound: no difference is larger.
        """
        low, high = self.interval(level)
        return {"difference": self.difference, "ci_low": max(low, -bound), "ci_high": min(high, bound)}

    def questions_of(self, num_units: int | None) -> int | None:
        """Return the number of questions in a number of units; None for None."""
        return None if num_units is None else math.ceil(num_units * self.num_questions / self.num_units)

    def two_sided_p(self) -> float:
        """p-value against "no difference": McNemar's score test for counts, else from the spread."""
        if self.counts is not None:
            return score_p(self.counts)
        return min(2 * self.varying_spread.upper_tail(abs(self.difference)), 1.0)

    def upper_p(self, bound: float) -> float:
        """One-sided p-value against "the true difference is at most `bound`": Tango's score test for counts."""
        if self.counts is not None:
            return tango_p(self.counts, bound)
        return self.varying_spread.upper_tail(self.difference - bound)

    def lower_p(self, bound: float) -> float:
        """One-sided p-value against "the true difference is at least `bound`"."""
        if self.counts is not None:
            return tango_p(self.counts.swapped(), -bound)
        return self.varying_spread.upper_tail(bound - self.difference)


def estimate_difference(
    treatment: FloatArray,
    control: FloatArray,
    seed_variance: SeedVariance | None = None,
    clusters: Clusters | None = None,
) -> Estimate:
    """Return the mean of d = treatment - control and what its tests need; the data determine the method.

    Both are scores [seed, question] in [-1, 1]; a control with one seed is compared with every treatment seed.

    - two_way: several seeds.
    - mcnemar: one seed, yes/no outcomes.
    - questions: one seed, averaged over noise seeds.
    - no_variance: d does not vary, so there is no standard error; score test and interval over the questions.

    `seed_variance`: moderated by the other arms of the study, see `SeedBlocks`; None: that of these runs alone. With
    `clusters` these are the units in place of the questions.
    """
    num_questions = treatment.shape[1]
    if clusters is not None:
        treatment, control = clusters.collapsed(treatment), clusters.collapsed(control)
    differences = treatment - control
    num_seeds, num_units = differences.shape
    if num_seeds < 1 or num_units < 2:
        raise ValueError(f"need at least 1 seed and 2 questions or clusters, found shape {differences.shape}")
    freedom = num_units - 1.0 if clusters is None else clusters.freedom
    spread = (
        two_way_spread(differences, seed_variance, freedom)
        if num_seeds > 1
        else spread_of(VariancePart(float(differences[0].var(ddof=1)) / num_units, freedom))
    )
    counts: PairedCounts | None = None
    method: Method = "two_way" if num_seeds > 1 else "questions"
    if spread is None:
        method, counts = "no_variance", _constant_counts(differences)
    elif num_seeds == 1 and all(((side == 0) | (side == 1)).all() for side in (treatment, control)):
        method, counts = "mcnemar", paired_counts(treatment[0] > 0.5, control[0] > 0.5)
    return Estimate(
        method=method,
        num_seeds=num_seeds,
        num_questions=num_questions,
        difference=float(differences.mean()),
        spread=spread,
        counts=counts,
        analysis=(*_analysis(method, spread, seed_variance), *([] if clusters is None else ["clusters"])),
        num_units=num_units,
    )


def _analysis(method: Method, spread: Spread | None, seeds: SeedVariance | None) -> tuple[str, ...]:
    """Return the keys of what was computed, from which every text on the method is made."""
    if spread is None or method == "mcnemar":
        return (method,)
    reference = "one_variance" if spread.is_t else "behrens_fisher"
    return (method, seeds.source if seeds else "own", reference) if method == "two_way" else (method,)


def two_way_spread(
    differences: FloatArray, seed_variance: SeedVariance | None = None, freedom: float | None = None
) -> Spread | None:
    """Return the error of the mean of d[seed, question], with seed and question as crossed random effects.

    The variance is var(seed means)/seeds + var(question means)/questions minus the interaction, which both terms
    contain (Cameron, Gelbach & Miller 2011) and which is subtracted from the questions. Runs that have no others to
    moderate their variance vary at least as much as their answers make them. `freedom`: degrees of freedom of the
    questions, by default their number less 1. Returns None if nothing varies. Simulated
    error rates: docs/decisions/0008-crossed-effects.md.
    """
    num_seeds, num_questions = differences.shape
    by_seed = float(differences.mean(axis=1).var(ddof=1))
    by_question = float(differences.mean(axis=0).var(ddof=1)) / num_questions
    if by_seed / num_seeds + by_question < SMALLEST_VARIANCE:
        return None
    residual = interaction_variance(differences)
    seeds = seed_variance or SeedVariance(VariancePart(by_seed, num_seeds - 1.0))
    own, is_alone = seeds.own, seeds.own.degrees_of_freedom <= num_seeds - 1
    if is_alone and seeds.shared is None:
        own = replace(own, variance=max(own.variance, residual / num_questions))
    by_question = max(by_question - residual / differences.size, 0.0)
    questions = VariancePart(by_question, num_questions - 1.0 if freedom is None else freedom)
    shared = () if seeds.shared is None else (seeds.shared.times(1 / num_seeds),)
    return spread_of(*shared, own.times(1 / num_seeds), questions)


def interaction_variance(differences: FloatArray) -> float:
    """Mean square of the part of d[seed, question] explained neither by the seed nor by the question."""
    num_seeds, num_questions = differences.shape
    seed_means, question_means = differences.mean(axis=1), differences.mean(axis=0)
    left = differences - seed_means[:, None] - question_means[None, :] + differences.mean()
    return float(np.sum(left**2)) / ((num_seeds - 1) * (num_questions - 1))


def _constant_counts(differences: FloatArray) -> PairedCounts:
    """Counts for a d with the same mean in every seed and question: all questions favour one side, or none do."""
    mean, number = float(differences.mean()), differences.shape[1]
    if abs(mean) < 1e-12:
        return PairedCounts(0, 0, number)
    return PairedCounts(number, 0, number) if mean > 0 else PairedCounts(0, number, number)
