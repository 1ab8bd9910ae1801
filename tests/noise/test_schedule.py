import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.config.noise import (
    ConstantSigma,
    CosineDecay,
    EpochAwareGeometric,
    EpochAwareRanges,
    EpochRange,
    GlobalDecay,
    LinearDecay,
)
from aqnpipe.errors import ConfigError
from aqnpipe.noise.schedule import max_sigma, sigma_at

PUBLISHED_GLOBAL = [
    (0, 11, 0.0),
    (12, 23, 0.05),
    (24, 34, 0.0281),
    (35, 46, 0.0158),
    (47, 57, 0.0089),
    (58, 69, 0.005),
    (70, 81, 0.0028),
    (82, 92, 0.0016),
    (93, 104, 0.0009),
    (105, 116, 0.0005),
]


@pytest.mark.parametrize(("first", "last", "sigma"), PUBLISHED_GLOBAL)
def test_global_decay_matches_the_published_table(first, last, sigma):
    schedule = GlobalDecay(sigma_start=0.05, sigma_end=0.0005, num_stages=10)
    found = {round(sigma_at(schedule, step, 116, 2), 4) for step in range(first, last + 1)}
    assert found == {sigma}


def test_linear_decay_by_hand():
    schedule = LinearDecay(sigma_start=0.05, sigma_end=0.01)
    assert [sigma_at(schedule, t, 4, 1) for t in range(5)] == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01])


def test_epoch_ranges_restart_in_every_epoch():
    schedule = EpochAwareRanges(
        ranges=[{"sigma_start": 0.05, "sigma_end": 0.01}, {"sigma_start": 0.01, "sigma_end": 0.0005}]
    )
    assert sigma_at(schedule, 0, 116, 2) == pytest.approx(0.05)
    assert sigma_at(schedule, 29, 116, 2) == pytest.approx((0.05 * 0.01) ** 0.5)  # geometric middle of epoch 1
    assert sigma_at(schedule, 58, 116, 2) == pytest.approx(0.01)
    assert sigma_at(schedule, 116, 116, 2) == pytest.approx(0.0005)


def test_epoch_geometric_hits_the_published_boundaries():
    schedule = EpochAwareGeometric(sigma_start=0.05, sigma_end=0.0005)
    boundaries = [sigma_at(schedule, e * 58, 232, 4) for e in range(5)]
    assert [round(sigma, 4) for sigma in boundaries] == [0.05, 0.0158, 0.005, 0.0016, 0.0005]


def test_ranges_must_fit_the_epochs():
    schedule = EpochAwareRanges(ranges=[{"sigma_start": 0.05, "sigma_end": 0.01}])
    with pytest.raises(ConfigError, match="found 1 ranges for 2 epochs"):
        sigma_at(schedule, 0, 10, 2)


def test_step_outside_the_training_is_a_bug():
    with pytest.raises(ValueError, match=r"outside 0\.\.10"):
        sigma_at(LinearDecay(sigma_start=0.1, sigma_end=0.0), 11, 10, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sigma_start": 0.05, "sigma_end": 0.0005, "num_stages": 2},
        {"sigma_start": 0.05, "sigma_end": 0.0, "num_stages": 10},
        {"sigma_start": -0.05, "sigma_end": 0.0005, "num_stages": 10},
        {"sigma_start": float("nan"), "sigma_end": 0.0005, "num_stages": 10},
    ],
)
def test_degenerate_global_decays_are_refused(wrong):
    with pytest.raises(ValueError, match="validation error"):
        GlobalDecay(**wrong)


@given(
    start=st.floats(0.001, 0.5),
    ratio=st.floats(0.01, 1),
    num_stages=st.integers(3, 12),
    num_steps=st.integers(3, 300),
)
def test_global_decay_never_rises_after_the_warm_up_and_stays_in_range(start, ratio, num_stages, num_steps):
    schedule = GlobalDecay(sigma_start=start, sigma_end=start * ratio, num_stages=num_stages)
    sigmas = [sigma_at(schedule, t, num_steps, 1) for t in range(num_steps + 1)]
    active = [sigma for sigma in sigmas if sigma > 0]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(active))
    assert all(start * ratio * (1 - 1e-9) <= sigma <= start * (1 + 1e-9) for sigma in active)
    assert sigmas[0] == 0.0
    assert sigmas[-1] == pytest.approx(start * ratio)


def test_constant_and_cosine():
    assert [sigma_at(ConstantSigma(sigma=0.03), step, 10, 1) for step in (0, 5, 10)] == [0.03] * 3
    cosine = CosineDecay(sigma_start=0.05, sigma_end=0.01)
    assert [sigma_at(cosine, step, 10, 2) for step in (0, 5, 10)] == pytest.approx([0.05, 0.03, 0.01])


@pytest.mark.parametrize(
    ("schedule", "largest"),
    [
        (ConstantSigma(sigma=0.03), 0.03),
        (CosineDecay(sigma_start=0.05, sigma_end=0.0), 0.05),
        (LinearDecay(sigma_start=0.0, sigma_end=0.02), 0.02),
        (GlobalDecay(sigma_start=0.05, sigma_end=0.0005, num_stages=10), 0.05),
        (EpochAwareRanges(ranges=[EpochRange(sigma_start=0.01, sigma_end=0.04)] * 2), 0.04),
        (EpochAwareGeometric(sigma_start=0.05, sigma_end=0.0005), 0.05),
    ],
)
def test_no_step_exceeds_the_largest_sigma(schedule, largest):
    assert max_sigma(schedule) == largest
    assert max(sigma_at(schedule, step, 120, 2) for step in range(121)) <= largest
