import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from aqnpipe.statistics.spread import Spread, VariancePart

variances = st.floats(1e-6, 1.0)
freedoms = st.floats(1, 2000)


def spread_of(*parts):
    return Spread(tuple(VariancePart(*part) for part in parts))


def test_one_part_is_the_t_distribution():
    spread = spread_of((0.04, 7.0))
    assert spread.standard_error == pytest.approx(0.2)
    assert spread.quantile(0.975) == pytest.approx(stats.t.ppf(0.975, 7))
    assert spread.half_width(0.9) == pytest.approx(0.2 * stats.t.ppf(0.95, 7))
    assert spread.upper_tail(0.3) == pytest.approx(stats.t.sf(1.5, 7))
    assert spread.upper_tail(-0.3) == pytest.approx(stats.t.cdf(1.5, 7))


@pytest.mark.parametrize("freedom", [1.0, 2.5, 9.0])
@pytest.mark.parametrize("value", [0.5, 2.0, 6.0])
def test_two_parts_are_the_sum_of_two_t_distributed_errors(freedom, value):
    """By numerical integration over the first error."""
    spread = spread_of((0.4, freedom), (0.6, 200.0))

    def tail(first):
        return stats.t.pdf(first, freedom) * stats.t.sf((value - first * 0.4**0.5) / 0.6**0.5, 200)

    cuts = (-1e7, -100, -5, 5, 100, 1e7)
    reference = sum(integrate.quad(tail, *ends, limit=500)[0] for ends in pairwise(cuts))
    assert spread.upper_tail(value) == pytest.approx(reference, rel=5e-3)


@given(variances, variances, freedoms, freedoms, st.floats(1, 1000) | st.just(math.inf), st.floats(0.5, 1 - 1e-9))
@example(0.0235, 0.0011, 1.5, 1000.0, 10.0, 0.9999)
@settings(deadline=None)
def test_tail_inverts_the_quantile(first, second, low, high, limit, probability):
    """Also far out, where a limited variance leaves no density at the quantile of a t distribution."""
    spread = spread_of((first, low, first * limit), (second, high))
    distance = spread.quantile(probability) * spread.standard_error
    assert spread.upper_tail(distance) == pytest.approx(1 - probability, rel=1e-5)
    assert spread.upper_tail(-distance) == pytest.approx(probability, rel=1e-5)


def test_far_tails_end_at_the_smallest_p():
    assert spread_of((1e-8, 30.0), (1e-8, 1000.0)).upper_tail(1.0) == 1e-12
    assert spread_of((1.0, 2.0), (1.0, 5.0)).upper_tail(0.0) == pytest.approx(0.5)


def test_a_limit_makes_large_errors_impossible():
    """Two seeds of variance 0.01^2: without a limit a true variance of 1 is possible and 0.3 is not significant."""
    open_end, limited = VariancePart(1e-4, 1.0), VariancePart(1e-4, 1.0, limit=0.1**2)
    assert Spread((open_end,)).upper_tail(0.3) == pytest.approx(stats.t.sf(30, 1))
    assert Spread((limited,)).upper_tail(0.3) < 1e-3
    assert Spread((VariancePart(1e-2, 1.0, limit=0.1**2),)).upper_tail(0.3) == pytest.approx(stats.t.sf(3, 1))


def test_freedom_of_the_standard_error_by_hand():
    """Satterthwaite: (1 + 3)^2 / (1/2 + 9/18) = 16."""
    assert spread_of((1.0, 2.0), (3.0, 18.0)).degrees_of_freedom == pytest.approx(16)


def test_detectable_difference_is_found_with_its_power():
    """The critical value and the noncentral t of 30 degrees of freedom."""
    difference = spread_of((0.01**2, 30.0)).minimum_detectable(0.025, 0.8)
    assert stats.nct.sf(stats.t.ppf(0.975, 30), 30, difference / 0.01) == pytest.approx(0.8)


@pytest.mark.parametrize("parts", [((1.0, 2.0), (3.0, 18.0)), ((1e-4, 1.0),), ((1.0, 9.0),), ((1.0, 1e6), (0.5, 1e6))])
@pytest.mark.parametrize("tail", [0.025, 0.0005])
def test_what_is_detected_is_above_the_minimum(parts, tail):
    spread = spread_of(*parts)
    limit = spread.minimum_detectable(tail, 0.8)
    assert spread.detecting_level(0.999 * limit, 0.8) > tail
    if limit < 30 * spread.standard_error:
        assert spread.detecting_level(1.001 * limit, 0.8) <= tail


@pytest.mark.parametrize("alpha", [0.05, 0.005])
@pytest.mark.parametrize("freedom", [1, 3])
def test_no_mixture_of_variances_rejects_more_often_than_the_level(freedom, alpha):
    """Behrens and Fisher's problem with `freedom` and 200 degrees of freedom."""
    draws = np.random.default_rng(3)
    for share in (0.05, 0.5, 0.95):
        true = np.array([share, 1 - share])
        rejected = 0
        for _ in range(1000):
            first, second = true * draws.chisquare([freedom, 200]) / [freedom, 200]
            rejected += 2 * spread_of((first, freedom), (second, 200.0)).upper_tail(abs(draws.normal())) < alpha
        assert rejected <= stats.binom.ppf(0.9999, 1000, alpha)
