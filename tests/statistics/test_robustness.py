import numpy as np
import pytest

from aqnpipe.statistics.robustness import (
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


def test_row_of_one_run_and_of_several():
    single = robustness_row(LEVELS, outcomes((0.75, 0.7, 0.5)), None, 0.05)
    assert single["slope"] == pytest.approx(single["accuracy_highest_level"] - single["accuracy_lowest_level"])
    assert single["slope_ci_low"] < single["slope"] < single["slope_ci_high"] < 0
    arms = [outcomes((0.75, 0.7, 0.5), seeds=3, noise_seeds=2, seed=seed) for seed in (1, 2)]
    seed_variance = SeedBlocks(np.stack([mean_slopes(LEVELS, arm) for arm in arms])).of_arm(0)
    several = robustness_row(LEVELS, arms[0], seed_variance, 0.05)
    assert several["num_seeds"] == 3
    assert several["slope_p"] < 0.05


def test_answers_that_never_change_have_no_slope_error():
    constant = [np.ones((1, 1, 50))] * 3
    row = robustness_row(LEVELS, constant, None, 0.05)
    assert row["slope"] == pytest.approx(0.0)
    assert (row["slope_p"], row["slope_ci_low"]) == (None, None)
