import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.resampling import Resampler, sign_flip_p


def matrix(seeds=4, questions=300, seed=0):
    return np.random.default_rng(seed).normal(0.1, 1.0, (seeds, questions))


def test_interval_per_seed_is_that_of_the_mean():
    """300 independent numbers: the percentile interval is about mean +- 1.96 standard errors."""
    differences = matrix()
    for row, (low, high) in zip(differences, Resampler(0, 4000).interval_per_seed(differences, 0.95), strict=True):
        half = 1.96 * row.std() / np.sqrt(len(row))
        assert (low, high) == (
            pytest.approx(row.mean() - half, abs=0.1 * half),
            pytest.approx(row.mean() + half, abs=0.1 * half),
        )


def test_seeds_and_questions_both_scatter():
    """Where all the variance is that of seeds, resampling questions alone would see none of it."""
    differences = np.repeat([[-0.1], [0.0], [0.1], [0.2]], 50, axis=1)
    low, high = Resampler(0, 4000).interval(differences, 0.95)
    assert low < 0 < high
    low, high = Resampler(0, 4000).interval(np.repeat(np.linspace(-1, 1, 50)[None], 4, axis=0), 0.95)
    expected = 1.96 * np.linspace(-1, 1, 50).std() / np.sqrt(50)
    assert high == pytest.approx(expected, rel=0.1)


def test_equal_sizes_share_their_draws():
    differences, resampler = matrix(), Resampler(1, 300)
    assert resampler.interval(differences, 0.9) == resampler.interval(differences, 0.9)
    assert resampler.interval(differences, 0.9) == Resampler(1, 300).interval(differences, 0.9)
    assert resampler.interval(differences, 0.9) != Resampler(2, 300).interval(differences, 0.9)


@pytest.mark.parametrize("means", [[0.1, 0.2], [0.1, -0.2, 0.3, 0.05, 0.2], [0.01] * 6])
def test_sign_flips_are_scipys_permutation_test(means):
    values = np.array(means)
    reference = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(values, 0) == pytest.approx(reference.pvalue)


def test_few_seeds_cannot_be_significant():
    assert sign_flip_p(np.array([0.3, 0.31]), 0) == 0.5
    assert sign_flip_p(np.full(5, 0.3), 0) == 0.0625


def test_many_seeds_are_drawn():
    """16 seeds: the drawn p lies within five standard errors of the t-test's, which is near for normal numbers."""
    values = np.random.default_rng(4).normal(0.4, 1.0, 16)
    p_value = sign_flip_p(values, 0)
    assert p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.03)
    assert p_value == sign_flip_p(values, 0)
