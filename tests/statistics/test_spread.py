import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from aqnpipe.statistics.cochran_cox import Spread

variances = st.floats(1e-6, 1.0)
freedoms = st.floats(1, 2000)


def test_one_part_is_the_t_distribution():
    spread = Spread((0.04,), (7.0,))
    assert spread.standard_error == pytest.approx(0.2)
    assert spread.quantile(0.975) == pytest.approx(stats.t.ppf(0.975, 7))
    assert spread.half_width(0.9) == pytest.approx(0.2 * stats.t.ppf(0.95, 7))
    assert spread.upper_tail(0.3) == pytest.approx(stats.t.sf(1.5, 7))
    assert spread.upper_tail(-0.3) == pytest.approx(stats.t.cdf(1.5, 7))


def test_quantile_of_two_parts_by_hand():
    """Variances 1 and 3 with 1 and 9 degrees of freedom: (1*12.706 + 3*2.262)/4."""
    assert Spread((1.0, 3.0), (1.0, 9.0)).quantile(0.975) == pytest.approx((12.7062 + 3 * 2.26216) / 4, abs=1e-4)


def test_overlap_is_taken_off_the_first_part():
    """3 + 2 - 1 = 4; the first part weighs 3/4."""
    spread = Spread((3.0, 2.0), (1.0, 9.0), overlap=1.0)
    assert spread.standard_error == 2.0
    assert spread.quantile(0.975) == pytest.approx(0.75 * 12.7062 + 0.25 * 2.26216, abs=1e-4)
    assert Spread((1.0, 4.0), (1.0, 9.0), overlap=3.0).standard_error == 2.0


@given(variances, variances, freedoms, freedoms, st.floats(0.55, 0.9999))
def test_tail_inverts_the_quantile(first, second, low, high, probability):
    spread = Spread((first, second), (low, high))
    distance = spread.quantile(probability) * spread.standard_error
    assert spread.upper_tail(distance) == pytest.approx(1 - probability, rel=1e-5, abs=1e-9)
    assert spread.upper_tail(-distance) == pytest.approx(probability, rel=1e-5)


@given(variances, variances, freedoms, freedoms)
def test_quantile_lies_between_those_of_the_parts(first, second, low, high):
    bounds = sorted(stats.t.ppf(0.975, [low, high]))
    assert bounds[0] - 1e-9 <= Spread((first, second), (low, high)).quantile(0.975) <= bounds[1] + 1e-9


def test_far_tails_end_at_the_smallest_p():
    assert Spread((1e-8, 1e-8), (30.0, 1000.0)).upper_tail(1.0) == 1e-12
    assert Spread((1.0, 1.0), (2.0, 5.0)).upper_tail(0.0) == 0.5


def test_detectable_difference_is_found_with_its_power():
    spread = Spread((0.01**2,), (30.0,))
    difference = spread.minimum_detectable(0.025, 0.8)
    assert stats.nct.sf(stats.t.ppf(0.975, 30), 30, difference / 0.01) == pytest.approx(0.8, abs=0.01)


def test_type_one_error_where_few_degrees_of_freedom_carry_the_variance():
    """Behrens and Fisher's problem, 1 and 200 degrees of freedom: nominal at any mixture, as the method promises."""
    draws = np.random.default_rng(3)
    for share in (0.05, 0.5, 0.95):
        true = np.array([share, 1 - share])
        rejected = 0
        for _ in range(2000):
            seen = true * draws.chisquare([1, 200]) / [1, 200]
            rejected += abs(draws.normal()) > Spread(tuple(seen), (1.0, 200.0)).half_width(0.95)
        assert rejected <= stats.binom.ppf(0.9999, 2000, 0.05)


def test_an_overlap_that_takes_off_all_leaves_the_larger_part():
    spread = Spread((0.04, 0.0), (1.0, 2.0), overlap=0.2)
    assert spread.standard_error == pytest.approx(0.2)
    assert 0 < spread.upper_tail(0.5) < 0.5
