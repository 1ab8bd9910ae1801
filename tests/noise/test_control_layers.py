import pytest

from aqnpipe.errors import DataError
from aqnpipe.noise.control_layers import control_layers


def test_healthy_layers_are_all_others():
    assert control_layers(range(6), (1, 4), "healthy_layers", 0) == [0, 2, 3, 5]


def test_wrong_layers_are_the_farthest_the_lower_one_first():
    assert control_layers(range(6), (3,), "wrong_layers", 0) == [0]
    # Distances from {1, 4}: 0 and 5 have 1, 2 and 3 have 1; ties go to the lower number.
    assert control_layers(range(6), (1, 4), "wrong_layers", 0) == [0, 2]


def test_random_layers_are_as_many_never_a_target_and_follow_the_seed():
    draws = [control_layers(range(28), (10,), "random_layers", seed) for seed in range(200)]
    assert all(len(layers) == 1 and layers != [10] for layers in draws)
    assert control_layers(range(28), (10,), "random_layers", 7) == draws[7]
    # 200 uniform draws from 27 miss a given layer with probability below 0.001; at most a few of 27 may be missing.
    assert len({layers[0] for layers in draws}) >= 24


def test_fewer_are_left_than_targets():
    assert control_layers(range(3), (0, 1), "random_layers", 0) == [2]
    with pytest.raises(DataError, match="wrong_layers: all 2 layers are targeted"):
        control_layers(range(2), (0, 1), "wrong_layers", 0)
