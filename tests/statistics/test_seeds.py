import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from aqnpipe.statistics.seeds import (
    MAX_SEEDS_SEARCHED,
    estimate_difference,
    minimum_detectable,
    questions_needed,
    seeds_needed,
    two_way_variance,
    variance_parts,
)


def answers(seeds=3, questions=40, accuracy=0.6, seed=0):
    return (np.random.default_rng(seed).random((seeds, questions)) < accuracy).astype(float)


def test_two_way_variance_by_hand():
    """Seed means 0.25 and 0.75 (variance 1/8), question means 0, 0.5, 0.5, 1 (variance 1/6)."""
    variance, freedom = two_way_variance(np.array([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]))
    by_seed, by_question = 1 / 8 / 2, 1 / 6 / 4
    assert variance == pytest.approx(by_seed + by_question)
    assert freedom == pytest.approx((by_seed + by_question) ** 2 / (by_seed**2 / 1 + by_question**2 / 3))


def test_estimate_over_seeds_is_the_t_test_with_that_variance():
    treatment, control = answers(accuracy=0.8, seed=1), answers(accuracy=0.5, seed=2)
    estimate = estimate_difference(treatment, control, alpha=0.05)
    variance, freedom = two_way_variance(treatment - control)
    mean = (treatment - control).mean()
    assert estimate.method == "two_way"
    assert estimate.covers_training_luck
    assert estimate.p_value == pytest.approx(2 * stats.t.sf(mean / math.sqrt(variance), freedom))
    expected = stats.t.interval(0.95, freedom, loc=mean, scale=math.sqrt(variance))
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx(expected)


def test_one_noise_seeded_run_is_the_paired_t_test():
    treatment, control = answers(1, 60, 0.8, 1), answers(2, 60, 0.5, 2).mean(axis=0, keepdims=True)
    estimate = estimate_difference(treatment, control, alpha=0.05)
    reference = stats.ttest_rel(treatment[0], control[0])
    assert estimate.method == "questions"
    assert not estimate.covers_training_luck
    assert estimate.p_value == pytest.approx(reference.pvalue)
    low, high = reference.confidence_interval(0.95)
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx((low, high))


def test_one_run_of_right_or_wrong_is_exact():
    treatment, control = np.array([[1.0] * 8 + [0.0] * 4]), np.array([[0.0] * 6 + [1.0] * 2 + [0.0] * 4])
    estimate = estimate_difference(treatment, control, alpha=0.05)
    assert estimate.method == "mcnemar"
    assert estimate.difference == pytest.approx(0.5)
    assert estimate.p_value == pytest.approx(2 * 0.5**6)


def test_identical_outputs_have_p_1_and_an_honest_interval():
    same = answers()
    estimate = estimate_difference(same, same, alpha=0.05)
    assert (estimate.method, estimate.difference, estimate.p_value) == ("no_variance", 0.0, 1.0)
    assert estimate.standard_error is None
    assert estimate.ci_low < 0 < estimate.ci_high


def test_a_difference_without_variance_is_tested_exactly():
    estimate = estimate_difference(np.ones((2, 5)), np.zeros((2, 5)), alpha=0.05)
    assert (estimate.method, estimate.difference) == ("no_variance", 1.0)
    assert estimate.p_value == pytest.approx(2 * 0.5**5)


def test_seed_and_question_means_that_cancel_do_not_give_a_certain_result():
    estimate = estimate_difference(np.array([[1.0, 0.0], [0.0, 1.0]]), np.zeros((2, 2)), alpha=0.05)
    assert estimate.p_value > 0.05


def test_a_pretrained_control_stands_against_every_seed():
    treatment, control = answers(3, 40, 0.9), answers(1, 40, 0.4)
    estimate = estimate_difference(treatment, control, alpha=0.05)
    assert estimate.num_seeds == 3
    assert estimate.difference == pytest.approx(treatment.mean() - control.mean())


def test_too_little_data_is_refused():
    with pytest.raises(ValueError, match="at least 1 seed and 2 questions"):
        estimate_difference(np.ones((1, 1)), np.ones((1, 1)), alpha=0.05)


outcomes = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 12)), elements=st.sampled_from([0.0, 1.0]))


@given(outcomes, st.data())
@settings(deadline=None)
def test_swapping_sides_negates_the_difference(treatment, data):
    control = data.draw(arrays(np.float64, treatment.shape, elements=st.sampled_from([0.0, 1.0])))
    one = estimate_difference(treatment, control, alpha=0.05)
    other = estimate_difference(control, treatment, alpha=0.05)
    assert other.difference == pytest.approx(-one.difference)
    assert other.p_value == pytest.approx(one.p_value)
    assert (other.ci_low, other.ci_high) == (pytest.approx(-one.ci_high), pytest.approx(-one.ci_low))


def test_variance_parts_find_what_was_put_in():
    """Means of 300 made-up studies lie within five standard errors of the true components."""
    draws = np.random.default_rng(5)
    true = np.array([0.2**2, 0.5**2, 0.7**2])
    found = []
    for _ in range(300):
        scale = np.sqrt(true)
        data = draws.normal(0, scale[0], (6, 1)) + draws.normal(0, scale[1], (1, 60))
        parts = variance_parts(data + draws.normal(0, scale[2], (6, 60)))
        found.append([parts.seed, parts.question, parts.residual])
    errors = np.std(found, axis=0) / math.sqrt(300)
    assert np.all(np.abs(np.mean(found, axis=0) - true) < 5 * errors)


@pytest.mark.parametrize(("num_seeds", "num_questions"), [(2, 200), (5, 200)])
def test_type_one_error_is_at_most_nominal(num_seeds, num_questions):
    """400 studies without an effect, seed luck of about 1 point: rejections stay within the 99.9 % bound of 5 %."""
    draws = np.random.default_rng(17)
    rejected = 0
    for _ in range(400):
        hard = draws.normal(0, 2, num_questions)
        luck = draws.normal(0, 0.1, (2, num_seeds, 1))
        taste = draws.normal(0, 1, (2, 1, num_questions))
        chance = 1 / (1 + np.exp(-(1.2 + hard + luck + taste)))
        treatment, control = (draws.random(chance.shape) < chance).astype(float)
        rejected += estimate_difference(treatment, control, alpha=0.05).p_value < 0.05
    assert rejected <= stats.binom.ppf(0.999, 400, 0.05)


def test_ignoring_the_luck_of_training_would_fool_us():
    """With seed luck of about 4 points, questions alone reject far too often: why one run per arm shows nothing."""
    draws = np.random.default_rng(18)
    rejected = 0
    for _ in range(200):
        luck = draws.normal(0, 0.04, (2, 1, 1))
        treatment, control = (draws.random((2, 1, 1000)) < 0.7 + luck).astype(float)
        rejected += estimate_difference(treatment, control, alpha=0.05).p_value < 0.05
    assert rejected > stats.binom.ppf(0.999, 200, 0.05)


def test_detectable_difference_is_found_with_its_power():
    error, freedom, power = 0.01, 30, 0.8
    difference = minimum_detectable(error, freedom, 0.05, power)
    critical = stats.t.ppf(0.975, freedom)
    assert stats.nct.sf(critical, freedom, difference / error) == pytest.approx(power, abs=0.01)


def test_more_seeds_are_needed_for_smaller_differences():
    draws = np.random.default_rng(3)
    luck = draws.normal(0, 0.03, (4, 1))
    base = draws.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=(4, 4000))
    needed = [seeds_needed(base + luck - luck.mean() - base.mean() + shift, 0.05, 0.8) for shift in (0.2, 0.06, 0.04)]
    assert None not in needed
    assert 2 <= needed[0] < needed[1] < needed[2] <= MAX_SEEDS_SEARCHED


def test_no_number_of_seeds_shows_nothing():
    differences = np.random.default_rng(3).choice([-1.0, 0.0, 1.0], size=(3, 50))
    assert seeds_needed(differences - differences.mean(), 0.05, 0.8) is None


def test_questions_needed_make_the_difference_detectable():
    error, questions, difference = 0.02, 500, 0.03
    number = questions_needed(error, questions, difference, 0.05, 0.8)
    scaled = error * math.sqrt(questions / number)
    assert minimum_detectable(scaled, number - 1, 0.05, 0.8) <= difference * (1 + 1e-6)
    assert number > questions
    assert questions_needed(error, questions, 0.0, 0.05, 0.8) is None
