import math

import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.planning import PairVariances, detectable
from aqnpipe.statistics.sample_sizes import (
    MAX_SEEDS_SEARCHED,
    VarianceParts,
    expected_spread,
    questions_needed,
    seeds_needed,
    variance_parts,
)
from aqnpipe.statistics.seed_blocks import SeedBlocks

VARIANCES = PairVariances(seed=2 * 0.02**2, question=0.01, answer=0.12)


@pytest.mark.parametrize("clusters", [None, Clusters.of([0] * 20 + [1] * 10 + [2] * 10 + [3, 4, 5, 6] * 5)])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_eighty_percent_power_is_eighty_percent(seeds, clusters):
    """Four arms of normal scores; the first is better by what a test is said to detect, and a median study prints.

    Questions in few clusters of unlike size do not vary together here, but the test must allow for it: of an effective
    number of five clusters the prognosis of its variance is less exact, and a median study prints up to 15 % more.
    """
    draws, questions, studies = np.random.default_rng(seeds), 60, 1000
    number = None if clusters is None else clusters.effective_number
    limit = detectable(VARIANCES, (seeds, questions, 1), 4, 0.05, 0.8, number)
    rejected, printed = 0, []
    for _ in range(studies):
        scores = draws.normal(0, math.sqrt(VARIANCES.seed / 2), (4, seeds, 1))
        scores = scores + draws.normal(0, math.sqrt(VARIANCES.question / 2), (4, 1, questions))
        scores = scores + draws.normal(0, math.sqrt(VARIANCES.answer / 2), (4, seeds, questions))
        scores[0] += limit
        differences, variance = scores[0] - scores[1], SeedBlocks(scores.mean(axis=2)).of_pair(0, 1)
        rejected += estimate_difference(scores[0], scores[1], variance, clusters).two_sided_p() < 0.05
        units = differences if clusters is None else clusters.collapsed(differences)
        parts = variance_parts(units, variance, 1.0 if clusters is None else clusters.evenness)
        expected = expected_spread(parts, seeds, units.shape[1], 0.025, 0.8)
        printed.append(expected.minimum_detectable(0.025, 0.8))
    lowest, off = (0.79, 0.06) if clusters is None else (0.77, 0.15)
    assert stats.binom.ppf(0.001, studies, lowest) <= rejected <= stats.binom.ppf(0.999, studies, 0.81)
    assert np.median(printed) == pytest.approx(limit, rel=off)


def test_variance_parts_find_what_was_put_in():
    """Means of 300 simulated studies lie within five standard errors of the true components.

    The seeds' part is taken so that its median is right: the mean square divided by the median of chi2(5) / 5.
    """
    draws = np.random.default_rng(5)
    true = np.array([0.2**2, 0.5**2, 0.7**2])
    found = []
    for _ in range(300):
        scale = np.sqrt(true)
        data = draws.normal(0, scale[0], (6, 1)) + draws.normal(0, scale[1], (1, 60))
        parts = variance_parts(data + draws.normal(0, scale[2], (6, 60)))
        seed = (parts.seed + parts.residual / 60) * stats.chi2.median(5) / 5 - parts.residual / 60
        found.append([seed, parts.question, parts.residual])
    errors = np.std(found, axis=0) / math.sqrt(300)
    assert np.all(np.abs(np.mean(found, axis=0) - true) < 5 * errors)


def test_more_seeds_are_needed_for_smaller_differences():
    parts = VarianceParts(seed=0.02**2, question=0.01, residual=0.2, num_arms=3)
    needed = [seeds_needed(parts, 1319, distance, 0.025, 0.8) for distance in (0.1, 0.05, 0.02)]
    assert None not in needed
    assert 2 <= needed[0] < needed[1] < needed[2] <= MAX_SEEDS_SEARCHED
    for number, distance in zip(needed, (0.1, 0.05, 0.02), strict=True):
        assert expected_spread(parts, number, 1319, 0.025, 0.8).minimum_detectable(0.025, 0.8) <= distance
        assert (
            expected_spread(parts, max(number - 1, 2), 1319, 0.025, 0.8).minimum_detectable(0.025, 0.8) > distance
            or number == 2
        )


def test_questions_can_be_the_limit():
    parts = VarianceParts(seed=0.0, question=0.2, residual=0.1)
    assert seeds_needed(parts, 200, 0.01, 0.025, 0.8) is None
    number = questions_needed(parts, 3, 0.01, 0.025, 0.8)
    assert expected_spread(parts, 3, number, 0.025, 0.8).minimum_detectable(0.025, 0.8) <= 0.01
    assert seeds_needed(parts, number, 0.01, 0.025, 0.8) <= 3


def test_nothing_is_needed_for_no_difference():
    parts = VarianceParts(seed=0.0, question=0.2, residual=0.1)
    assert seeds_needed(parts, 200, 0.0, 0.025, 0.8) is None
    assert questions_needed(parts, 1, -0.1, 0.025, 0.8) is None


def test_questions_of_one_run_by_the_formula():
    """Variance 0.1, 2 points, 80 % power: (1.96 + 0.84)^2 * 0.1/0.02^2 = 1,962; t needs a few more."""
    parts = variance_parts(np.array([[0.0] * 90 + [1.0] * 10]))
    assert parts.question == pytest.approx(0.0909, abs=1e-4)
    needed = questions_needed(VarianceParts(0.0, 0.1, 0.0), 1, 0.02, 0.025, 0.8)
    assert math.ceil((stats.norm.ppf(0.975) + stats.norm.ppf(0.8)) ** 2 * 0.1 / 0.02**2) <= needed <= 1970
