"""Machines of arms and loss studies: their parameters in the plan, and mistakes in one line."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, LossStudySpec, TrainingSpec
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return yaml.safe_load((ROOT / "config" / "dead-zone.yaml").read_text()) | {"arms_file": "config/arms.yaml"}


def test_arms_carry_the_faults_of_their_machine_into_training_and_evaluation(config):
    config["arms"].append("baseline")
    plan = StudyPlan(load_study(config))
    for arm, magnitudes in (("dead_zone_guided", [0.3]), ("baseline", [])):
        trained = TrainingSpec.model_validate(plan.training_spec(arm, 0))
        evaluated = EvaluationSpec.model_validate(plan.evaluation_spec(model="base", arm=arm, seed="0", step="20"))
        assert [fault.magnitude for fault in trained.faults] == magnitudes
        assert trained.faults == evaluated.faults


@pytest.mark.parametrize(("machine", "count"), [("dead_zone", 1), (None, 0)])
def test_the_pretrained_model_is_evaluated_where_the_study_says(config, machine, count):
    config["evaluation"]["pretrained_machine"] = machine
    spec = StudyPlan(load_study(config)).evaluation_spec(model="base", arm="pretrained", seed="0", step="0")
    assert len(EvaluationSpec.model_validate(spec).faults) == count


def test_editing_a_machines_words_changes_no_job(config):
    before = StudyPlan(load_study(config)).training_spec("dead_zone_none", 0)
    config["machines"]["dead_zone"]["description"] = "other words"
    assert StudyPlan(load_study(config)).training_spec("dead_zone_none", 0) == before


def test_a_loss_study_is_one_job_with_its_files(config):
    plan = StudyPlan(load_study(config))
    assert plan.loss_study_files("parquet") == ["results/dead-zone/loss_study/base/dead_zone.parquet"]
    spec = LossStudySpec.model_validate(plan.loss_study_spec("base", "dead_zone"))
    assert spec.faults[0].layer == 3
    assert spec.settings.magnitudes[2] == 0.01
    assert plan.loss_study_threads("base", "dead_zone") == 1


def test_two_loss_studies_of_one_name_are_refused(config):
    config["loss_studies"] *= 2
    with pytest.raises(ConfigError, match="loss_studies must not repeat a name"):
        load_study(config, "study.yaml")


def test_default_comparisons_stay_on_one_machine(config):
    config["arms"].insert(0, "baseline")
    config["comparisons"] = []
    pairs = {
        (comparison.treatment, comparison.control)
        for comparison in load_study(config).comparisons()
        if comparison.kind == "arms"
    }
    assert ("dead_zone_none", "pretrained") in pairs
    assert ("dead_zone_global", "dead_zone_none") in pairs
    assert ("dead_zone_guided", "dead_zone_global") in pairs
    assert not [pair for pair in pairs if pair[0].startswith("dead_zone") and pair[1] == "baseline"]
