"""Studies that add seeds: looks, what follows from them, and what may no longer change after the first."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from aqnpipe.artifacts.comparisons import ClaimAtLook, ClaimsFile, ComparisonTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.comparison import looks
from aqnpipe.comparison.contrasts import Contrast, Side
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.judgement import evidence_of
from aqnpipe.comparison.look_states import (
    design_of,
    look_file,
    next_look,
    plan_after,
    planned_looks,
    progress,
    read_looks,
    register_design,
    registered_design,
    seeds_after,
)
from aqnpipe.comparison.looks import probability_of_decision, take_look
from aqnpipe.comparison.stage import compare
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.report.words import load_words
from aqnpipe.statistics.crossed_effects import Estimate
from aqnpipe.statistics.group_sequential import look_adjusted_p, nominal_tails
from aqnpipe.statistics.spread import Spread, VariancePart

RULE = {"start": 2, "step": 2, "max": 6}
ARMS = ["baseline", "E5", "E5b", "srdd_guided"]


@pytest.fixture(scope="module")
def claims(synthetic):
    return [
        synthetic.arms("baseline", "pretrained", role="control"),
        synthetic.arms("E5b", "E5", role="primary"),
        synthetic.arms("E5", "baseline", expected="different", equivalent_within=0.9),
    ]


@pytest.fixture(scope="module")
def originals(synthetic, claims, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations")
    return folder, synthetic.write_evaluations(folder, synthetic.study(comparisons=claims, seeds=RULE).with_seeds(8))


@pytest.fixture
def study(synthetic, claims):
    def made(**rule):
        return synthetic.study(comparisons=claims, seeds=RULE | {"futility": 0.0} | rule)

    return made


@pytest.fixture
def evaluations(originals, tmp_path, monkeypatch):
    folder, made_up = originals
    monkeypatch.chdir(tmp_path)
    return made_up.copied(folder, tmp_path).evaluations


def after(study, evaluations, number):
    """Take `number` looks with the evaluations that the arms have by then, as the workflow does; return the records."""
    design = registered_design(study)
    for _ in range(number):
        earlier = read_looks("results")
        plan = plan_after(study, earlier)
        take_look(plan.study, design, earlier, due(plan, evaluations))
    return read_looks("results")


def due(plan, evaluations):
    """Return the evaluations that the jobs of a plan make."""
    wanted = set(plan.evaluations())
    return [one for one in evaluations if (one.model, one.arm, one.seed, one.step) in wanted]


def states(look):
    return {claim.comparison_id: claim.state for claim in look.claims}


def test_looks_end_claims_and_only_arms_of_open_claims_get_seeds(study, evaluations):
    first, second, third = after(study(), evaluations, 3)
    assert states(first)["E5b-vs-E5@0"] == "open"
    assert states(third) == {
        "baseline-vs-pretrained@0": "supported",
        "E5b-vs-E5@0": "open",
        "E5-vs-baseline@0": "equivalent",
    }
    ended = next(look.look for look in (first, second, third) if states(look)["E5-vs-baseline@0"] == "equivalent")
    numbers = seeds_after(study(), [first, second, third])
    assert numbers["srdd_guided"] == 2
    assert numbers["E5b"] == numbers["E5"] == 6
    assert numbers["baseline"] == max(2 * ended, third.claims[0].seeds)
    assert next_look(study(), [first, second, third]) is None
    assert [first.previous_sha256 is None, first.seeds, third.seeds] == [True, 2, 6]


def test_the_same_data_give_the_same_bytes_and_a_deleted_record_comes_back(study, evaluations):
    after(study(), evaluations, 3)
    before = {look: look_file("results", look).read_bytes() for look in (1, 2, 3)}
    look_file("results", 2).unlink()
    assert len(read_looks("results")) == 1
    after(study(), evaluations, 1)
    assert {look: look_file("results", look).read_bytes() for look in (1, 2, 3)} == before
    assert len(read_looks("results")) == 3


def test_p_values_are_adjusted_for_looks_and_family(study, evaluations):
    first = after(study(), evaluations, 1)[0]
    primary = next(claim for claim in first.claims if claim.comparison_id == "E5b-vs-E5@0")
    assert primary.p_value < primary.p_looks == primary.p_holm
    # 2 of 6 seeds: a ninth of 90 % of 5 % is spent, so p = 0.005 at the first look is as good as 0.05 over all of them.
    looks = planned_looks(first.design)
    assert look_adjusted_p(looks, 1, 0.005, one_sided=False) == pytest.approx(0.05)
    assert primary.p_looks == pytest.approx(look_adjusted_p(looks, 1, primary.p_value, one_sided=False))


def test_raising_the_maximum_continues_without_changing_what_is_there(study, evaluations):
    after(study(), evaluations, 3)
    before = [look_file("results", look).read_bytes() for look in (1, 2, 3)]
    longer = study(max=8)
    assert next_look(longer, read_looks("results")) == 4
    records = after(longer, evaluations, 1)
    assert records[-1].seeds == 8
    assert records[-1].design.planned == 6
    assert [look_file("results", look).read_bytes() for look in (1, 2, 3)] == before
    # The reserve of 10 %: the first look after the planned ones spends half of it.
    extra = next(claim for claim in records[-1].claims if claim.look == 4)
    looks = planned_looks(records[-1].design)
    assert extra.p_looks == pytest.approx(look_adjusted_p(looks, 4, extra.p_value, one_sided=False))
    assert (
        look_adjusted_p(looks, 4, 0.0025, one_sided=False) < 0.05 < look_adjusted_p(looks, 4, 0.0125, one_sided=False)
    )


def test_the_maximum_may_be_lowered_to_what_was_used_but_not_below(study, evaluations):
    after(study(), evaluations, 2)
    assert registered_design(study(max=4)).planned == 6
    assert next_look(study(max=4), read_looks("results")) is None
    with pytest.raises(ConfigError, match=r"seeds.max: found 2, interim analysis 2 used 4 seeds, expected at least 4"):
        registered_design(study(max=2))


def test_without_a_reserve_the_maximum_cannot_be_raised(study, evaluations):
    after(study(reserve=0.0), evaluations, 1)
    with pytest.raises(ConfigError, match="no error rate is left"):
        registered_design(study(reserve=0.0, max=8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"statistics": {"alpha": 0.1}}, r"statistics.alpha \(0.05 to 0.1\)"),
        ({"seeds": RULE | {"futility": 0.0, "step": 1}}, r"seeds.step \(2 to 1\)"),
        ({"comparisons": []}, r"the claim E5b-vs-E5@0 \(edited\)"),
        ({"dataset": {"source": "generated", "num_train": 480, "num_test": 300}}, "the data set"),
        ({"training": "rate"}, "the training or evaluation of arm baseline"),
        (lambda claims, _: claims[:2], r"E5-vs-baseline@0 \(removed\)"),
        (lambda claims, made: [*claims, made.levels("E5")], r"E5@0.1-vs-0 \(added\)"),
        (lambda claims, _: edited(claims, expected="lower"), r"E5b-vs-E5@0 \(edited\)"),
        (lambda claims, _: edited(claims, role="secondary"), r"E5b-vs-E5@0 \(edited\)"),
        (lambda claims, _: edited(claims, claim="In other words"), None),
    ],
)
def test_a_study_is_bound_by_its_first_look_but_for_the_words_of_its_claims(
    study, synthetic, claims, evaluations, change, words
):
    after(study(), evaluations, 1)
    if callable(change):
        change = {"comparisons": change(claims, synthetic)}
    elif change.get("training") == "rate":
        change = {"training": study().config.training.model_dump() | {"learning_rate": 1e-3}}
    changed = synthetic.study(**{"comparisons": claims, "seeds": RULE | {"futility": 0.0}} | change)
    if words is None:
        assert registered_design(changed).planned == 6
    else:
        with pytest.raises(ConfigError, match=words):
            registered_design(changed)


def edited(claims, **changes):
    """Return the claims with changes of the second one."""
    return [claims[0], claims[1] | changes, *claims[2:]]


def test_the_design_is_kept_where_every_record_is_gone_but_one(study, evaluations):
    register_design("results", design_of(study(), 6))
    after(study(), evaluations, 2)
    (look_file("results", 1).parent / "design.json").unlink()
    look_file("results", 1).unlink()
    assert registered_design(study(max=12)).planned == 6


def test_a_record_that_does_not_follow_from_the_one_before_is_made_again_and_never_used(study, evaluations):
    after(study(), evaluations, 2)
    look_file("results", 1).write_bytes(look_file("results", 2).read_bytes())
    assert len(read_looks("results")) == 1
    with pytest.raises(DataError, match=r"look2\.json: does not follow from results/looks/look1\.json"):
        read_looks("results", 2)


def test_an_edited_record_is_refused(study, evaluations):
    after(study(), evaluations, 1)
    path = look_file("results", 1)
    path.write_text(path.read_text().replace('"state": "open"', '"state": "supported"'))
    with pytest.raises(DataError, match=r"look1\.json"):
        read_looks("results")


def test_a_run_that_cannot_be_used_ends_its_claims_as_invalid(study, evaluations):
    broken = [
        dataclasses.replace(one, lineage_problems=("its weights are another run's",)) if one.arm == "E5b" else one
        for one in evaluations
    ]
    first = after(study(), broken, 1)[0]
    claim = next(claim for claim in first.claims if claim.comparison_id == "E5b-vs-E5@0")
    assert claim.state == "invalid"
    assert "another run" in claim.reason
    assert seeds_after(study(), [first])["E5b"] == 2


def test_futility_stops_a_claim_whose_chance_is_too_small(synthetic, evaluations):
    name, claims = "E5b-vs-E5@0.1", [synthetic.arms("E5b", "E5", 0.1)]

    def first_look(futility):
        study = synthetic.study(comparisons=claims, seeds=RULE | {"futility": futility})
        look = after(study, evaluations, 1)[0]
        look_file("results", 1).unlink()
        return look.claims[0], seeds_after(study, [look])["E5b"]

    chance = first_look(0.0)[0].chance
    assert 0.005 < chance < 0.49
    for futility, state, seeds in ((chance + 0.005, "futile", 2), (chance - 0.005, "open", 4)):
        claim, seeds_next = first_look(futility)
        assert (claim.comparison_id, claim.state, seeds_next) == (name, state, seeds)


def test_the_chance_of_a_decision_is_that_of_all_final_estimates_that_decide():
    """A final estimate from N(0, 1); two-sided tests reject 2 and one-sided tests 1.5 from their bounds."""

    def between(low, high):
        return stats.norm.cdf(high) - stats.norm.cdf(low)

    def chance(test, margin, within):
        distance = 2.0 if test == "superiority" else 1.5
        return probability_of_decision(test, margin, within, (distance, distance), between)

    outside = stats.norm.sf
    assert chance("superiority", None, None) == pytest.approx(2 * outside(2))
    assert chance("superiority", None, 3.0) == pytest.approx(2 * outside(2) + 1 - 2 * outside(1))
    assert chance("superiority", None, 5.0) == pytest.approx(1.0)
    assert chance("non_inferiority", 1.0, None) == pytest.approx(outside(2.5) + outside(0.5))
    assert chance("equivalence", 1.0, None) == pytest.approx(2 * outside(2.5))
    assert chance("equivalence", 2.0, None) == pytest.approx(2 * outside(3.5) + 1 - 2 * outside(0.5))


def test_progress_names_the_next_look(study, evaluations):
    assert progress(study()) == (
        "interim analysis 1 of at most 3 is next, at 2 seeds of baseline, E5, E5b, srdd_guided; 3 of 3 claims open"
    )
    after(study(), evaluations, 3)
    assert progress(study()) == "no further interim analysis: 2 of 3 claims have ended, 1 open at seeds.max 6"


def test_verdicts_and_answer_are_those_of_the_last_looks(study, evaluations, tmp_path):
    looks = after(study(), evaluations, 3)
    plan, outputs = plan_after(study(), looks), tmp_path / "out"
    compare(plan.study, due(plan, evaluations), outputs, looks)
    claims = read_json(outputs / "claims.json", ClaimsFile)
    rows = {
        row["comparison_id"]: row for row in read_table(outputs / "comparisons.parquet", ComparisonTable).to_dicts()
    }
    assert {claim.comparison_id: claim.verdict for claim in claims.claims} == {
        "baseline-vs-pretrained@0": "supported",
        "E5b-vs-E5@0": "not_shown",
        "E5-vs-baseline@0": "equivalent",
    }
    assert [claim.role for claim in claims.claims] == ["control", "primary", "secondary"]
    recorded = next(claim for claim in looks[-1].claims if claim.comparison_id == "E5b-vs-E5@0")
    assert (rows["E5b-vs-E5@0"]["p_holm"], rows["E5b-vs-E5@0"]["num_seeds"]) == (recorded.p_holm, 6)
    assert claims.looks == tuple(looks)
    answer = load_words("en").of(claims.answer)
    assert answer.startswith("Not known whether ")
    assert "6 seeds, 200 questions" in answer
    assert load_words("zh").of(claims.answer).startswith("尚不清楚是否")


def test_before_the_first_look_nothing_is_decided(study, evaluations, tmp_path):
    plan, outputs = plan_after(study(), []), tmp_path / "out"
    compare(plan.study, due(plan, evaluations), outputs)
    assert {claim.verdict for claim in read_json(outputs / "claims.json", ClaimsFile).claims} == {"not_shown"}


def test_the_record_names_what_was_tested(study, evaluations):
    first = after(study(), evaluations, 1)[0]
    assert json.loads(first.design.claims["E5b-vs-E5@0"])["treatment"] == "E5b"
    assert first.seeds_per_arm == dict.fromkeys(ARMS, 2)


PAIRS = [("E5", "baseline"), ("E5b", "baseline"), ("srdd_guided", "baseline"), ("E5b", "E5"), ("srdd_guided", "E5"),
         ("srdd_guided", "E5b"), ("E5", "pretrained"), ("E5b", "pretrained")]  # fmt: skip

MARGIN = 4.5 * 0.1 / 10**0.5
"""4.5 standard errors of ten seeds that vary by 0.1."""


def quick_adjustment(design):
    """Return `look_adjusted_p` as an interpolation of the levels of all looks, which takes microseconds."""
    rates = np.geomspace(1e-12, 0.4999, 300)
    tails = np.array([nominal_tails(design, rate, 5) for rate in rates])

    def adjusted(looks, look, p_value, *, one_sided):
        sides = 1 if one_sided else 2
        known = np.log(tails[:, look - 1])
        return min(1.0, sides * float(np.exp(np.interp(np.log(p_value / sides), known, np.log(rates), right=0.0))))

    return adjusted


def test_claims_that_end_as_equivalent_do_not_relax_the_level_of_the_others(synthetic, monkeypatch):
    """Eight claims whose differences are 0, five looks, a margin of 4.5 standard errors at the last.

    With Holm's method on the smaller p-value of a difference and of equivalence, 19.5 % of studies had a false finding.
    """
    claims = [synthetic.arms(*pair, expected="different", equivalent_within=MARGIN) for pair in PAIRS]
    study = synthetic.study(comparisons=claims, seeds=RULE | {"max": 10, "futility": 0.0})
    design, named = design_of(study, 10), comparison_ids(study.comparisons())
    schedule = planned_looks(design)
    monkeypatch.setattr(looks, "look_adjusted_p", quick_adjustment(schedule))
    draws, wrong, ended, studies = np.random.default_rng(4), 0, 0, 80
    for means in draws.standard_normal((studies, len(claims), 10)).cumsum(axis=2):
        after = {name: ClaimAtLook(comparison_id=name, state="open", look=0, seeds=0) for name in named}
        for number in range(1, 6):
            seeds = schedule.seeds_at(number)
            found = {
                name: evidence_of(
                    Contrast(name, claim, *[Side("base", arm, 0.0) for arm in ("E5", "baseline")], None, None),
                    estimate_of(0.1 * mean[seeds - 1] / seeds, 0.01 / seeds, seeds),
                )
                for (name, claim), mean in zip(named.items(), means, strict=True)
                if after[name].state == "open"
            }
            for name, evidence in found.items():
                after[name] = after[name].model_copy(update=looks._numbers(evidence, schedule, number))
            after = looks._with_states(after, found, named, design, number)
        states_after = {claim.state for claim in after.values()}
        wrong += "supported" in states_after
        ended += "equivalent" in states_after
        for claim in after.values():
            inside, excludes_0 = max(-claim.ci_low, claim.ci_high) < MARGIN, claim.ci_low > 0 or claim.ci_high < 0
            assert inside if claim.state == "equivalent" else excludes_0 == (claim.state == "supported")
    assert wrong <= stats.binom.ppf(0.999, studies, 0.05)
    assert ended > 0.9 * studies


def estimate_of(difference, variance, seeds):
    return Estimate("two_way", seeds, 500, float(difference), Spread((VariancePart(variance, 1e6),)), None, (), 500)
