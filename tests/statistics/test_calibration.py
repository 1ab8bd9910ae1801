"""Error rates by simulation at realistic sizes; bounds are quantiles of the binomial number of errors.

The whole grid, which includes the methods that were not chosen, is in benchmarks/statistics_power.md.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.paired import paired_counts, score_interval, score_p, tango_p
from aqnpipe.statistics.seed_blocks import SeedBlocks

STUDIES = 400
SURELY = 0.9999
"""A nominal method makes more errors than this quantile of their number only once in 10,000 runs."""


@pytest.fixture(scope="module")
def simulation():
    path = Path(__file__).parents[2] / "benchmarks" / "statistics_power.py"
    spec = importlib.util.spec_from_file_location("statistics_power", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def estimates(simulation, design, number=STUDIES, seed=11):
    for study in simulation.studies(design, number, seed):
        seed_variance = SeedBlocks(study.means).of_pair(0, 1)
        yield estimate_difference(study.answers[0], study.answers[1], seed_variance)


@pytest.mark.parametrize(
    ("num_seeds", "num_questions", "run_sd", "shared", "num_arms"),
    [
        (2, 200, 0.0, 0.0, 4),
        (2, 1319, 3.0, 0.5, 12),
        (3, 500, 1.0, 0.9, 4),
        (5, 200, 3.0, 0.0, 2),
        (10, 500, 2.0, 0.5, 4),
    ],
)
@pytest.mark.parametrize("effect", [0.0, 0.06])
def test_intervals_hold_the_true_difference(simulation, num_seeds, num_questions, run_sd, shared, num_arms, effect):
    """Without an effect a miss is a false finding (type-I error); with one it is a lack of coverage."""
    design = simulation.Design(num_seeds, num_questions, run_sd, shared, num_arms, effect=effect)
    missed = 0
    for estimate in estimates(simulation, design, 200):
        low, high = estimate.interval(0.95)
        missed += not low <= effect <= high
    assert missed <= stats.binom.ppf(SURELY, 200, 0.05)


@pytest.mark.parametrize(("num_seeds", "shared", "num_arms"), [(2, 0.9, 12), (3, 0.9, 12), (5, 0.0, 4)])
def test_one_arm_against_the_model_before_training(simulation, num_seeds, shared, num_arms):
    """Scatter that seeds share does not cancel and has the degrees of freedom of the seeds with any number of arms."""
    rejected = 0
    for study in simulation.studies(simulation.Design(num_seeds, 1319, 3.0, shared, num_arms), STUDIES, 13):
        spread = simulation.spread_of_arm(study)
        rejected += 2 * spread.upper_tail(abs(float((study.answers[0] - study.given).mean()))) < 0.05
    assert rejected <= stats.binom.ppf(SURELY, STUDIES, 0.05)


@pytest.mark.parametrize(("num_seeds", "num_arms"), [(3, 4), (5, 12)])
def test_an_arm_that_scatters_three_times_as_much(simulation, num_seeds, num_arms):
    """At most 8 % in these designs, where pooling all arms rejects 14 and 22 % (benchmarks/statistics_power.csv)."""
    design = simulation.Design(num_seeds, 1319, 3.0, 0.0, num_arms, scatter=3.0)
    found = simulation.rates(design, STUDIES, 17)
    assert found["pair 0.05"] * STUDIES <= stats.binom.ppf(SURELY, STUDIES, 0.08)
    assert found["pair, all arms pooled 0.05"] * STUDIES > stats.binom.ppf(0.05, STUDIES, 0.11)


def test_shared_scatter_does_not_hide_an_effect(simulation):
    """5.8 points, 4 arms, 90 % of a run SD of 3 points shared: with variances within arms, 81 % were found."""
    design = simulation.Design(5, 500, 3.0, 0.9, effect=0.058, taste=0.0)
    found = sum(estimate.two_sided_p() < 0.05 for estimate in estimates(simulation, design, 100))
    assert found >= 90


@pytest.mark.parametrize(("num_seeds", "num_questions"), [(3, 500), (1, 1319)])
def test_margins_are_kept_at_their_edge(simulation, num_seeds, num_questions):
    """A true difference of exactly -margin is the hardest case of both tests: at most 5 % may come out supported."""
    design = simulation.Design(num_seeds, num_questions, 1.0 if num_seeds > 1 else 0.0, num_arms=2, effect=-0.03)
    inferior, equivalent = 0, 0
    for estimate in estimates(simulation, design):
        inferior += estimate.upper_p(-0.03) < 0.05
        equivalent += max(estimate.upper_p(-0.03), estimate.lower_p(0.03)) < 0.05
    assert inferior <= stats.binom.ppf(SURELY, STUDIES, 0.05)
    assert equivalent <= inferior


def one_run(number, questions, agreement, seed=7):
    """Paired answers of two checkpoints of equal accuracy 0.75 that agree on a share of the questions for sure."""
    draws = np.random.default_rng(seed)
    for _ in range(number):
        same = draws.random(questions) < agreement
        first, second = draws.random((2, questions)) < 0.75
        yield first, np.where(same, first, second)


@pytest.mark.parametrize(("questions", "agreement"), [(200, 0.0), (200, 0.9), (1319, 0.7)])
def test_tests_of_one_checkpoint_each(questions, agreement):
    """Tango's interval and test and McNemar's test are score tests, whose error is at most 5.3 % at 5 %."""
    missed = rejected = beyond = 0
    for first, second in one_run(1000, questions, agreement):
        counts = paired_counts(first, second)
        low, high = score_interval(counts, 0.05)
        missed += not low <= 0 <= high
        rejected += score_p(counts) < 0.05
        beyond += tango_p(counts, 0.0) < 0.05
    assert max(missed, rejected, beyond) <= stats.binom.ppf(SURELY, 1000, 0.05)


def test_ignoring_the_variance_of_training_rejects_far_too_often(simulation):
    """One run per arm, run SD of 3 points: McNemar on two checkpoints rejects far too often as a test of arms."""
    design = simulation.Design(1, 1319, 3.0, num_arms=2)
    rejected = sum(estimate.two_sided_p() < 0.05 for estimate in estimates(simulation, design, 200))
    assert rejected > stats.binom.ppf(SURELY, 200, 0.05)
