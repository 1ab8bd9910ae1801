import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from aqnpipe.statistics.paired import (
    PairedCounts,
    mcnemar_exact_p,
    minimum_detectable_difference,
    newcombe_interval,
    paired_counts,
)

cells = st.integers(min_value=0, max_value=300)


@st.composite
def counts(draw):
    table = PairedCounts(draw(cells), draw(cells), draw(cells), draw(cells))
    return table if table.num_questions else PairedCounts(1, 0, 0, 0)


def swapped(table):
    return PairedCounts(table.both_correct, table.only_control, table.only_treatment, table.neither)


def test_counts_by_hand():
    treatment = np.array([True, True, True, False, False])
    control = np.array([True, False, False, True, False])
    table = paired_counts(treatment, control)
    assert table == PairedCounts(both_correct=1, only_treatment=2, only_control=1, neither=1)
    assert table.difference == pytest.approx(0.2)


def test_unequal_or_empty_vectors_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        paired_counts(np.array([True]), np.array([True, False]))
    with pytest.raises(ValueError, match="non-empty"):
        paired_counts(np.array([], dtype=bool), np.array([], dtype=bool))


def test_newcombe_reproduces_the_published_example():
    """An example of Newcombe (1998), method 10: 36, 12, 2, 0 gives 0.0569 to 0.3404."""
    low, high = newcombe_interval(PairedCounts(36, 12, 2, 0), alpha=0.05)
    assert (round(low, 4), round(high, 4)) == (0.0569, 0.3404)


def test_newcombe_without_any_disagreement_has_the_width_of_wilson():
    """All questions wrong on both sides: phi is 0, so each half is the Wilson half of 0/30."""
    low, high = newcombe_interval(PairedCounts(0, 0, 0, 30), alpha=0.05)
    wilson = proportion_confint(0, 30, alpha=0.05, method="wilson")[1]
    assert (-low, high) == (pytest.approx(wilson), pytest.approx(wilson))


@given(counts())
def test_newcombe_holds_the_estimate_and_swapping_negates_it(table):
    low, high = newcombe_interval(table, alpha=0.05)
    back_low, back_high = newcombe_interval(swapped(table), alpha=0.05)
    assert -1 - 1e-9 <= low <= table.difference + 1e-9
    assert table.difference - 1e-9 <= high <= 1 + 1e-9
    assert (back_low, back_high) == (pytest.approx(-high), pytest.approx(-low))


@given(counts())
def test_mcnemar_is_the_sign_test_of_the_disagreements(table):
    disagreements = table.only_treatment + table.only_control
    expected = stats.binomtest(table.only_treatment, disagreements).pvalue if disagreements else 1.0
    assert mcnemar_exact_p(table) == pytest.approx(expected)
    assert mcnemar_exact_p(swapped(table)) == pytest.approx(expected)


def test_detectable_difference_of_the_published_sample_sizes():
    """1,319 questions, 10 % discordant, 80 % power: 2.44 points; 200 questions: 6.2."""
    assert round(100 * minimum_detectable_difference(1319, 0.10), 2) == 2.44
    assert round(100 * minimum_detectable_difference(200, 0.10), 1) == 6.2


def test_detectable_difference_has_the_power_it_promises():
    """Power of the (asymptotic) McNemar test, summed over every table, at the returned difference."""
    num_questions, discordant = 200, 0.10
    difference = minimum_detectable_difference(num_questions, discordant)
    share = (discordant + difference) / (2 * discordant)
    power = 0.0
    for number in range(1, num_questions + 1):
        favourable = np.arange(number + 1)
        rejected = np.abs(2 * favourable - number) / math.sqrt(number) > stats.norm.ppf(0.975)
        weight = stats.binom.pmf(number, num_questions, discordant)
        power += weight * stats.binom.pmf(favourable, number, share)[rejected].sum()
    assert power == pytest.approx(0.8, abs=0.04)


def test_no_difference_is_detectable_among_too_few_questions():
    assert minimum_detectable_difference(10, 0.10) == 1.0
