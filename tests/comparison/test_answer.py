"""The sentence that answers a study: yes, no or not known, every kind of claim, either sign, in both languages."""

import pytest

from aqnpipe.artifacts.base import statement
from aqnpipe.artifacts.comparisons import Claim, ClaimsFile
from aqnpipe.artifacts.looks import ClaimAtLook
from aqnpipe.comparison.claims import answer_of
from aqnpipe.config.analysis import ArmComparison
from aqnpipe.report.claims import answer_text
from aqnpipe.report.words import load_words

NBSP = "\u00a0"
CLAIM = "Training with 5 % noise makes 10 % evaluation noise cost less"
ASKED = ArmComparison(treatment="E5", control="baseline", expected="higher", equivalent_within=0.015, claim=CLAIM)


def row(**changes):
    return {
        "comparison_id": "c",
        "kind": "degradation",
        "treatment_level": 0.1,
        "difference": 0.034,
        "interval_level": 0.95,
        "ci_low": -0.001,
        "ci_high": 0.068,
        "margin": None,
        "num_seeds": 2,
        "num_questions": 500,
        "seeds_needed": 7,
        "questions_needed": None,
    } | changes


def claim_of(verdict="not_shown", role="primary", **changes):
    settings = {"comparison_id": "c", "claim": CLAIM, "role": role, "verdict": verdict, "seeds": ()}
    return Claim.model_validate(settings | changes)


def sentence(verdict="not_shown", language="en", claim=None, looks=None, **changes):
    claims = [claim or claim_of(verdict)]
    answer = answer_of(claims, [row(**changes)], looks or {}, {"c": ASKED}, 0.8)
    file = ClaimsFile(alpha=0.05, power=0.8, family_size=0, families=(), claims=claims, answer=answer)
    found = answer_text(file, load_words(language))
    return found and found.replace(NBSP, " ")


def test_yes_in_the_words_of_the_claim_with_effect_interval_and_sample():
    assert sentence("supported", ci_low=0.001) == (
        "Yes: training with 5 % noise makes 10 % evaluation noise cost less; 10 % noise costs 3.4 points less "
        "(95 % interval +0.1 to +6.8; 2 seeds, 500 questions)."
    )


def test_not_known_names_the_further_seeds_that_would_decide():
    assert sentence() == (
        "Not known whether training with 5 % noise makes 10 % evaluation noise cost less; 10 % noise costs 3.4 points "
        "less (95 % interval −0.1 to +6.8; 2 seeds, 500 questions); 5 more seeds would decide it (80 %, if the true "
        "difference is this one)."
    )
    assert "; 1 more seed would decide it" in sentence(num_seeds=7)


def test_no_has_the_interval_in_the_direction_of_its_effect():
    assert sentence("refuted", difference=-0.034, ci_low=-0.068, ci_high=-0.002) == (
        "No: it is not so that training with 5 % noise makes 10 % evaluation noise cost less; 10 % noise costs 3.4 "
        "points more (95 % interval +0.2 to +6.8; 2 seeds, 500 questions)."
    )


def test_an_equivalent_claim_is_no_or_less_than_its_margin():
    found = sentence("equivalent", kind="arms", difference=0.001, ci_low=-0.008)
    assert found.startswith("No: it is not so, or only by less than 1.5 points, that training with 5 % noise makes ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "arms"}, "; accuracy is 3.4 points higher (95 % interval −0.1 to +6.8; "),
        (
            {"kind": "levels", "difference": -0.2, "ci_low": -0.3, "ci_high": -0.1},
            "; accuracy is 20.0 points lower (95 % interval +10.0 to +30.0; ",
        ),
        ({"kind": "arms", "margin": 0.02}, "(95 % interval −0.1 to +6.8, margin 2.0; 2 seeds"),
    ],
)
def test_other_kinds(changes, words):
    assert words in sentence("supported", **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seeds_needed": None}, "no number of seeds decides it on these questions."),
        ({"seeds_needed": None, "num_seeds": 1, "questions_needed": 1200}, "; 1,200 questions in all would"),
        ({"claim": claim_of(statements=(statement("claim.one_run"),))}, "; one seed per arm cannot show it"),
        (
            {"looks": {"c": ClaimAtLook(comparison_id="c", state="futile", look=2, seeds=4, chance=0.03)}},
            "; more seeds are unlikely to decide it (chance 3 %).",
        ),
    ],
)
def test_not_known_says_why(changes, why):
    assert why in sentence(**changes)


def test_a_claim_without_data_says_why():
    claim = claim_of("invalid", claim="It works", invalid_reason="missing runs")
    assert sentence(claim=claim) == "Not known whether it works: missing runs."


@pytest.mark.parametrize("text", ["E5 helps", "AQN helps", "Qwen2.5 improves"])
def test_names_keep_their_capitals(text):
    assert sentence("supported", claim=claim_of("supported", claim=text)).startswith(f"Yes: {text}; ")


def test_without_a_primary_claim_there_is_no_answer():
    assert sentence(claim=claim_of(role="secondary")) is None
    assert answer_of([], [], {}, {}, 0.8) is None


def test_it_is_chinese_in_a_chinese_report():
    claim = claim_of(claim_zh="带噪声的训练更稳健")
    assert sentence(language="zh", claim=claim).startswith("尚不清楚是否带噪声的训练更稳健；10 % 噪声的代价小 3.4")
    assert "〔未提供中文〕" in sentence(language="zh")
