"""Adaptive seeds in a study file: the rule, its limits, and the jobs that follow from it."""

import pytest
import synthetic_study as synthetic
from pydantic import ValidationError

from aqnpipe.config.analysis import AdaptiveSeeds
from aqnpipe.config.plan import StudyPlan, plan_of

RULE = {"start": 2, "step": 2, "max": 8}


def test_a_rule_has_looks_at_growing_numbers_of_seeds():
    rule = AdaptiveSeeds(**RULE)
    assert rule.num_looks == 4
    assert [rule.seeds_at(look) for look in (1, 2, 4)] == [2, 4, 8]


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


def test_seeds_are_not_more_than_can_be_planned():
    with pytest.raises(ValidationError, match="at most 10000 items"):
        synthetic.study(seeds=[*range(10_001)])
