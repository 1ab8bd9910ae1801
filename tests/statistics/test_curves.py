import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.curves import compare_curves, robustness_row, slope_per_question
from aqnpipe.statistics.seed_blocks import SeedBlocks

ALPHA = 0.05


def runs_of_one_machine(generator, runs, steps, correlation):
    """Curves with a common course; each run scatters around it, the more the longer it ran."""
    noise = generator.standard_normal((runs, steps))
    for step in range(1, steps):
        noise[:, step] = correlation * noise[:, step - 1] + np.sqrt(1 - correlation**2) * noise[:, step]
    return np.linspace(2, 1, steps) + noise * np.linspace(0.01, 0.2, steps)


def test_a_pair_of_groups_worked_out_by_hand():
    # At step 1 the groups have means 1 and 3, and variances 2 and 2; at step 2 nothing differs.
    first, second = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[2.0, 1.0], [4.0, 3.0]])
    found = compare_curves(first, second, ALPHA, paired=False)
    assert found.at_step.tolist() == [2.0, 0.0]
    error = np.sqrt(2 * (1 / 2 + 1 / 2))
    assert found.band == pytest.approx(stats.t.ppf(1 - ALPHA / 8, 2) * error)
    # Means of runs: 0.5, 2.5 and 1.5, 3.5, which have variance 2 too.
    assert (found.mean, found.ci_high) == pytest.approx((1.0, 1.0 + stats.t.ppf(1 - ALPHA / 4, 2) * error))
    assert found.p_value == pytest.approx(min(1, 4 * 2 * stats.t.sf(2 / error, 2)))
    assert found.first_beyond is None


def test_equal_seeds_cancel_where_runs_are_paired():
    generator = np.random.default_rng(0)
    first = runs_of_one_machine(generator, 4, 20, 0.9)
    second = first + 0.01 + 0.001 * generator.standard_normal(first.shape)
    assert compare_curves(first, second, ALPHA, paired=True).first_beyond == 0
    assert compare_curves(first, second, ALPHA, paired=False).first_beyond is None


def test_one_run_against_several_has_a_band_and_one_against_one_has_none():
    generator = np.random.default_rng(1)
    several = runs_of_one_machine(generator, 5, 20, 0.5)
    other = several[:1] + np.where(np.arange(20) < 12, 0.0, 5.0)
    assert compare_curves(several[1:], other, ALPHA, paired=False).first_beyond == 12
    assert compare_curves(several[:1], other, ALPHA, paired=False) is None
    assert compare_curves(several[:1], other, ALPHA, paired=True) is None


def test_equal_curves_have_p_one_and_a_constant_offset_is_certain():
    curves = runs_of_one_machine(np.random.default_rng(2), 3, 10, 0.5)
    assert compare_curves(curves, curves, ALPHA, paired=True).p_value == 1
    found = compare_curves(curves, curves + 1.0, ALPHA, paired=True)
    assert (found.first_beyond, found.p_value) == (0, pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize(("runs", "paired"), [((2, 2), False), ((2, 2), True), ((4, 4), False), ((1, 3), False)])
@pytest.mark.parametrize("correlation", [0.0, 0.95])
def test_runs_of_one_machine_are_called_different_in_five_of_a_hundred_comparisons_at_most(runs, paired, correlation):
    generator = np.random.default_rng(3)
    number = 600
    false = 0
    for _ in range(number):
        groups = [runs_of_one_machine(generator, size, 30, correlation) for size in runs]
        false += compare_curves(*groups, ALPHA, paired=paired).p_value < ALPHA
    # A rate of 5 % gives more than this once in 10,000 times.
    assert false <= stats.binom.ppf(1 - 1e-4, number, ALPHA)


def test_a_lasting_difference_of_two_standard_deviations_is_found_by_the_mean():
    generator = np.random.default_rng(4)
    found = 0
    for _ in range(200):
        first, second = (runs_of_one_machine(generator, 5, 30, 0.9) for _ in range(2))
        found += compare_curves(first, second + 0.2, ALPHA, paired=False).p_value < ALPHA
    assert found >= 160


LEVELS = (0.0, 0.05, 0.1)


def mean_outcomes(accuracies, seeds=1, noise_seeds=1, questions=300, seed=0):
    draws = np.random.default_rng(seed)
    hard = draws.normal(0, 0.2, questions)
    found = [
        (draws.random((seeds, noise_seeds if level else 1, questions)) < accuracy + hard).astype(float)
        for level, accuracy in enumerate(accuracies)
    ]
    return np.stack([scores.mean(axis=1) for scores in found])


def test_slope_by_hand():
    """Levels 0, 0.05, 0.1; a question that goes 1, 1, 0 loses 1 per 0.1; one that goes 0, 1, 1 gains 1."""
    means = np.array([[[1.0, 0.0, 0.5]], [[1.0, 1.0, 0.5]], [[0.0, 1.0, 0.5]]])
    assert slope_per_question(LEVELS, means)[0] == pytest.approx([-1.0, 1.0, 0.0])


def test_row_of_one_run_and_of_several():
    single = robustness_row(LEVELS, mean_outcomes((0.75, 0.7, 0.5)), None, 0.05)
    assert single["slope"] == pytest.approx(single["accuracy_highest_level"] - single["accuracy_lowest_level"])
    assert single["slope_ci_low"] < single["slope"] < single["slope_ci_high"] < 0
    arms = [mean_outcomes((0.75, 0.7, 0.5), seeds=3, noise_seeds=2, seed=seed) for seed in (1, 2)]
    seed_variance = SeedBlocks(np.stack([slope_per_question(LEVELS, arm).mean(axis=1) for arm in arms])).of_arm(0)
    several = robustness_row(LEVELS, arms[0], seed_variance, 0.05)
    assert several["num_seeds"] == 3
    assert several["slope_p"] < 0.05


def test_answers_that_never_change_have_no_slope_error():
    constant = np.ones((3, 1, 50))
    row = robustness_row(LEVELS, constant, None, 0.05)
    assert row["slope"] == pytest.approx(0.0)
    assert (row["slope_p"], row["slope_ci_low"]) == (None, None)
