"""The standard error of a measured scale, against a formula by hand and a simulation."""

import numpy as np
import pytest

from aqnpipe.statistics.continuous import scale_standard_error


def test_a_value_by_hand():
    """Of 5,000 elements: 1 / sqrt(10,000) = 1 %."""
    assert scale_standard_error(5000) == pytest.approx(0.01)


def test_measured_scales_scatter_as_much():
    errors = np.random.default_rng(0).normal(0, 0.05, (4000, 200))
    measured = np.sqrt((errors**2).mean(axis=1))
    # 4,000 measurements know their scatter to 1.1 %.
    assert measured.std() / 0.05 == pytest.approx(scale_standard_error(200), rel=0.05)
