import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from aqnpipe.statistics.crossed_effects import (
    estimate_difference,
    interaction_variance,
    two_way_spread,
)
from aqnpipe.statistics.seed_blocks import SeedVariance
from aqnpipe.statistics.spread import VariancePart


def answers(seeds=3, questions=40, accuracy=0.6, seed=0):
    return (np.random.default_rng(seed).random((seeds, questions)) < accuracy).astype(float)


def test_two_way_spread_by_hand():
    """Seed means 0.25 and 0.75 (variance 1/8), question means 0, 0.5, 0.5, 1 (1/6), what is left over +-0.25 (1/6).

    The interaction 1/6 is in both, and is taken off the questions: 1/6/4 - 1/6/8.
    """
    spread = two_way_spread(np.array([[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]))
    assert [part.variance for part in spread.parts] == pytest.approx([1 / 8 / 2, 1 / 6 / 4 - 1 / 6 / 8])
    assert [part.degrees_of_freedom for part in spread.parts] == [1, 3]


def test_seed_variance_of_the_study_takes_the_place_of_two_seeds():
    differences = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]])
    moderated = SeedVariance(VariancePart(0.5, 6.0), shared=VariancePart(0.3, 1.0), num_arms=4)
    spread = two_way_spread(differences, moderated)
    assert [part.variance for part in spread.parts[:2]] == [0.15, 0.25]
    assert [part.degrees_of_freedom for part in spread.parts[:2]] == [1.0, 6.0]


def test_runs_without_others_vary_at_least_as_much_as_their_answers_make_them():
    """Both seeds have the mean 1/2, so their means do not vary; the answers do."""
    differences = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]])
    spread = two_way_spread(differences)
    assert spread.parts[0].variance == pytest.approx(interaction_variance(differences) / 4 / 2)


def test_estimate_over_seeds_uses_that_spread():
    treatment, control = answers(accuracy=0.8, seed=1), answers(accuracy=0.5, seed=2)
    estimate = estimate_difference(treatment, control)
    spread, mean = two_way_spread(treatment - control), (treatment - control).mean()
    assert estimate.method == "two_way"
    assert estimate.covers_seed_variance
    assert estimate.two_sided_p() == pytest.approx(2 * spread.upper_tail(mean))
    low, high = estimate.interval(0.95)
    assert (low, high) == pytest.approx((mean - spread.half_width(0.95), mean + spread.half_width(0.95)))
    assert estimate.analysis == ("two_way", "own", "behrens_fisher")


def test_p_and_interval_agree_whatever_the_test():
    """Where the p-value against a bound is 2.5 %, an end of the 95 % interval is that bound."""
    estimate = estimate_difference(answers(3, 200, 0.62, 1), answers(3, 200, 0.6, 2))
    low, high = estimate.interval(0.95)
    assert estimate.upper_p(low) == pytest.approx(0.025, rel=1e-4)
    assert estimate.lower_p(high) == pytest.approx(0.025, rel=1e-4)


def test_one_noise_seeded_run_is_the_paired_t_test():
    treatment, control = answers(1, 60, 0.8, 1), answers(2, 60, 0.5, 2).mean(axis=0, keepdims=True)
    estimate = estimate_difference(treatment, control)
    reference = stats.ttest_rel(treatment[0], control[0])
    assert estimate.method == "questions"
    assert not estimate.covers_seed_variance
    assert estimate.two_sided_p() == pytest.approx(reference.pvalue)
    assert estimate.interval(0.95) == pytest.approx(tuple(reference.confidence_interval(0.95)))
    shifted = stats.ttest_rel(treatment[0] + 0.05, control[0], alternative="greater")
    assert estimate.upper_p(-0.05) == pytest.approx(shifted.pvalue)


def test_one_run_of_right_or_wrong_is_mcnemars_test():
    treatment, control = np.array([[1.0] * 8 + [0.0] * 4]), np.array([[0.0] * 6 + [1.0] * 2 + [0.0] * 4])
    estimate = estimate_difference(treatment, control)
    assert estimate.method == "mcnemar"
    assert estimate.difference == pytest.approx(0.5)
    assert estimate.two_sided_p() == pytest.approx(2 * stats.norm.sf(6 / 6**0.5))


def test_identical_outputs_have_p_1_and_an_honest_interval():
    same = answers()
    estimate = estimate_difference(same, same)
    assert (estimate.method, estimate.difference, estimate.two_sided_p()) == ("no_variance", 0.0, 1.0)
    assert estimate.spread is None
    low, high = estimate.interval(0.95)
    assert low < 0 < high


def test_a_difference_without_variance_is_tested_over_the_questions():
    for sign in (1, -1):
        estimate = estimate_difference(np.full((2, 5), sign > 0, dtype=float), np.full((2, 5), sign < 0, dtype=float))
        assert (estimate.method, estimate.difference) == ("no_variance", sign)
        assert estimate.two_sided_p() == pytest.approx(2 * stats.norm.sf(5**0.5))


def test_seed_and_question_means_that_cancel_do_not_give_a_certain_result():
    estimate = estimate_difference(np.array([[1.0, 0.0], [0.0, 1.0]]), np.zeros((2, 2)))
    assert estimate.two_sided_p() > 0.05


@pytest.mark.parametrize("outcomes", [[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]])
def test_means_without_variance_count_for_the_side_that_has_more_whatever_the_first_answer_is(outcomes):
    better, none = np.array(outcomes), np.zeros((2, 2))
    for_it, against = estimate_difference(better, none), estimate_difference(none, better)
    assert (for_it.method, for_it.difference, against.difference) == ("no_variance", 0.5, -0.5)
    assert (for_it.counts.only_treatment, for_it.counts.only_control) == (2, 0)
    assert against.counts == for_it.counts.swapped()


def test_a_pretrained_control_stands_against_every_seed():
    treatment, control = answers(3, 40, 0.9), answers(1, 40, 0.4)
    estimate = estimate_difference(treatment, control)
    assert estimate.num_seeds == 3
    assert estimate.difference == pytest.approx(treatment.mean() - control.mean())


def test_too_little_data_is_refused():
    with pytest.raises(ValueError, match="at least 1 seed and 2 questions"):
        estimate_difference(np.ones((1, 1)), np.ones((1, 1)))


outcomes = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(2, 12)), elements=st.sampled_from([0.0, 1.0]))


@given(outcomes, st.data())
@settings(deadline=None)
def test_swapping_sides_negates_the_difference(treatment, data):
    control = data.draw(arrays(np.float64, treatment.shape, elements=st.sampled_from([0.0, 1.0])))
    forward, backward = estimate_difference(treatment, control), estimate_difference(control, treatment)
    assert backward.difference == pytest.approx(-forward.difference)
    assert backward.two_sided_p() == pytest.approx(forward.two_sided_p())
    assert backward.upper_p(-0.1) == pytest.approx(forward.lower_p(0.1))
    (low, high), (back_low, back_high) = forward.interval(0.95), backward.interval(0.95)
    assert (back_low, back_high) == (pytest.approx(-high), pytest.approx(-low))
