"""The sentence that answers a study: every kind of claim, either sign, in both languages."""

import pytest

from aqnpipe.artifacts.comparisons import Claim
from aqnpipe.comparison.answer import answer_of
from aqnpipe.report.words import load_words

NBSP = "\u00a0"


def row(**changes):
    return {
        "comparison_id": "c",
        "kind": "degradation",
        "treatment": "E5b",
        "control": "baseline",
        "treatment_level": 0.1,
        "treatment_accuracy": 0.486,
        "control_accuracy": 0.47,
        "treatment_change": -0.244,
        "control_change": -0.278,
        "difference": 0.034,
        "interval_level": 0.95,
        "ci_low": -0.001,
        "ci_high": 0.068,
        "margin": None,
        "num_seeds": 2,
        "num_questions": 500,
    } | changes


def sentence(verdict="not_shown", language="en", role="primary", **changes):
    claim = Claim(comparison_id="c", claim="E5b tolerates noise", role=role, verdict=verdict, seeds=())
    answer = answer_of([claim], [row(**changes)], {})
    return answer and load_words(language).of(answer).replace(NBSP, " ")


def test_a_degradation():
    assert sentence() == (
        "Not shown: E5b lost 24.4 points to 10 % noise, baseline 27.8; 3.4 fewer, "
        "95 % interval −0.1 to +6.8 (2 seeds, 500 questions)."
    )


def test_the_interval_has_the_direction_of_the_sentence():
    found = sentence("refuted", difference=-0.034, ci_low=-0.068, ci_high=-0.002)
    assert found.startswith("Refuted: E5b lost ")
    assert "3.4 more, 95 % interval +0.2 to +6.8" in found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kind": "arms", "treatment_level": 0.0},
            "Supported: E5b answered 48.6 % correctly, baseline 47.0 %; 3.4 points more, ",
        ),
        (
            {"kind": "arms"},
            "Supported: at 10 % noise E5b answered 48.6 % correctly, baseline 47.0 %; 3.4 points more, ",
        ),
        (
            {"kind": "levels", "difference": -0.2, "ci_low": -0.3, "ci_high": -0.1},
            "Supported: E5b answered 48.6 % correctly at 10 % noise and 47.0 % without; 20.0 points fewer, "
            "95 % interval +10.0 to +30.0",
        ),
        ({"margin": 0.02}, "95 % interval −0.1 to +6.8, margin 2.0 (2 seeds"),
    ],
)
def test_other_kinds(changes, words):
    assert words in sentence("supported", **changes)


def test_a_claim_without_data_says_why():
    claim = Claim(
        comparison_id="c", claim="It works", role="primary", verdict="invalid", seeds=(), invalid_reason="missing runs"
    )
    assert load_words("en").of(answer_of([claim], [row()], {})) == "Not answered: It works: missing runs."


def test_without_a_primary_claim_there_is_no_answer():
    assert sentence(role="secondary") is None
    assert answer_of([], [], {}) is None


def test_it_is_chinese_in_a_chinese_report():
    assert sentence(language="zh").startswith(
        "未证实：10 % 噪声使 E5b 损失 24.4 个百分点，baseline 损失 27.8；少损失 3.4"
    )
