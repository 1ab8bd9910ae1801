"""The arithmetic of the parts, by hand."""

import math

import pytest
import torch

from aqnpipe.training.distance.parts import parts_of, share_of


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_parts_of_a_distance_by_hand():
    """d = (3, -1): the noise adds (2, 0), decoding (1, -1), the batch nothing. Shares: 6/10, 4/10 and 0."""
    sampled, decoded, whole = values(-5.0, -1.0), values(-3.0, -1.0), values(-2.0, -2.0)
    noise, decoding, batch = parts_of(sampled, {"rollout_noise": decoded, "decoding": whole, "batch": whole})
    assert (noise.cause, decoding.cause, batch.cause) == ("rollout_noise", "decoding", "batch")
    assert (noise.mean, decoding.mean, batch.mean) == (1.0, 0.0, 0.0)
    assert (noise.rms, decoding.rms, batch.rms) == pytest.approx((math.sqrt(2), 1.0, 0.0))
    assert (noise.share, decoding.share, batch.share) == pytest.approx((0.6, 0.4, 0.0))


def test_parts_that_cancel_have_shares_of_opposite_signs_that_add_up_to_one():
    sampled, other, policy = values(0.0, 0.0), values(10.0, 0.0), values(1.0, 0.0)
    first, second = parts_of(sampled, {"engine": other, "batch": policy})
    assert (first.share, second.share) == (10.0, -9.0)


def test_equal_passes_have_no_shares():
    same = values(-1.0, -2.0)
    (part,) = parts_of(same, {"rest": same})
    assert (part.rms, part.share) == (0.0, None)
    assert share_of(same, values(0.0, 0.0)) is None
