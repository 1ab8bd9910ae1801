"""The test of decision 8 written again from its text, without code of the package, agrees with the package."""

import itertools

import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.seed_blocks import SeedBlocks


def tail(x, parts):
    """Mean of Phi(-x / sqrt(sum v_i u_i)) over u_i = df_i / chi2(df_i), below the largest ratio of each part."""
    variances, weights = np.zeros(1), np.ones(1)
    grid = (np.arange(size := 2000 if len(parts) < 3 else 250) + 0.5) / size
    for variance, freedom, largest in parts:
        lowest = stats.chi2.cdf(freedom / largest, freedom) if largest < np.inf else 0.0
        # Points are dense where chi2 is small; each has the weight of its width.
        roots = lowest**0.25 + (1 - lowest**0.25) * grid
        variances = np.add.outer(variances, variance * freedom / stats.chi2.ppf(roots**4, freedom)).ravel()
        weights = np.multiply.outer(weights, roots**3 / np.sum(roots**3)).ravel()
    return float(weights @ stats.norm.sf(x / np.sqrt(variances)))


def moderated(own, pool, freedom, pool_freedom):
    if pool_freedom < 1:
        return own, freedom
    prior = 1 / (1 / (1.75 if freedom == 1 else 4) + 1 / pool_freedom)
    if freedom == 1:
        return max(own, pool), 1 + prior
    if own / pool > stats.f.isf(0.25, freedom, pool_freedom):
        return own, freedom
    return (freedom * own + prior * pool) / (freedom + prior), freedom + prior


def residual(table):
    """Sum of squares and degrees of freedom of additive effects of arms and seeds, by least squares."""
    cells = [(arm, seed) for arm, seed in itertools.product(*map(range, table.shape)) if np.isfinite(table[arm, seed])]
    design = np.zeros((len(cells), sum(table.shape)))
    for row, (arm, seed) in enumerate(cells):
        design[row, arm] = design[row, table.shape[0] + seed] = 1
    values = np.array([table[cell] for cell in cells])
    left = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return float(left @ left), len(cells) - np.linalg.matrix_rank(design)


def interaction(d):
    centred = d - d.mean(axis=1, keepdims=True) - d.mean(axis=0) + d.mean()
    return float(np.sum(centred**2)) / ((d.shape[0] - 1) * (d.shape[1] - 1))


def questions_part(d, freedom):
    return max(0.0, d.mean(axis=0).var(ddof=1) / d.shape[1] - interaction(d) / d.size), freedom, np.inf


def of_pair(d, table):
    k, n = d.shape
    own = d.mean(axis=1).var(ddof=1)
    squares, freedom = residual(table)
    rest = freedom - (k - 1)
    pool = 2 * (squares - own * (k - 1) / 2) / rest if rest >= 1 else 0.0
    variance, freedom = moderated(own, pool, k - 1, rest)
    if freedom == k - 1:  # used alone
        variance = max(variance, interaction(d) / n)
    return [(variance / k, freedom, np.inf), questions_part(d, n - 1)]


def of_arm(d, table):
    k, n = d.shape
    arms, means, own = len(table), table.mean(axis=0), table[0]
    alone = [(max(own.var(ddof=1), interaction(d) / n), k - 1)]
    if arms == 1:
        return [*held(alone, k), questions_part(d, n - 1)]
    share = 1 - 1 / arms
    apart = (own - means).var(ddof=1) / share
    squares = np.sum((table - means - table.mean(axis=1, keepdims=True) + means.mean()) ** 2)
    rest = (arms - 2) * (k - 1)
    pool = (squares - apart * (k - 1)) / rest
    if k > 2 and apart / pool > stats.f.isf(0.25, k - 1, rest):
        parts = alone
    else:
        shared = means.var(ddof=1) + max(0.0, own.var(ddof=1) - means.var(ddof=1) - share * apart)
        variance, freedom = moderated(apart, pool, k - 1, rest)
        parts = [(shared, k - 1), (share * variance, freedom)]
    return [*held(parts, k), questions_part(d, n - 1)]


def held(parts, k):
    """The parts of the mean over k seeds; the first is held below a standard deviation of 15 points."""
    largest = [0.15**2 / parts[0][0], *([np.inf] * (len(parts) - 1))]
    return [(v / k, df, ratio if ratio > 4 else np.inf) for (v, df), ratio in zip(parts, largest, strict=True)]


def outcomes(seeds, arms, draws, questions=120, scatter=0.03):
    """Correctness [arm, seed, question] whose arms and seeds vary; the first arm is better."""
    chance = 0.55 + 0.1 * (np.arange(arms) == 0)[:, None] + draws.normal(0, scatter, (arms, seeds))
    chance = chance + draws.normal(0, scatter, seeds)
    hard = draws.normal(0, 0.15, questions)
    return (draws.random((arms, seeds, questions)) < chance[:, :, None] + hard).astype(float)


DRAWS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))]


@pytest.mark.parametrize(("seeds", "arms"), [(2, 4), (3, 3), (3, 5), (5, 4), (4, 2)])
@pytest.mark.parametrize("number", DRAWS)
def test_a_difference_of_two_arms(seeds, arms, number):
    made = outcomes(seeds, arms, np.random.default_rng(number))
    table = made.mean(axis=2)
    if arms > 3:
        table[3, 1] = np.nan  # a missing run of another arm
    found = estimate_difference(made[0], made[1], SeedBlocks(table).of_pair(0, 1))
    again = 2 * tail(abs((made[0] - made[1]).mean()), of_pair(made[0] - made[1], table))
    assert found.two_sided_p() == pytest.approx(again, rel=0.01)
    low, _ = found.interval(0.95)
    assert tail(found.difference - low, of_pair(made[0] - made[1], table)) == pytest.approx(0.025, rel=0.01)


@pytest.mark.parametrize(("seeds", "arms"), [(2, 1), (2, 4), (3, 3), (5, 4)])
@pytest.mark.parametrize("number", DRAWS)
def test_an_arm_against_a_constant(seeds, arms, number):
    made = outcomes(seeds, arms, np.random.default_rng(10 + number))
    before = (np.random.default_rng(99).random((1, made.shape[2])) < 0.5).astype(float)
    table = made.mean(axis=2)
    found = estimate_difference(made[0], before, SeedBlocks(table).of_arm(0))
    again = 2 * tail(abs((made[0] - before).mean()), of_arm(made[0] - before, table))
    assert found.two_sided_p() == pytest.approx(again, rel=0.01)


def test_questions_in_clusters():
    names = np.repeat(np.arange(12), np.arange(2, 14))
    made = outcomes(3, 4, np.random.default_rng(5), len(names))
    table, d = made.mean(axis=2), made[0] - made[1]
    shares = np.bincount(names) / len(names)
    squared = np.sum(shares**2)
    factor = np.sqrt(squared * 12 * 11 / np.sum(shares**2 * (1 - 2 * shares + squared)))
    deviations = d - d.mean(axis=1, keepdims=True)
    sums = np.stack([deviations[:, names == name].sum(axis=1) for name in range(12)], axis=1) / len(names)
    collapsed = d.mean(axis=1, keepdims=True) + factor * sums
    parts = [of_pair(collapsed, table)[0], questions_part(collapsed, 1 / squared - 1)]
    found = estimate_difference(
        made[0], made[1], SeedBlocks(table).of_pair(0, 1), Clusters.of([str(name) for name in names])
    )
    assert found.two_sided_p() == pytest.approx(2 * tail(abs(d.mean()), parts), rel=0.01)
