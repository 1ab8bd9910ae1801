import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.statistics.multiple_testing import adjusted_within_families, holm_within_families, interval_level

probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03 times 3, 2, 1, then made monotone: 0.03, 0.04, 0.04."""
    assert holm_within_families(["one"] * 3, [0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])


@given(probabilities)
def test_holm_keeps_the_order_and_never_helps(p_values):
    adjusted = holm_within_families(["one"] * len(p_values), p_values)
    order = np.argsort(p_values)
    assert all(after >= before - 1e-12 for before, after in zip(p_values, adjusted, strict=True))
    assert np.all(np.diff(np.array(adjusted)[order]) >= -1e-12)
    assert max(adjusted) <= 1


def test_families_are_adjusted_by_themselves_and_keep_their_places():
    adjusted = holm_within_families(["a", "b", "a", "b"], [0.02, 0.04, 0.01, 0.5])
    assert adjusted == pytest.approx([0.02, 0.08, 0.02, 0.5])
    assert holm_within_families([], []) == []


def test_one_sided_tests_go_with_the_shorter_interval():
    assert interval_level(0.05, one_sided=False) == 0.95
    assert interval_level(0.05, one_sided=True) == 0.9


@given(probabilities)
def test_a_test_is_rejected_where_its_own_p_value_is_below_its_level(p_values):
    alpha = 0.05
    adjusted = adjusted_within_families(["one"] * len(p_values), p_values, alpha)
    for p_value, (p_holm, level) in zip(p_values, adjusted, strict=True):
        assert (p_holm < alpha) == (p_value < level)
