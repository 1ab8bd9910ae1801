from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqnpipe.artifacts.base import Statement, statement
from aqnpipe.artifacts.comparisons import Claim, ClaimAtLook, ClaimsFile, RefusalKind
from aqnpipe.comparison.claims import answer_of, statements_of
from aqnpipe.comparison.contrasts import Contrast, Scores, Side
from aqnpipe.comparison.judgement import adjusted_tests, evidence_of, judge
from aqnpipe.config.analysis import ArmComparison, DegradationComparison, LevelComparison, StatisticsConfig
from aqnpipe.report.claims import answer_text, sentence_text
from aqnpipe.report.numbers import percent, points
from aqnpipe.report.words import load_words
from aqnpipe.statistics.crossed_effects import estimate_difference
from aqnpipe.statistics.sample_sizes import VarianceParts, questions_needed, variance_parts

SETTINGS = StatisticsConfig()
ENGLISH, CHINESE = load_words("en"), load_words("zh")

NBSP = "\u00a0"
CLAIM = "Training with 5 % noise makes 10 % evaluation noise cost less"
ASKED = ArmComparison(treatment="E5", control="baseline", expected="higher", equivalent_within=0.015, claim=CLAIM)


@dataclass
class Sentence:
    """The statements of a comparison as the report shows them."""

    en: str
    zh: str


def judged_statements(
    treatment, control, kind="arms", p_holm=None, family_size=1, by_scorer=None, accuracies=None, **test
):
    test = test or {"expected": "lower" if kind == "levels" else "higher"}
    if kind == "levels":
        comparison = LevelComparison(arm="E5b", noise_level=0.1, claim="noise hurts", **test)
        sides = Side("base", "E5b", 0.1), Side("base", "E5b", 0.0)
    else:
        cls = DegradationComparison if kind == "degradation" else ArmComparison
        level = 0.1 if kind == "degradation" else 0.0
        comparison = cls(treatment="E5b", control="E5", noise_level=level, claim="AQN helps", **test)
        sides = Side("base", "E5b", level), Side("base", "E5", level)
    accuracies = accuracies or (float(treatment.mean()), float(control.mean()))
    scores = Scores(treatment, control, *accuracies, None, by_scorer=by_scorer or {})
    contrast = Contrast("id", comparison, *sides, scores, None)
    estimate = estimate_difference(treatment, control)
    found = evidence_of(contrast, estimate)
    other = {} if found.p_other is None else {"id": found.p_other}
    tests, others = adjusted_tests({"id": comparison}, {"id": found.p_value}, other, SETTINGS.alpha)
    claimed = tests["id"] if p_holm is None else replace(tests["id"], p_holm=p_holm)
    sizes = variance_parts(treatment - control), (claimed, others.get("id")), family_size
    judgement = judge(found, *sizes, SETTINGS)
    return judgement, statements_of(found, judgement, SETTINGS)


def judged(*sides, **test):
    """Return the verdict on a comparison, and what the report says about it."""
    judgement, statements = judged_statements(*sides, **test)
    return judgement, Sentence(ENGLISH.all_of(statements), CHINESE.all_of(statements))


def answers(seeds, accuracy, seed, questions=300):
    return (np.random.default_rng(seed).random((seeds, questions)) < accuracy).astype(float)


def test_clear_differences_are_supported_or_refuted_by_their_direction():
    better, worse = answers(4, 0.8, 1), answers(4, 0.5, 2)
    assert judged(better, worse)[0].verdict == "supported"
    judgement, sentence = judged(worse, better)
    assert judgement.verdict == "refuted"
    assert "goes against the claim" in sentence.en
    assert "相反" in sentence.zh
    assert judged(worse, better, expected="lower")[0].verdict == "supported"


def test_the_holm_adjusted_p_decides():
    assert judged(answers(4, 0.8, 1), answers(4, 0.5, 2), p_holm=0.05)[0].verdict == "not_shown"


def test_a_single_run_per_arm_never_shows_an_effect_of_the_arm():
    for kind in ("arms", "degradation"):
        judgement, sentence = judged(answers(1, 0.9, 1), answers(1, 0.3, 2), kind)
        assert judgement.verdict == "not_shown"
        assert judgement.seeds_needed is None
        assert "run-to-run (seed) variance" in sentence.en
        assert "at least two seeds" in sentence.en
    margin = {"test": "non_inferiority", "margin": 0.05}
    assert judged(answers(1, 0.9, 1), answers(1, 0.3, 2), **margin)[0].verdict == "not_shown"


def test_a_single_run_can_show_what_noise_does_to_it():
    assert judged(answers(1, 0.3, 1), answers(1, 0.9, 2), "levels")[0].verdict == "supported"


def test_non_inferiority_is_decided_by_its_margin():
    """1 point lower with a standard error of about 1 point: not worse by 5 points, but perhaps by 2."""
    control = answers(5, 0.7, 1, questions=2000)
    treatment = control.copy()
    treatment[:, :20] = 0.0
    assert judged(treatment, control, test="non_inferiority", margin=0.05)[0].verdict == "supported"
    _, sentence = judged(treatment, control, test="non_inferiority", margin=0.05)
    assert "E5b is worse than E5 by less than 5.0 points" in sentence.en
    assert "不到 5.0 个百分点" in sentence.zh
    judgement, sentence = judged(treatment, control, test="non_inferiority", margin=0.002)
    assert judgement.verdict == "refuted"
    assert "beyond the margin" in sentence.en


def test_equivalence_needs_both_sides():
    same = answers(4, 0.7, 1, questions=1000)
    other = same.copy()
    other[:, ::100] = 1 - other[:, ::100]
    judgement, sentence = judged(other, same, test="equivalence", margin=0.05)
    assert judgement.verdict == "supported"
    assert "differ by less than 5.0 points" in sentence.en
    assert judgement.interval_level == pytest.approx(0.9)
    assert -0.05 < judgement.ci_low < judgement.ci_high < 0.05
    assert judged(answers(4, 0.9, 3), answers(4, 0.5, 2), test="equivalence", margin=0.05)[0].verdict == "refuted"
    wide = judged(answers(3, 0.71, 3, 60), answers(3, 0.7, 4, 60), test="equivalence", margin=0.01)
    assert wide[0].verdict == "not_shown"
    assert "inside the margin" in wide[1].en


@given(st.floats(-0.03, 0.03), st.sampled_from([0.02, 0.05]))
@settings(max_examples=30, deadline=None)
def test_margins_are_decided_as_the_interval_says(shift, margin):
    """Before Holm, TOST at alpha supports the claim if and only if the 1 - 2*alpha interval is inside the margins."""
    control = answers(3, 0.7, 1)
    treatment = control + shift + np.random.default_rng(5).normal(0, 0.2, control.shape)
    judgement, _ = judged(treatment, control, test="equivalence", margin=margin)
    inside = -margin < judgement.ci_low and judgement.ci_high < margin
    assert (judgement.verdict == "supported") == inside
    judgement, _ = judged(treatment, control, test="non_inferiority", margin=margin)
    assert (judgement.verdict == "supported") == (judgement.ci_low > -margin)


def test_a_larger_family_needs_more_data():
    small, large = (judged(answers(3, 0.62, 1), answers(3, 0.6, 2), family_size=n)[0] for n in (1, 20))
    assert large.minimum_detectable_difference > small.minimum_detectable_difference
    parts = VarianceParts(seed=0.0, question=0.2, residual=0.1)
    assert questions_needed(parts, 3, 0.02, 0.05 / 40, 0.8) > questions_needed(parts, 3, 0.02, 0.05 / 2, 0.8)


def test_the_sentence_carries_the_numbers():
    treatment, control = answers(3, 0.62, 1), answers(3, 0.6, 2)
    judgement, sentence = judged(treatment, control)
    assert judgement.verdict == "not_shown"
    for text in (sentence.en.replace("\u00a0", " "), sentence.zh.replace("\u00a0", " ")):
        assert f"{100 * treatment.mean():.1f} %" in text
        assert f"{100 * control.mean():.1f} %" in text
        assert points((treatment - control).mean()) in text
        assert points(judgement.ci_low) in text
        assert points(judgement.ci_high) in text
        assert f"p = {judgement.p_value:.2f}" in text
        assert percent(judgement.minimum_detectable_difference) in text
    assert "3 seeds, 300 questions" in sentence.en
    assert "3 个种子，300 道题" in sentence.zh


def test_the_sentence_of_a_degradation_has_both_costs():
    control = answers(3, 0.7, 1) * 0.0
    treatment = control - 0.1
    treatment[:, 0] = -0.2
    _, sentence = judged(treatment, control, "degradation")
    assert "From no noise to 10\u00a0% noise, E5b changes by −10.0 points and E5 by +0.0" in sentence.en


def test_the_sentence_of_identical_sides():
    same = answers(2, 0.6, 1)
    judgement, sentence = judged(same, same)
    assert judgement.verdict == "not_shown"
    assert "every question is answered equally well" in sentence.en


def test_points_have_no_minus_before_zero():
    assert points(-0.0001) == "+0.0"
    assert points(-0.0243) == "−2.4"


def test_statements_survive_their_file():
    treatment, control = answers(3, 0.62, 1), answers(3, 0.6, 2)
    _, statements = judged_statements(treatment, control)
    assert statements[0].key == "claim.difference"
    assert statements[0].values["difference"] == pytest.approx((treatment - control).mean())
    for found in statements:
        assert Statement.model_validate_json(found.model_dump_json()) == found


def test_every_refusal_has_a_text():
    for kind in RefusalKind.__args__:
        claim = Claim(
            comparison_id="id", claim="", verdict="invalid", seeds=(), invalid_kind=kind, invalid_reason="why"
        )
        assert sentence_text(claim, ENGLISH) == "Not compared: why."
        assert "why" in sentence_text(claim, CHINESE)
    assert len(
        {sentence_text(claim.model_copy(update={"invalid_kind": kind}), CHINESE) for kind in RefusalKind.__args__}
    ) == len(RefusalKind.__args__)


def test_seeds_are_given_for_effects_of_1_2_and_5_points_and_for_an_estimate_that_points_either_way():
    worse, better = answers(4, 0.60, 1), answers(4, 0.62, 2)
    judgement, sentence = judged(worse, better, expected="higher")
    assert judgement.verdict == "not_shown"
    assert judgement.seeds_needed == judged(worse, better, expected="lower")[0].seeds_needed > 4
    one, two, five = judgement.seeds_for
    assert five < (two or 1001) <= (one or 1001)
    assert f"{five} for 5.0 points" in sentence.en
    assert f"{one} for 1.0 points" in sentence.en


def test_one_run_of_each_arm_shows_nothing_and_prints_no_p_value_or_interval():
    """Whatever the difference: by itself it is that of two runs, which other seeds of the same arm have too."""
    _, sentence = judged(answers(1, 0.8, 1), answers(1, 0.5, 2))
    assert "a difference of +27.3 percentage points (1 seed, 300 questions). With a single training run" in sentence.en


def test_a_degradation_shows_both_of_its_parts():
    """At the level 70 % on both sides; the treatment lost 10 points less from a clean accuracy 10 points lower."""
    changes = np.full((3, 300), -0.1), np.full((3, 300), -0.2)
    _, sentence = judged(*changes, "degradation", accuracies=(0.7, 0.7), expected="higher")
    assert "This is +0.0 points at 10\xa0% noise less −10.0 points without noise." in sentence.en


def test_an_effect_that_other_scorers_hardly_see_says_so():
    better, worse = answers(4, 0.8, 1), answers(4, 0.6, 2)
    _, sentence = judged(better, worse, by_scorer={"last_number": 0.05, "harness_strict": 0.19})
    assert "By the scorer last_number, the difference is +5.0 points" in sentence.en
    assert "harness_strict" not in sentence.en
    assert "按评分器 last_number" in sentence.zh
    _, sentence = judged(better, worse, by_scorer={"last_number": -0.02})
    assert "By the scorer last_number, the difference is −2.0 points" in sentence.en


BETTER, WORSE = (np.repeat([[1.0, 0.0]], counts, axis=1) for counts in ([240, 60], [180, 120]))
"""One run of 80 % and one of 60 %."""


@pytest.mark.parametrize(("by_number", "part"), [(0.15, "+5.0"), (0.2, "+0.0"), (0.22, "−2.0")])
def test_a_control_says_how_much_of_its_difference_is_answer_format(by_number, part):
    """The control is 80 against 60 % by the study's scorer; what answer format makes of it may also be against it."""
    _, sentence = judged(BETTER, WORSE, by_scorer={"last_number": by_number}, role="control", expected="higher")
    graded = f"the difference is +{100 * by_number:.1f} points."
    assert f"Answer format makes {part} points of it: graded by the last number in the text, {graded}" in sentence.en
    assert f"其中答案格式占 {part} 个百分点" in sentence.zh
    _, sentence = judged(BETTER, WORSE, by_scorer={"last_number": by_number}, expected="higher")
    assert "Answer format" not in sentence.en, "only of a control"


def test_the_part_of_a_loss_is_negative():
    _, sentence = judged(WORSE, BETTER, by_scorer={"last_number": -0.12}, role="control", expected="lower")
    assert "Answer format makes −8.0 points of it: graded by the last number in the text, the difference is −12.0" in (
        sentence.en
    )


@pytest.mark.parametrize("by_scorer", [{}, {"harness_strict": 0.15}, {"last_number": 0.05}, {"last_number": -0.2}])
def test_a_control_whose_effect_is_of_the_format_says_it_once(by_scorer):
    """Nor does one that is graded by the last number itself, or has no numbers."""
    _, sentence = judged(BETTER, WORSE, by_scorer=by_scorer, role="control", expected="higher")
    assert "Answer format" not in sentence.en
    assert ("the effect depends on the format of the answers" in sentence.en) == ("last_number" in by_scorer)


ROLES = ("primary", "control", "secondary", "secondary", "secondary")


def random_claims(draws):
    """Return five claims on random data, of random tests, with their estimates."""
    contrasts, estimates = {}, {}
    for number, role in enumerate(ROLES):
        test = draws.choice(["superiority", "non_inferiority", "equivalence"])
        hypothesis = {"expected": str(draws.choice(["higher", "lower", "different"]))} if test == "superiority" else {
            "margin": float(draws.choice([0.02, 0.1]))
        }  # fmt: skip
        if test == "superiority" and draws.random() < 0.5:
            hypothesis["equivalent_within"] = float(draws.choice([0.03, 0.1]))
        claim = ArmComparison(treatment="E5b", control="E5", claim="", role=role, test=str(test), **hypothesis)
        # Kinds: of given weights, with values that are no yes or no, of several runs, of one run of each arm.
        kind, shift, seeds = draws.integers(4), draws.choice([0, 0, 0.05, -0.05, 0.15]), int(draws.integers(2, 6))
        control = draws.random((seeds if kind in (1, 2) else 1, 150))
        treatment = control + shift + draws.normal(0, draws.choice([0.05, 0.3]), control.shape)
        if kind != 1:
            treatment, control = (treatment > 0.4).astype(float), (control > 0.4).astype(float)
        sides = Side("base", "E5b", 0.0), Side("base", "E5", 0.0)
        scores = Scores(treatment, control, 0.5, 0.5, None)
        name = f"claim {number}"
        contrasts[name] = Contrast(name, claim, *sides, scores, None, of_weights=not kind)
        estimates[name] = estimate_difference(treatment, control)
    return contrasts, estimates


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_verdict_p_value_and_interval_agree(seed):
    """Whatever the data, tests and roles: the interval excludes what the verdict excludes, at the level that it has."""
    contrasts, estimates = random_claims(np.random.default_rng(seed))
    found = {name: evidence_of(contrast, estimates[name]) for name, contrast in contrasts.items()}
    tests, others = adjusted_tests(
        {name: contrast.comparison for name, contrast in contrasts.items()},
        {name: one.p_value for name, one in found.items()},
        {name: one.p_other for name, one in found.items() if one.p_other is not None},
        0.05,
    )
    for name, contrast in contrasts.items():
        parts, claim = VarianceParts(0.0, 0.1, 0.1), contrast.comparison
        judgement = judge(found[name], parts, (tests[name], others.get(name)), 1, SETTINGS)
        low, high, verdict = judgement.ci_low, judgement.ci_high, judgement.verdict
        if estimates[name].num_seeds == 1 and not contrast.of_weights:
            assert (verdict, low, high, judgement.p_value) == ("not_shown", None, None, None)
            continue
        if claim.role != "secondary":
            assert judgement.claimed.p_value == judgement.claimed.p_holm
            if claim.test == "superiority" and verdict != "equivalent":
                assert judgement.interval_level == pytest.approx(0.95)
        if claim.test == "superiority":
            excludes_0 = low > 0 or high < 0
            assert (verdict in ("supported", "refuted")) == (excludes_0 and verdict != "equivalent")
            assert excludes_0 == (verdict != "not_shown") or verdict == "equivalent"
            if verdict == "supported":
                assert claim.expected in ("different", "higher" if low > 0 else "lower")
            within = claim.equivalent_within
            if within is not None:
                assert (verdict == "equivalent") <= (-within < low and high < within)
                assert verdict != "not_shown" or not (-within < low and high < within)
        elif claim.test == "non_inferiority":
            assert (verdict == "supported") == (low > -claim.margin)
            assert (verdict == "refuted") == (high < -claim.margin)
        else:
            assert (verdict == "supported") == (low > -claim.margin and high < claim.margin)
            assert (verdict == "refuted") == (low > claim.margin or high < -claim.margin)


def test_the_primary_claim_is_tested_by_itself_and_controls_cost_the_others_nothing():
    """p = 0.046 of the primary claim stays; beside it, three controls and a secondary claim would have made it 0.23."""
    roles = {"first": "primary", "a": "control", "b": "control", "c": "control", "d": "secondary", "e": "secondary"}
    claims = {
        name: ArmComparison(treatment="E5b", control="E5", claim="", expected="higher", role=role)
        for name, role in roles.items()
    }
    values = {"first": 0.046, "a": 0.2, "b": 0.04, "c": 0.9, "d": 0.03, "e": 0.02}
    tests, _ = adjusted_tests(claims, values, {}, 0.05)
    assert {name: test.p_holm for name, test in tests.items()} == pytest.approx(values | {"d": 0.04, "e": 0.04})
    assert [tests[name].tail for name in ("first", "b", "d")] == pytest.approx([0.025] * 3)


@pytest.mark.parametrize("role", ["primary", "control"])
def test_only_secondary_claims_have_a_family(role):
    claim = {"arm": "E5", "noise_level": 0.1, "claim": ""}
    assert LevelComparison(**claim, role="secondary", family="noise").family == "noise"
    with pytest.raises(ValueError, match=f"family: found 'noise', expected none: a {role} claim is tested by itself"):
        LevelComparison(**claim, role=role, family="noise")


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
        "No: it is not the case that training with 5 % noise makes 10 % evaluation noise cost less; 10 % noise "
        "costs 3.4 points more (95 % interval +0.2 to +6.8; 2 seeds, 500 questions)."
    )


def test_an_equivalent_claim_is_no_or_less_than_its_margin():
    found = sentence("equivalent", kind="arms", difference=0.001, ci_low=-0.008)
    assert found.startswith(
        "No: it is not the case, or only by less than 1.5 points, that training with 5 % noise makes "
    )


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


def pair(first, second, level, p_holm, kind="degradation"):
    sides = {"treatment": first, "control": second, "treatment_level": level, "kind": kind, "p_holm": p_holm}
    return row(comparison_id=f"{first}-{second}-{level}", **sides)


def test_of_the_usual_pairs_the_most_shown_at_the_highest_level_answers():
    """Not the smallest p-value of another level, of accuracy, or of a numbered noise, whose level is above 1."""
    rows = [
        pair("a", "b", 0.0, 0.001, "arms"),
        pair("a", "b", 0.05, 0.002),
        pair("a", "b", 0.1, 0.04),
        pair("a", "c", 0.1, 0.01),
        pair("b", "c", 0.1, None),
        pair("a", "b", 1.0, 0.003),
    ]
    names = [one["comparison_id"] for one in rows]
    claims = [claim_of("supported", "secondary", comparison_id=name, claim=f"{name} differ") for name in names]
    tested = dict.fromkeys(names, DegradationComparison(**PAIR, noise_level=0.1))
    answer = answer_of(claims, rows, {}, tested, 0.8, has_usual_pairs=True)
    file = ClaimsFile(alpha=0.05, power=0.8, family_size=0, families=(), claims=claims, answer=answer)
    said = answer_text(file, ENGLISH).replace(NBSP, " ")
    assert said.startswith("Yes: a-c-0.1 differ; 10 % noise costs a 3.4 points less (")
    assert answer_of(claims, rows, {}, tested, 0.8) is None


PAIR = {"treatment": "a", "control": "b", "expected": "different", "claim": "a and b differ"}


def test_of_one_checkpoint_the_highest_noise_answers():
    rows = [pair("a", "a", level, 0.2, "levels") for level in (0.05, 0.1)]
    claims = [claim_of("refuted", "control", comparison_id=one["comparison_id"]) for one in rows]
    tested = {one["comparison_id"]: LevelComparison(arm="a", noise_level=0.1, claim=CLAIM) for one in rows}
    answer = answer_of(claims, rows, {}, tested, 0.8, has_usual_pairs=True)
    assert answer.values["finding"].key == "answer.accuracy.more"


def test_it_is_chinese_in_a_chinese_report():
    claim = claim_of(claim_zh="带噪声的训练更稳健")
    assert sentence(language="zh", claim=claim).startswith("尚不清楚是否带噪声的训练更稳健；10 % 噪声的代价小 3.4")
    assert "〔未提供中文〕" in sentence(language="zh")
