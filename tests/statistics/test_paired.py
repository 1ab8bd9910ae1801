import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from aqnpipe.statistics.paired import (
    PairedCounts,
    minimum_detectable_difference,
    paired_counts,
    score_interval,
    score_p,
    tango_p,
)

cells = st.integers(min_value=0, max_value=300)


@st.composite
def counts(draw):
    treatment, control = draw(cells), draw(cells)
    return PairedCounts(treatment, control, treatment + control + draw(cells) + draw(cells) or 1)


def test_counts_by_hand():
    treatment = np.array([True, True, True, False, False])
    control = np.array([True, False, False, True, False])
    table = paired_counts(treatment, control)
    assert table == PairedCounts(only_treatment=2, only_control=1, num_questions=5)
    assert table.difference == pytest.approx(0.2)


def test_unequal_or_empty_vectors_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        paired_counts(np.array([True]), np.array([True, False]))
    with pytest.raises(ValueError, match="non-empty"):
        paired_counts(np.array([], dtype=bool), np.array([], dtype=bool))


@given(counts())
def test_the_score_interval_holds_what_tangos_test_does_not_reject_and_swapping_negates_it(table):
    low, high = score_interval(table, alpha=0.05)
    back_low, back_high = score_interval(table.swapped(), alpha=0.05)
    assert -1 <= low <= table.difference <= high <= 1
    assert (back_low, back_high) == (pytest.approx(-high, abs=1e-7), pytest.approx(-low, abs=1e-7))
    if low > -0.99:
        assert tango_p(table, low - 0.002) < 0.025 < tango_p(table, low + 0.002)


@given(counts())
def test_the_score_test_is_mcnemars_and_decides_as_its_interval_does(table):
    disagreements = table.only_treatment + table.only_control
    surplus = abs(table.only_treatment - table.only_control)
    expected = 2 * stats.norm.sf(surplus / math.sqrt(disagreements)) if disagreements else 1.0
    assert score_p(table) == pytest.approx(expected)
    low, high = score_interval(table, alpha=0.05)
    assert (score_p(table) < 0.05) == (low > 0 or high < 0)


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


def test_tango_reproduces_the_published_example():
    """Tango (1998): 43, 0, 1, 0 of 44 against a margin of 0.1 gives Z = 1.709."""
    assert tango_p(PairedCounts(0, 1, 44), -0.1) == pytest.approx(stats.norm.sf(1.709), abs=2e-4)


def test_tango_at_0_is_mcnemars_chi_squared():
    """The score test of no difference: (b - c)/sqrt(b + c)."""
    assert tango_p(PairedCounts(20, 8, 100), 0.0) == pytest.approx(stats.norm.sf(12 / math.sqrt(28)))


@given(counts(), st.floats(0.005, 0.3))
def test_tango_falls_with_the_margin_and_holds_without_disagreement(table, margin):
    assert 0 <= tango_p(table, -margin) <= 1
    assert tango_p(table, -margin) <= tango_p(table, -margin / 2) + 1e-9
    agreed = PairedCounts(0, 0, table.num_questions)
    assert 0 < tango_p(agreed, -margin) < 0.5
