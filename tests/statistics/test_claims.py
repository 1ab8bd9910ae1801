import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqnpipe.config.analysis import ArmComparison, LevelComparison
from aqnpipe.statistics.claims import holm, points, sentence_of, verdict_of
from aqnpipe.statistics.contrasts import Contrast, Side
from aqnpipe.statistics.seeds import estimate_difference

probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03 times 3, 2, 1, then made monotone: 0.03, 0.04, 0.04."""
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([]) == []


@given(probabilities)
@settings(max_examples=25, deadline=None)  # statsmodels collects garbage in every call, about 0.1 s
def test_holm_keeps_the_order_and_never_helps(p_values):
    adjusted = holm(p_values)
    order = np.argsort(p_values)
    assert all(after >= before - 1e-12 for before, after in zip(p_values, adjusted, strict=True))
    assert np.all(np.diff(np.array(adjusted)[order]) >= -1e-12)
    assert max(adjusted) <= 1


def contrast(treatment, control, kind="arms", expected="higher"):
    if kind == "arms":
        comparison = ArmComparison(treatment="E5b", control="E5", expected=expected, claim="AQN helps")
        sides = Side("base", "E5b", 0.0), Side("base", "E5", 0.0)
    else:
        comparison = LevelComparison(arm="E5b", noise_level=0.1, expected=expected, claim="noise hurts")
        sides = Side("base", "E5b", 0.1), Side("base", "E5b", 0.0)
    return Contrast("id", comparison, *sides, tuple(range(len(treatment))), treatment, control, (), None)


def judged(one, p_holm=None):
    estimate = estimate_difference(one.treatment_scores, one.control_scores, 0.05)
    p_holm = estimate.p_value if p_holm is None else p_holm
    verdict = verdict_of(one, estimate, p_holm, 0.05)
    return verdict, sentence_of(one, estimate, verdict, p_holm, 0.05, 0.8, 0.95)


def answers(seeds, accuracy, seed):
    return (np.random.default_rng(seed).random((seeds, 300)) < accuracy).astype(float)


def test_clear_differences_are_supported_or_refuted_by_their_direction():
    better, worse = answers(3, 0.8, 1), answers(3, 0.5, 2)
    assert judged(contrast(better, worse))[0] == "supported"
    verdict, sentence = judged(contrast(worse, better))
    assert verdict == "refuted"
    assert "goes against the claim" in sentence
    assert judged(contrast(worse, better, expected="lower"))[0] == "supported"


def test_holm_and_not_the_single_p_decides():
    assert judged(contrast(answers(3, 0.8, 1), answers(3, 0.5, 2)), p_holm=0.05)[0] == "not_shown"


def test_a_single_run_per_arm_never_shows_an_effect_of_the_arm():
    verdict, sentence = judged(contrast(answers(1, 0.9, 1), answers(1, 0.3, 2)))
    assert verdict == "not_shown"
    assert "luck of training" in sentence
    assert "at least two seeds" in sentence


def test_a_single_run_can_show_what_noise_does_to_it():
    assert judged(contrast(answers(1, 0.3, 1), answers(1, 0.9, 2), "levels", "lower"))[0] == "supported"


def test_the_sentence_carries_the_numbers():
    treatment, control = answers(3, 0.62, 1), answers(3, 0.6, 2)
    estimate = estimate_difference(treatment, control, 0.05)
    verdict, sentence = judged(contrast(treatment, control))
    plain = sentence.replace("\u00a0", " ")
    assert verdict == "not_shown"
    assert f"{100 * treatment.mean():.1f} %" in plain
    assert f"{100 * control.mean():.1f} %" in plain
    assert f"{points(estimate.difference, sign=True)} percentage points" in plain
    assert f"{points(estimate.ci_low, sign=True)} to {points(estimate.ci_high, sign=True)}" in plain
    assert f"p = {estimate.p_value:.2f}" in plain
    assert "3 seeds, 300 questions" in plain
    assert "80 % power" in plain


def test_identical_sides_are_said_to_be_identical():
    same = answers(2, 0.6, 1)
    verdict, sentence = judged(contrast(same, same))
    assert verdict == "not_shown"
    assert "every question is answered equally well" in sentence


def test_points_have_no_minus_before_zero():
    assert points(-0.0001, sign=True) == "+0.0"
    assert points(-0.0243, sign=True) == "−2.4"
