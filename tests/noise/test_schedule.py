import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.config.custom_code import CustomSchedule
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
from aqnpipe.noise.schedule import custom_sigmas, max_sigma, sigma_at

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


OWN = """
def falling(step, num_steps, num_epochs, *, start):
    return start * (1 - step / num_steps) / num_epochs

def odd(step, num_steps, num_epochs): return 0.1 * (step % 2)
def numpys(step, num_steps, num_epochs): return __import__("numpy").float32(0.05)
def never(step, num_steps, num_epochs): return 0.0
def last(step, num_steps, num_epochs): return float(step == num_steps)
def negative(step, num_steps, num_epochs): return -0.01
def large(step, num_steps, num_epochs): return 0.2 if step == 3 else 0.1
def text(step, num_steps, num_epochs): return "0.1"
def nan(step, num_steps, num_epochs): return float("nan")
def broken(step, num_steps, num_epochs): return 0.1 / (2 - step)

calls = []
def moody(step, num_steps, num_epochs):
    calls.append(1)
    return 0.1 / len(calls)
"""


@pytest.fixture
def own(own_module):
    module = own_module(OWN)
    return lambda name, **settings: CustomSchedule(function=f"{module}:{name}", settings=settings, sigma_max=0.1)


def test_a_schedule_of_ones_own_gives_what_its_function_returns(own):
    schedule = own("falling", start=0.1)
    sigmas = custom_sigmas(schedule, 4, 2)
    # 0.1 * (1 - t/4) / 2.
    assert sigmas == pytest.approx((0.05, 0.0375, 0.025, 0.0125, 0.0))
    ready = schedule.model_copy(update={"sigmas": sigmas})
    assert [sigma_at(ready, step, 4, 2) for step in range(5)] == list(sigmas)
    assert max_sigma(ready) == 0.1
    with pytest.raises(ValueError, match="are not those of 5 steps; this is a bug"):
        sigma_at(ready, 0, 5, 2)


def test_a_schedule_of_ones_own_must_be_above_0_when_rollouts_are_drawn(own):
    # Steps 0 and 2 have rollouts; it is above 0 at 1 and 3 alone.
    with pytest.raises(ConfigError, match="returned 0 at every rollout of 4 steps"):
        custom_sigmas(own("odd"), 4, 1, steps_per_rollout=2)
    assert custom_sigmas(own("numpys"), 2, 1) == pytest.approx((0.05, 0.05, 0.05))
    assert custom_sigmas(own("odd"), 4, 1) == (0.0, 0.1, 0.0, 0.1, 0.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("never", "never: returned 0 at every rollout of 4 steps, expected more at some"),
        ("last", r"returned '1.0' \(float\) at step 4 of 4, expected a number from 0 to sigma_max 0.1"),
        ("negative", r"returned '-0.01' \(float\) at step 0 of 4"),
        ("large", r"returned '0.2' \(float\) at step 3 of 4"),
        ("text", r"returned '0.1' \(str\) at step 0 of 4, expected a number"),
        ("nan", r"returned 'nan' \(float\) at step 0 of 4"),
        ("broken", "raised ZeroDivisionError: float division by zero, at step 2 of 4"),
        ("moody", r"returned 0.1 and then 0.01\d+ at step 0, expected the same number whenever it is asked"),
        ("falling", "raised TypeError: .*'start', at step 0 of 4"),
        ("absent", "has no function absent"),
    ],
)
def test_a_schedule_of_ones_own_that_cannot_be_used_is_one_line(own, name, says):
    with pytest.raises(ConfigError, match=says) as found:
        custom_sigmas(own(name), 4, 1)
    assert "\n" not in str(found.value)
