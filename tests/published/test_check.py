"""The check of published figures, against what is known about them from an independent analysis."""

import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportions_ztest

from aqnpipe.artifacts.base import statement
from aqnpipe.config.published import PublishedFile, RatioClaim
from aqnpipe.errors import ConfigError
from aqnpipe.published.check import check_published_figures, check_published_file
from aqnpipe.published.summary_tests import Proportion, Result, differences_result, largest_discordance
from aqnpipe.report.words import load_words
from aqnpipe.statistics.grim import agrees, possible_counts, possible_sizes

ENGLISH, CHINESE = load_words("en"), load_words("zh")
PUBLISHED = Path(__file__).parents[2] / "config" / "published.yaml"


@pytest.fixture(scope="module")
def checked():
    return check_published_file(PUBLISHED)


def claim(checked, name):
    return next(tested for tested in checked.claims if tested.id == name)


@pytest.mark.parametrize(
    ("name", "difference", "low", "high", "p_value"),
    [
        ("noise-hurts", -8.72, -12.1, -5.3, 5e-7),
        ("aqn-helps", 2.43, -1.09, 5.94, 0.18),
        ("global-helps", 0.61, -2.94, 4.15, 0.74),
        ("epoch-aware-beats-global", 1.82, -1.69, 5.33, 0.31),
        ("aqn-helps-all-operators", 1.14, -2.37, 4.65, 0.53),
        ("E5b-58-changes", -1.0, -9.1, 7.1, 0.81),
    ],
)
def test_the_known_table_is_reproduced(checked, name, difference, low, high, p_value):
    tested = claim(checked, name)
    assert tested.difference == pytest.approx(difference, abs=0.0051)
    assert tested.ci_low == pytest.approx(low, abs=0.051)
    assert tested.ci_high == pytest.approx(high, abs=0.051)
    assert tested.p_value == pytest.approx(p_value, rel=0.1)
    assert not [deviation for deviation in tested.deviations if "re-analysis" in deviation.values["source"]]


def test_an_impossible_accuracy_is_found_and_its_claim_is_void(checked):
    impossible = [accuracy for accuracy in checked.accuracies if not accuracy.possible]
    assert [accuracy.id for accuracy in impossible] == ["E7c"]
    assert impossible[0].nearest == pytest.approx((100 * 1180 / 1319, 100 * 1181 / 1319))
    assert 200 in impossible[0].possible_sizes
    assert 1319 not in impossible[0].possible_sizes
    tested = claim(checked, "aqn-helps-7B")
    assert tested.verdict == "invalid"
    assert "not possible with 1,319 questions (nearest: 89.46 and 89.54 %)" in ENGLISH.all_of(tested.statements)
    assert any("0.83" in ENGLISH.of(deviation) for deviation in tested.deviations)


def test_which_claims_stand(checked):
    verdicts = {tested.id: tested.verdict for tested in checked.claims}
    assert "supported" not in verdicts.values()
    assert {
        verdicts[name] for name in ("noise-hurts", "aqn-helps", "global-helps", "E5b-58-robust", "E7c-robust", "AA")
    } == {"not_shown"}
    assert {verdicts[name] for name in ("targeted-beats-global", "clean-recovery-E5b")} == {"invalid"}
    assert claim(checked, "noise-hurts").p_run_to_run == pytest.approx(
        2 * stats.t.sf(8.7187 / (1.6 * math.sqrt(2)), 5), rel=1e-3
    )


def test_holm_covers_the_scatter_of_runs_too(checked):
    """Over questions alone the harm of noise is certain; against six identical runs p is .012, times 17 claims."""
    tested = claim(checked, "noise-hurts")
    assert checked.family_size == 17
    assert tested.p_holm < 1e-4
    assert tested.p_run_to_run_holm == pytest.approx(17 * tested.p_run_to_run)
    assert ENGLISH.all_of(tested.statements).endswith("Holm-adjusted p\xa0=\xa00.20.")


def test_a_claim_without_scatter_of_runs_says_what_it_assumes(checked):
    assert "assumes that identical training runs do not differ" in ENGLISH.all_of(
        claim(checked, "four-times").statements
    )
    assert "identical training runs" not in ENGLISH.all_of(claim(checked, "E5b-58-changes").statements)


def test_figures_validated_under_noise_have_its_level(checked):
    levels = {accuracy.id: accuracy.noise_level for accuracy in checked.accuracies}
    assert (levels["baseline"], levels["E5"], levels["E7c"]) == (0.0, 0.05, 0.05)


def test_a_claim_is_refuted_only_beyond_its_margin_at_the_strictest_level():
    """80 % against 85 % of 1,000 questions, margin 1 point: -5 (SE 1.69), refuted alone and not among ten claims."""

    def verdict(number):
        claims = [
            {"id": f"c{i}", "claim": "no loss", "kind": "accuracies", "treatment": "a", "control": "b",
             "test": "non_inferiority", "margin": 0.01, "between_runs": False}
            for i in range(number)
        ]  # fmt: skip
        figures = [{"id": name, "label": name, "percent": f"{100 * value:.2f}", "num_questions": 1000}
                   for name, value in (("a", 0.80), ("b", 0.85))]  # fmt: skip
        file = PublishedFile.model_validate({"title": "t", "source": "s", "accuracies": figures, "claims": claims})
        return check_published_figures(file).claims[0].verdict

    assert (verdict(1), verdict(10)) == ("refuted", "not_shown")


def test_losses_are_worse_than_guessing(checked):
    above = {loss.id: loss.above_uniform for loss in checked.losses}
    assert above == {"clean": False, "dead-zone": True, "global": True, "targeted": True, "healthy": True}
    assert checked.losses[0].uniform == pytest.approx(11.93, abs=0.005)
    tested = claim(checked, "targeted-beats-global")
    reference = stats.ttest_ind_from_stats(12.8374, 0.0054, 5, 12.8606, 0.0105, 5, equal_var=False)
    assert tested.p_value == pytest.approx(reference.pvalue)
    assert tested.p_paired_low < 0.0126 < tested.p_paired_high
    assert any("paired t-test" in ENGLISH.of(note) for note in tested.notes)


def test_detectable_differences_and_where_they_differ(checked):
    large, small = checked.detectable
    assert (round(100 * large.asymptotic, 2), large.deviations) == (2.44, ())
    assert round(100 * small.asymptotic, 1) == 6.2
    assert "reported 6.5 points, recomputed 6.23" in ENGLISH.of(small.deviations[0])


def test_equal_accuracies_at_every_level_are_a_red_flag(checked):
    assert [series.id for series in checked.series if series.identical] == ["E5d-116"]


def test_a_ratio_is_unbounded_if_its_divisor_may_be_zero(checked):
    tested = claim(checked, "four-times")
    assert tested.verdict == "not_shown"
    assert (tested.ci_low, tested.ci_high) == (None, None)
    assert "interval unbounded" in ENGLISH.all_of(tested.statements)
    assert "区间无界" in CHINESE.all_of(tested.statements)


def test_fiellers_interval_holds_where_its_equation_does():
    """At its ends r the difference a - r*b is just significant: |a - r*b| = 1.96 * SE(a - r*b)."""
    shares = {"a": 0.9, "b": 0.7, "c": 0.5}
    proportions = {name: Proportion(share, 2000) for name, share in shares.items()}
    ratio = RatioClaim.model_validate(
        {
            "id": "r",
            "claim": "twice",
            "kind": "ratio",
            "first": {"treatment": "a", "control": "c"},
            "second": {"treatment": "b", "control": "c"},
            "expected": "higher",
        }
    )
    result = differences_result(ratio, proportions, 0.05)
    assert result.difference == pytest.approx(2.0)
    for end in (result.ci_low, result.ci_high):
        value = 0.4 - end * 0.2
        variance = (0.9 * 0.1 + end**2 * 0.7 * 0.3 + (end - 1) ** 2 * 0.25) / 2000
        assert abs(value) == pytest.approx(stats.norm.ppf(0.975) * math.sqrt(variance))


@given(st.integers(2, 3000), st.data())
def test_every_real_count_is_possible(number, data):
    count = data.draw(st.integers(0, number))
    assert count in possible_counts(f"{100 * count / number:.2f}", number)


def test_counts_by_hand():
    assert possible_counts("89.50", 1319) == ()
    assert possible_counts("89.50", 200) == (179,)
    assert possible_counts("89.5", 1319) == (1180, 1181)
    assert possible_counts("65.63", 640) == (420,)  # 65.625, rounded up
    assert possible_counts("65.62", 640) == (420,)  # the same, rounded to even
    assert possible_sizes("33.33", sizes=(4, 300)) == (3, 300)


def test_agreement_is_at_the_printed_precision():
    assert agrees(0.1764, "0.18")
    assert not agrees(0.1764, "0.17")
    assert agrees(4.6e-7, "5e-7")
    assert not agrees(4.4e-7, "5e-7")


def test_largest_discordance_is_where_mcnemar_turns():
    """50 more right of 1,000: significant by z = 50/sqrt(disagreements) - d^2 up to about 650 disagreements."""
    sides = (Proportion(0.75, 1000), Proportion(0.70, 1000))
    result = Result("a", "b", "points", 100.0, 5.0, None, None, None, statement("method.wald"), sides)
    limit = largest_discordance(result, 0.05)
    z = 0.05 * math.sqrt(1000) / math.sqrt(limit - 0.05**2)
    assert z == pytest.approx(stats.norm.ppf(0.975))


def minimal(**changes):
    content = {
        "title": "A paper",
        "source": "somewhere",
        "accuracies": [
            {"id": "ours", "label": "ours", "percent": "80.0", "num_questions": 1000},
            {"id": "theirs", "label": "theirs", "percent": "75.0", "num_questions": 1000},
        ],
        "claims": [
            {
                "id": "better",
                "claim": "ours is better",
                "kind": "accuracies",
                "treatment": "ours",
                "control": "theirs",
                "expected": "higher",
            }
        ],
    }
    return content | changes


def test_a_paper_without_more_than_two_accuracies():
    found = check_published_figures(PublishedFile.model_validate(minimal()))
    tested = found.claims[0]
    assert tested.verdict == "supported"
    assert tested.p_run_to_run is None
    pooled = proportions_ztest([800, 750], [1000, 1000])[1]
    assert tested.p_value == pytest.approx(pooled, rel=0.05)
    assert json.loads(found.model_dump_json())["claims"][0]["verdict"] == "supported"


def test_a_claim_that_a_paper_contradicts_is_refuted():
    content = minimal()
    content["claims"][0]["expected"] = "lower"
    assert check_published_figures(PublishedFile.model_validate(content)).claims[0].verdict == "refuted"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accuracies": [{"id": "a", "label": "a", "percent": 70.2, "num_questions": 10}]}, "percent"),
        ({"accuracies": [{"id": "a", "label": "a", "percent": "170", "num_questions": 10}]}, "percentage from 0"),
        ({"claims": [minimal()["claims"][0] | {"control": "nobody"}]}, "unknown id 'nobody'"),
        ({"claims": minimal()["claims"] * 2}, "id 'better' is used twice"),
        ({"titel": "x"}, "titel: unknown key"),
        ({"claims": [minimal()["claims"][0] | {"test": "equivalence", "expected": None}]}, "needs a margin"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, change, message):
    path = tmp_path / "paper.yaml"
    path.write_text(yaml.safe_dump(minimal(**change)))
    with pytest.raises(ConfigError, match=message) as caught:
        check_published_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_losses_of_every_run_are_paired():
    ours, theirs = [3.1, 2.9, 3.4, 3.0], [3.2, 3.1, 3.45, 3.2]
    losses = [
        {"id": name, "label": name, "mean": sum(v) / 4, "std": 0.2, "num_runs": 4, "values": v}
        for name, v in (("ours", ours), ("theirs", theirs))
    ]
    claim = {"id": "lower", "claim": "ours is lower", "kind": "losses", "treatment": "ours", "control": "theirs"}
    content = minimal(losses=losses, claims=[claim | {"expected": "lower"}])
    tested = check_published_figures(PublishedFile.model_validate(content)).claims[0]
    assert tested.p_value == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert ENGLISH.of(tested.method).startswith("paired t, 3.0 degrees of freedom")
    assert tested.verdict == "supported"
