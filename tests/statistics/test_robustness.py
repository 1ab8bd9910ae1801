import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from scipy import stats

from aqnpipe.statistics.robustness import (
    joint_test,
    mean_slopes,
    robustness_row,
    slope_per_question,
)
from aqnpipe.statistics.seed_blocks import SeedBlocks

LEVELS = (0.0, 0.05, 0.1)


def outcomes(accuracies, seeds=1, noise_seeds=1, questions=300, seed=0):
    draws = np.random.default_rng(seed)
    hard = draws.normal(0, 0.2, questions)
    return [
        (draws.random((seeds, noise_seeds if level else 1, questions)) < accuracy + hard).astype(float)
        for level, accuracy in enumerate(accuracies)
    ]


def test_slope_by_hand():
    """Levels 0, 0.05, 0.1; a question that goes 1, 1, 0 loses 1 per 0.1; one that goes 0, 1, 1 gains 1."""
    means = np.array([[[1.0, 0.0, 0.5]], [[1.0, 1.0, 0.5]], [[0.0, 1.0, 0.5]]])
    assert slope_per_question(LEVELS, means)[0] == pytest.approx([-1.0, 1.0, 0.0])


def test_joint_test_is_the_wald_test_of_a_gee_clustered_by_question():
    """T2/n against statsmodels: its robust covariance divides by n instead of n - 1."""
    table = np.stack([scores[0, 0] for scores in outcomes((0.7, 0.65, 0.55))])
    num_levels, num_questions = table.shape
    frame = pd.DataFrame(
        {
            "right": table.ravel(),
            "level": np.repeat(np.arange(num_levels), num_questions),
            "question": np.tile(np.arange(num_questions), num_levels),
        }
    )
    gee = sm.GEE.from_formula("right ~ C(level)", "question", frame, cov_struct=sm.cov_struct.Independence()).fit()
    wald = gee.wald_test(np.eye(num_levels)[1:], scalar=True)
    found = joint_test(table)
    squared = found["joint_f"] * found["joint_df1"] * (num_questions - 1) / found["joint_df2"]
    assert squared * num_questions / (num_questions - 1) == pytest.approx(float(wald.statistic), rel=1e-6)
    assert found["joint_df1"] == 2


def test_joint_test_of_two_levels_is_the_paired_t_test():
    first, second = (scores[0, 0] for scores in outcomes((0.7, 0.6)))
    found, reference = joint_test(np.stack([first, second])), stats.ttest_rel(second, first)
    assert found["joint_f"] == pytest.approx(reference.statistic**2)
    assert found["joint_p"] == pytest.approx(reference.pvalue)


def test_levels_that_repeat_each_other_carry_no_information():
    first, second = (scores[0, 0] for scores in outcomes((0.7, 0.6)))
    assert joint_test(np.stack([first, second, second]))["joint_p"] == pytest.approx(
        joint_test(np.stack([first, second]))["joint_p"]
    )
    assert joint_test(np.stack([first, first]))["joint_p"] is None


def test_row_of_one_run_and_of_several():
    single = robustness_row(LEVELS, outcomes((0.75, 0.7, 0.5)), None, 0.05)
    assert single["slope"] == pytest.approx(single["accuracy_highest_level"] - single["accuracy_lowest_level"])
    assert single["slope_ci_low"] < single["slope"] < single["slope_ci_high"] < 0
    assert single["joint_p"] < 0.001
    arms = [outcomes((0.75, 0.7, 0.5), seeds=3, noise_seeds=2, seed=seed) for seed in (1, 2)]
    seed_variance = SeedBlocks(np.stack([mean_slopes(LEVELS, arm) for arm in arms])).of_arm(0)
    several = robustness_row(LEVELS, arms[0], seed_variance, 0.05)
    assert several["num_seeds"] == 3
    assert several["slope_p"] < 0.05


def test_answers_that_never_change_have_no_slope_error():
    constant = [np.ones((1, 1, 50))] * 3
    row = robustness_row(LEVELS, constant, None, 0.05)
    assert row["slope"] == pytest.approx(0.0)
    assert (row["slope_p"], row["slope_ci_low"], row["joint_p"]) == (None, None, None)
