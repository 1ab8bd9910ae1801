"""Group-sequential levels: published boundaries, the error rate over all looks, and looks after the planned ones."""

import numpy as np
import pytest
from scipy import stats

from aqnpipe.statistics.group_sequential import Looks, bounds, look_adjusted_p, nominal_tails

EIGHT = Looks(start=2, step=2, planned=16, reserve=0.1)


def test_bounds_are_the_published_ones_of_obrien_fleming_type():
    """Five equal looks, 2.5 % one-sided (Reboussin, DeMets, Kim & Lan 2000, table of Lan-DeMets boundaries)."""
    share = np.arange(1, 6) / 5
    spent = 2 * stats.norm.sf(stats.norm.isf(0.0125) / np.sqrt(share))
    found = bounds(share.tolist(), np.diff([0.0, *spent]).tolist())
    assert found == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=2e-4)


def test_bounds_are_the_published_ones_of_pocock_type():
    share = np.arange(1, 6) / 5
    spent = 0.025 * np.log(1 + (np.e - 1) * share)
    found = bounds(share.tolist(), np.diff([0.0, *spent]).tolist())
    assert found == pytest.approx([2.4380, 2.4268, 2.4101, 2.3966, 2.3859], abs=2e-4)


def test_one_look_spends_everything():
    assert nominal_tails(Looks(start=6, step=2, planned=6, reserve=0.0), 0.025, 1) == pytest.approx((0.025,))


def test_looks_together_reject_at_the_level():
    random = np.random.default_rng(0)
    steps = random.normal(size=(200_000, 8))
    z = steps.cumsum(axis=1) / np.sqrt(np.arange(1, 9))
    tails = np.array(nominal_tails(EIGHT, 0.025, 8))
    rejected = (stats.norm.sf(np.abs(z)) < tails).any(axis=1).mean()
    assert rejected == pytest.approx(0.05 * (1 - EIGHT.reserve), abs=3 * np.sqrt(0.05 * 0.95 / 200_000))


def test_the_levels_of_a_look_do_not_depend_on_how_many_follow():
    assert nominal_tails(EIGHT, 0.025, 12)[:8] == nominal_tails(EIGHT, 0.025, 8)


def test_any_number_of_looks_spends_at_most_everything():
    spent = [EIGHT.spent(look) for look in range(1, 1000)]
    assert spent == sorted(spent)
    assert spent[7] == pytest.approx(0.9)
    assert spent[-1] < 1


def test_without_a_reserve_nothing_is_left_after_the_planned_looks():
    looks = Looks(start=2, step=2, planned=4, reserve=0.0)
    assert nominal_tails(looks, 0.025, 3)[-1] == 0.0


@pytest.mark.parametrize("look", [1, 2, 5, 8, 10])
def test_an_adjusted_p_value_is_below_a_level_exactly_where_the_look_rejects_at_it(look):
    for level in (0.05, 0.01):
        nominal = 2 * nominal_tails(EIGHT, level / 2, look)[-1]
        assert look_adjusted_p(EIGHT, look, nominal, one_sided=False) == pytest.approx(level, rel=1e-4)
        assert look_adjusted_p(EIGHT, look, 0.9 * nominal, one_sided=False) < level
        assert look_adjusted_p(EIGHT, look, 1.1 * nominal, one_sided=False) > level


def test_levels_grow_with_the_error_rate_so_that_holms_method_may_pass_it_on():
    rates = [0.025 / number for number in range(33, 0, -1)]
    table = np.array([nominal_tails(EIGHT, rate, 12) for rate in rates])
    assert (np.diff(table, axis=0) > 0).all()


def test_large_and_tiny_p_values_stay_in_their_range():
    assert look_adjusted_p(EIGHT, 3, 1.0, one_sided=False) == 1.0
    assert look_adjusted_p(EIGHT, 1, 0.6, one_sided=True) == 1.0
    assert 0 < look_adjusted_p(EIGHT, 8, 1e-300, one_sided=False) < 1e-9
