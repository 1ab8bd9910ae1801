import numpy as np
import pytest

from aqnpipe.diagnosis.robust import first_below, robust_z


def test_robust_z_by_hand():
    # median 3, |x - 3| = 2 1 0 1 97: MAD 1; z = (x - 3)/1.4826
    z = robust_z(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert z == pytest.approx([-2 / 1.4826, -1 / 1.4826, 0, 1 / 1.4826, 97 / 1.4826])


def test_floor_is_one_percent_of_the_median():
    # MAD 0, median -10: spread 0.1
    assert robust_z(np.array([-10.0, -10.0, -10.0, -9.0]))[-1] == pytest.approx(1 / (1.4826 * 0.1))


def test_floor_is_one_millionth_where_the_median_is_zero():
    assert robust_z(np.array([0.0, 0.0, 0.0, 2e-6]))[-1] == pytest.approx(2 / 1.4826)


def test_layers_all_alike_have_z_zero():
    assert (robust_z(np.zeros(6)) == 0).all()


def test_first_below_takes_the_first_and_skips_nan_and_start():
    z = np.array([np.nan, -5.0, -1.0, -3.0, -9.0])
    assert first_below(z, -2.0) == 1
    assert first_below(z, -2.0, start=2) == 3
    assert first_below(z, -10.0) is None
