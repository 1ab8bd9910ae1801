import math

import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.continuous import Summary, implied_correlation, paired_p, paired_p_range, paired_t, welch_t


def summary(values, ddof=1):
    return Summary(float(values.mean()), float(values.std(ddof=ddof)), len(values), ddof)


@pytest.fixture
def losses():
    draws = np.random.default_rng(2)
    shared = draws.normal(0, 1, 6)
    return 3 + shared + draws.normal(0, 0.3, 6), 3.2 + shared + draws.normal(0, 0.3, 6)


def test_paired_t_is_scipys(losses):
    found, reference = paired_t(*losses, alpha=0.05), stats.ttest_rel(*losses)
    assert found.p_value == pytest.approx(reference.pvalue)
    assert found.degrees_of_freedom == 5
    assert (found.ci_low, found.ci_high) == pytest.approx(tuple(reference.confidence_interval(0.95)))
    assert found.standard_error == pytest.approx(found.difference / reference.statistic)


@pytest.mark.parametrize("ddof", [0, 1])
def test_welch_t_is_scipys_whatever_the_ddof_of_the_figures(losses, ddof):
    found = welch_t(summary(losses[0], ddof), summary(losses[1], ddof), alpha=0.1)
    reference = stats.ttest_ind(*losses, equal_var=False)
    assert found.p_value == pytest.approx(reference.pvalue)
    assert found.degrees_of_freedom == pytest.approx(reference.df)
    assert (found.ci_low, found.ci_high) == pytest.approx(tuple(reference.confidence_interval(0.9)))


def test_welch_with_one_side_that_does_not_vary_is_the_one_sample_test(losses):
    found = welch_t(summary(losses[0]), Summary(2.0, 0.0, 6), alpha=0.05)
    assert found.p_value == pytest.approx(stats.ttest_1samp(losses[0], 2.0).pvalue)
    with pytest.raises(ValueError, match="neither side varies"):
        welch_t(Summary(1.0, 0.0, 5), Summary(2.0, 0.0, 5), alpha=0.05)


def test_paired_p_at_the_true_correlation_is_that_of_the_data(losses):
    correlation = float(np.corrcoef(*losses)[0, 1])
    p_value = float(stats.ttest_rel(*losses).pvalue)
    assert paired_p(summary(losses[0]), summary(losses[1]), correlation) == pytest.approx(p_value)
    assert implied_correlation(summary(losses[0]), summary(losses[1]), p_value) == pytest.approx(correlation)
    low, high = paired_p_range(summary(losses[0]), summary(losses[1]))
    assert low <= p_value <= high


def test_impossible_p_values_have_no_correlation():
    assert implied_correlation(Summary(1.0, 0.1, 5), Summary(2.0, 0.1, 5), 0.9) is None
    assert implied_correlation(Summary(1.0, 0.0, 5), Summary(2.0, 0.1, 5), 0.01) is None


def test_ddof_by_hand():
    """1 and 3: deviation 1 with ddof 0, sqrt(2) with ddof 1."""
    assert Summary(2.0, 1.0, 2, ddof=0).sample_std == pytest.approx(math.sqrt(2))
