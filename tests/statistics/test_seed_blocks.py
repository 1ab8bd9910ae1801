import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics import seed_blocks
from aqnpipe.statistics.seed_blocks import (
    GUARD_LEVEL,
    PRIOR_FREEDOM,
    PRIOR_FREEDOM_OF_TWO,
    SeedBlocks,
    distinct_runs,
    moderated,
    prior_freedom,
)
from aqnpipe.statistics.spread import Spread, VariancePart

NAN = float("nan")


def table(arms=4, seeds=3, seed=0):
    return np.random.default_rng(seed).normal(0.5, 0.01, (arms, seeds))


def test_moderated_variance_by_hand():
    """Own 3 with 2 degrees of freedom, pool 2 with 4: prior 1/(1/4 + 1/4) = 2; (2*3 + 2*2)/4 = 2.5 with 4."""
    assert PRIOR_FREEDOM == 4
    found = moderated(VariancePart(3.0, 2.0), VariancePart(2.0, 4.0))
    assert (found.variance, found.degrees_of_freedom) == (pytest.approx(2.5), pytest.approx(4))


def test_a_pair_that_scatters_significantly_more_keeps_its_own_variance():
    critical = stats.f.isf(GUARD_LEVEL, 4, 8)
    pool = VariancePart(1.0, 8.0)
    beyond, within = (VariancePart(critical * factor, 4.0) for factor in (1.01, 0.99))
    assert moderated(beyond, pool) == beyond
    assert moderated(within, pool).degrees_of_freedom == pytest.approx(4 + prior_freedom(4, 8))


def test_two_seeds_have_the_larger_variance():
    pool = VariancePart(1.0, 2.0)
    freedom = 1 + 1 / (1 / PRIOR_FREEDOM_OF_TWO + 1 / 2)
    for own, larger in ((1000.0, 1000.0), (0.1, 1.0)):
        found = moderated(VariancePart(own, 1.0), pool)
        assert (found.variance, found.degrees_of_freedom) == (larger, pytest.approx(freedom))


def test_what_seeds_do_to_all_arms_cancels_in_a_pair():
    means = table()
    shifted = means + np.array([0.1, -0.2, 0.05])
    assert SeedBlocks(shifted).of_pair(0, 1).variance == pytest.approx(SeedBlocks(means).of_pair(0, 1).variance)
    assert SeedBlocks(shifted).of_arm(0).variance > 10 * SeedBlocks(means).of_arm(0).variance


def test_variance_of_a_pair_by_hand():
    """Differences 1 and 3: variance 2 with 1 degree of freedom. The third arm against the mean of the pair: 0 and 2.

    Interaction sum of squares: pair 2/2 = 1, the rest 2/3 * (2 - 0)^2 / 2 = 4/3, so the pool, which is larger, is
    2 * 4/3.
    """
    found = SeedBlocks(np.array([[1.0, 3.0], [0.0, 0.0], [0.5, -0.5]])).of_pair(0, 1)
    assert found.shared is None
    assert found.own.variance == pytest.approx(2 * 4 / 3)


def test_two_arms_have_no_others():
    means = table(arms=2, seeds=4)
    found = SeedBlocks(means).of_pair(0, 1)
    assert found.own == VariancePart(pytest.approx((means[0] - means[1]).var(ddof=1)), 3.0)


def test_one_seed_has_no_variance():
    assert SeedBlocks(np.array([[0.1], [0.2]])).of_pair(0, 1) is None
    assert SeedBlocks(np.array([[0.1, NAN], [0.2, 0.3]])).of_pair(0, 1) is None
    assert SeedBlocks(np.array([[0.1, NAN], [0.2, 0.3]])).of_arm(0) is None


def test_missing_runs_of_other_arms_take_off_their_degrees_of_freedom_only():
    """Four arms and three seeds: interaction 6, pair 2, others 4; one run less: 3."""
    means = table()
    means[3, 2] = NAN
    found = SeedBlocks(means).of_pair(0, 1)
    assert found.own.degrees_of_freedom == pytest.approx(2 + prior_freedom(2, 3))


def test_a_missing_run_of_the_pair_leaves_the_common_seeds():
    means = table()
    means[0, 0] = NAN
    whole = SeedBlocks(means[:2, 1:]).of_pair(0, 1)
    assert whole.own.variance == pytest.approx((means[0, 1:] - means[1, 1:]).var(ddof=1))
    assert SeedBlocks(means).of_pair(0, 1).own.degrees_of_freedom == pytest.approx(1 + prior_freedom(1, 4))


def test_one_arm_alone_has_the_variance_of_its_seeds():
    means = table(arms=1)
    found = SeedBlocks(means).of_arm(0)
    assert found.variance == pytest.approx(means[0].var(ddof=1))
    assert found.num_arms == 1


def test_runs_with_the_same_weights_are_one_run():
    means = table(arms=3, seeds=2)
    kept = distinct_runs(means, [["a", "b"], ["c", None], ["a", "d"]])
    assert np.isnan(kept).tolist() == [[False, False], [False, False], [True, False]]


def test_equal_arms_have_no_variance():
    found = SeedBlocks(np.full((4, 3), 0.5)).of_pair(0, 1)
    assert found.variance == pytest.approx(0, abs=1e-25)


@pytest.mark.parametrize("shape", [(40, 5), (6, 30), (2, 2)])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.8])
def test_the_interaction_is_that_of_a_least_squares_problem_with_all_effects(shape, missing):
    means = table(*shape)
    means[np.random.default_rng(1).random(shape) < missing] = NAN
    arms, seeds = np.nonzero(np.isfinite(means))
    design = np.hstack([arms[:, None] == np.arange(shape[0]), seeds[:, None] == np.arange(shape[1])]).astype(float)
    values = means[arms, seeds]
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    squares = np.sum((values - design @ solution) ** 2)
    assert seed_blocks._interaction(means) == (pytest.approx(squares, rel=1e-9, abs=1e-15), len(values) - rank)


def test_the_interaction_of_parts_without_a_common_seed():
    """Two tables of 2 x 2 beside each other: each has 1 degree of freedom and (1 - 2 - 3 + 6)**2 / 4 = 1 of squares."""
    block = np.array([[1.0, 2.0], [3.0, 6.0]])
    means = np.full((4, 4), NAN)
    means[:2, :2] = means[2:, 2:] = block
    assert seed_blocks._interaction(means) == (pytest.approx(2.0), 2.0)


def test_the_variance_of_many_runs_needs_no_design_of_all_of_them():
    """2,000 arms x 5 seeds: a design of 10,000 x 2,005 would take a minute for every comparison."""
    means = table(2000, 5)
    found = SeedBlocks(means).of_pair(0, 1)
    centred = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
    pool = (2 * (centred**2).sum() - (means[0] - means[1]).var(ddof=1) * 4) / (1999 * 4 - 4)
    assert found.num_arms == 2000
    assert found.own.variance == pytest.approx(
        moderated(VariancePart((means[0] - means[1]).var(ddof=1), 4.0), VariancePart(pool, 1999 * 4 - 4)).variance
    )


@pytest.mark.parametrize("arms", [4, 12])
def test_two_seeds_of_an_arm_that_scatters_three_times_as_much(arms):
    """Means of runs whose answers add little, the worst case: before the larger variance was used, 8 and 12 %."""
    draws, studies = np.random.default_rng(arms), 3000
    scatter = np.ones((arms, 1))
    scatter[0] = 3.0
    rejected = 0
    for means in 0.03 * scatter * draws.standard_normal((studies, arms, 2)):
        variance = SeedBlocks(means).of_pair(0, 1)
        assert variance.source == "larger"
        spread = Spread((variance.own.times(1 / 2),))
        rejected += 2 * spread.upper_tail(abs((means[0] - means[1]).mean())) < 0.05
    assert rejected <= stats.binom.ppf(0.999, studies, 0.05)
