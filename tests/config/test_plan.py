"""The jobs of a study that derive sigmas from its diagnoses."""

from pathlib import Path

import pytest

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.chdir(ROOT)
    return StudyPlan(load_study_file(Path("config/config.yaml")))


def test_a_machine_without_faults_gets_the_strategies_of_the_faulty_ones(plan):
    assert plan.strategies("base", "target") == ["published", "robust_first"]
    assert plan.strategies("base", "device") == ["published", "robust_first"]


def test_a_faulty_machine_gets_only_its_own_strategies(monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = StudyPlan(load_study_file(Path("config/dead-zone.yaml")))
    assert plan.strategies("base", "dead_zone") == ["published", "targeted"]
    smoke = StudyPlan(load_study_file(Path("config/smoke.yaml")))
    assert {machine: smoke.strategies("base", machine) for machine in smoke.study.config.machines} == {
        machine: ["published"] for machine in smoke.study.config.machines
    }


def test_the_default_study_s_guided_arm_differs_from_uniform_aqn_in_the_sigmas_alone(plan):
    guided, uniform = (plan.study.arms[name] for name in ("guided_robust_first", "E5b"))
    assert guided.aqn.layer_sigmas_strategy == "robust_first"
    assert (
        guided.aqn.model_copy(update={"layer_sigmas_from": None, "layer_sigmas_strategy": "published"}) == uniform.aqn
    )
    assert guided.operator_noise == uniform.operator_noise
