"""Adaptive seeds in a study file: the rule, its limits, and the jobs that follow from it."""

import pytest
import synthetic_study as synthetic
from pydantic import ValidationError

from aqnpipe.config.analysis import AdaptiveSeeds, Seeds
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.plan import StudyPlan, plan_of
from aqnpipe.config.yaml_file import validated
from aqnpipe.errors import ConfigError


class OnlySeeds(FrozenModel):
    """A study file with nothing but seeds."""

    seeds: Seeds


RULE = {"start": 2, "step": 2, "max": 8}


def test_a_rule_has_looks_at_growing_numbers_of_seeds():
    rule = AdaptiveSeeds(**RULE)
    assert rule.num_looks == 4
    assert [rule.seeds_at(look) for look in (1, 2, 4)] == [2, 4, 8]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"max": 7}, "max: found 7, expected start plus a multiple of step, for example 8"),
        ({"start": 4, "max": 2}, "for example 4"),
        ({"start": 2, "step": 1, "max": 200}, "expected at most 50"),
        ({"start": 1, "max": 5}, "greater than or equal to 2"),
        ({"max": 8, "stop": 3}, "Extra inputs"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(rule, words):
    with pytest.raises(ValidationError, match=words):
        AdaptiveSeeds(**rule)


def test_a_study_begins_with_the_seeds_of_the_first_look():
    study = synthetic.study(seeds=RULE)
    assert study.seeds == (0, 1)
    assert len(StudyPlan(study).runs()) == 2 * len(study.arms)
    assert StudyPlan(study).jobs()["look"] == 1
    assert "look" not in StudyPlan(synthetic.study()).jobs()


def test_arms_may_have_different_numbers_of_seeds():
    study = synthetic.study(seeds=RULE)
    numbers = dict.fromkeys(study.arms, 2) | {"E5": 6}
    plan = StudyPlan(study.with_seeds_per_arm(numbers))
    assert [seed for _, arm, seed in plan.runs() if arm == "E5"] == [0, 1, 2, 3, 4, 5]
    assert plan.study.seeds_of("baseline") == (0, 1)
    assert plan_of(plan.study_params()).runs() == plan.runs()


def test_the_parameters_of_a_look_do_not_depend_on_the_maximum():
    plans = [StudyPlan(synthetic.study(seeds=RULE | {"max": most})) for most in (8, 20)]
    assert plans[0].params_at_look(3) == plans[1].params_at_look(3)
    assert plans[0].study_params() != plans[1].study_params()


def test_fixed_seeds_are_what_they_were():
    study = synthetic.study(seeds=[3, 5])
    assert study.adaptive_seeds is None
    assert [study.seeds_of(arm) for arm in study.arms] == [(3, 5)] * len(study.arms)


def comparison(**changes):
    return {"treatment": "E5", "control": "baseline", "expected": "higher", "claim": "c", "kind": "arms"} | changes


def test_a_study_has_one_primary_claim():
    with pytest.raises(ValidationError, match=r"comparisons.1.role: found a second primary claim"):
        synthetic.study(comparisons=[comparison(role="primary"), comparison(role="primary")])


def test_an_equivalence_margin_of_a_superiority_claim_needs_adaptive_seeds():
    claims = [comparison(equivalent_within=0.02)]
    with pytest.raises(ValidationError, match="needs adaptive seeds"):
        synthetic.study(comparisons=claims)
    assert synthetic.study(comparisons=claims, seeds=RULE).comparisons()[0].equivalent_within == 0.02
    with pytest.raises(ValidationError, match="equivalent_within is for test: superiority"):
        synthetic.study(
            comparisons=[comparison(expected=None, test="equivalence", margin=0.1, equivalent_within=0.02)], seeds=RULE
        )


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        (RULE | {"max": 7}, "seeds: max: found 7, expected start plus a multiple of step"),
        ({"start": 2, "steps": 2, "max": 8}, r"seeds.steps: unknown key \(did you mean step"),
        ({"start": 1, "max": 8}, "seeds.start: found 1, expected at least 2"),
        (3, "seeds: found 3, expected a list"),
        ([], "seeds: found \\[\\], expected at least 1 entries"),
        ([*range(10_001)], "seeds: found .*, expected at most 10,000 entries"),
        ({"start": 2, "step": 9_999, "max": 10_001}, "seeds.max: found 10001, expected at most 10,000"),
    ],
)
def test_mistakes_in_a_study_file_are_judged_by_the_form_that_was_meant(seeds, words):
    content = {"seeds": seeds}
    with pytest.raises(ConfigError, match=words):
        validated(OnlySeeds, content, "study.yaml")
