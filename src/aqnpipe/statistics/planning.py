"""Prognosis of a study of arms before it runs, and the cheapest numbers of seeds, questions and noise draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy import stats

from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import interaction_variance
from aqnpipe.statistics.sample_sizes import VarianceParts, as_estimated, expected_spread

SEEDS_TRIED = (*range(2, 17), 20, 24, 32, 48, 64)
QUESTIONS_TRIED = (100, 200, 300, 500, 750, 1000, 1319, 2000, 3000, 5000, 10_000)
DRAWS_TRIED = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class PairVariances:
    """Variances of the difference of two arms on one question, with one seed and one noise draw.

    `seed`: between seeds. `question`: between questions. `answer`: what is left of a run on a question. `draw`: what
    another noise draw changes.
    """

    seed: float
    question: float
    answer: float
    draw: float = 0.0

    def parts(self, num_draws: int, num_arms: int, evenness: float = 1.0) -> VarianceParts:
        """Return the components where outcomes are means over noise draws."""
        residual = self.answer + self.draw / num_draws
        return VarianceParts(self.seed, self.question, residual, num_arms=num_arms, evenness=evenness)


USUAL = PairVariances(seed=2 * 0.015**2, question=0.02, answer=0.12, draw=0.10)
"""Assumed for studies without results, not measured; the variance between seeds is that of a run SD of 1.5 points."""

LEAST_FREEDOM = 4.0
"""Degrees of freedom of the variance between seeds below which a pilot says nothing about it."""

PILOT_TAIL = 0.1


@dataclass(frozen=True)
class Split:
    """Numbers of seeds, questions and noise draws, with the cost in device hours."""

    num_seeds: int
    num_questions: int
    num_draws: int
    device_hours: float


@dataclass(frozen=True)
class Pilot:
    """Information from a pilot about variances. `seed_range`: 80 % interval of that between seeds.

    It is None where the pilot says nothing about it; `variances` have the usual value there.
    """

    variances: PairVariances
    seed_range: tuple[float, float] | None

    @property
    def ends(self) -> tuple[PairVariances, PairVariances]:
        """The variances with both ends of the range of that between seeds."""
        low, high = self.seed_range or (self.variances.seed, self.variances.seed)
        return replace(self.variances, seed=low), replace(self.variances, seed=high)


def pilot_of(
    pairs: Sequence[tuple[FloatArray, FloatArray]], num_arms: int, clusters: Clusters | None = None
) -> Pilot | None:
    """Return the mean variances over pairs of arms of scores[seed, noise draw, question]; None without two seeds.

    With `clusters`, a question varies as its share of a cluster does. The variance between seeds has the degrees of
    freedom of the interaction of `num_arms` arms and seeds.
    """
    usable = [first - second for first, second in pairs if first.shape[0] > 1]
    if not usable:
        return None
    found = PairVariances(*np.mean([_of_pair(differences, clusters) for differences in usable], axis=0))
    num_seeds, num_draws, num_questions = usable[0].shape
    freedom = (num_arms - 1.0) * (num_seeds - 1.0)
    if found.seed == 0 or freedom < LEAST_FREEDOM:
        return Pilot(replace(found, seed=USUAL.seed), None)
    by_answers = (found.answer + found.draw / num_draws) / num_questions
    low, high = (
        (found.seed + by_answers) * freedom / float(stats.chi2.isf(tail, freedom)) - by_answers
        for tail in (PILOT_TAIL, 1 - PILOT_TAIL)
    )
    return Pilot(found, (max(low, 0.0), high))


def _of_pair(differences: FloatArray, clusters: Clusters | None) -> tuple[float, float, float, float]:
    num_seeds, num_draws, num_questions = differences.shape
    units = differences if clusters is None else clusters.collapsed(differences)
    means = units.mean(axis=1)
    questions_per_unit = num_questions / means.shape[1]
    residual = interaction_variance(means)
    draw = float(units.var(axis=1, ddof=1).mean()) * questions_per_unit if num_draws > 1 else 0.0
    return (
        max(float(means.mean(axis=1).var(ddof=1)) - residual / means.shape[1], 0.0),
        max(float(means.mean(axis=0).var(ddof=1)) - residual / num_seeds, 0.0) * questions_per_unit,
        max(residual * questions_per_unit - draw / num_draws, 0.0),
        draw,
    )


def detectable(
    variances: PairVariances,
    sizes: tuple[int, int, int],
    num_arms: int,
    alpha: float,
    power: float,
    num_clusters: float | None = None,
) -> float | None:
    """Return the difference that a two-sided test finds with `power`; None with one seed, which shows no arm effect.

    sizes: numbers of seeds, questions and noise draws. num_clusters: the effective number of clusters of the questions,
    which vary together no more than others do; None: each question is its own.
    """
    num_seeds, num_questions, num_draws = sizes
    if num_seeds < 2:
        return None
    evenness = 1.0 if num_clusters is None else min(num_clusters / num_questions, 1.0)
    parts = as_estimated(variances.parts(num_draws, num_arms, evenness), num_seeds, num_questions)
    spread = expected_spread(parts, num_seeds, num_questions, alpha / 2, power)
    return 0.0 if spread is None else spread.minimum_detectable(alpha / 2, power)


def cheapest(
    finds: Callable[[int, int, int], bool], hours: Callable[[int, int, int], float], most_questions: int, noisy: bool
) -> Split | None:
    """Return the cheapest split of those tried that finds a difference; None if none does.

    finds and hours: of seeds, questions and noise draws. noisy: whether noise draws make a difference.
    """
    questions = sorted({number for number in QUESTIONS_TRIED if number < most_questions} | {most_questions})
    tried = product(SEEDS_TRIED, questions, DRAWS_TRIED if noisy else (1,))
    for cost, sizes in sorted((hours(*sizes), sizes) for sizes in tried):
        if finds(*sizes):
            return Split(*sizes, device_hours=cost)
    return None
