"""Machines of arms, loss studies and evaluations, on devices of their own too: the jobs that follow from them."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, LossStudySpec, TrainingSpec
from aqnpipe.config.study import load_study, load_study_files
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config():
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


SMOKE = {"device": "cuda", "arms": ["baseline", "srdd_guided"]}


def plan_of(machines, study="smoke", **settings):
    return StudyPlan(load_study_files([Path(f"config/{study}.yaml")], {**SMOKE, "machines": machines, **settings}))


def test_jobs_of_a_machine_are_those_of_the_rule_of_its_device():
    plan = plan_of({"npu": {"device": "npu"}, "also_npu": {"device": "npu", "counterpart": {"dtype": "bfloat16"}}})
    assert plan.diagnosed_by_kind() == {None: ("device", "target"), "npu": ("npu", "also_npu")}
    assert plan.measured_by_kind() == {None: (), "npu": ("also_npu",)}
    jobs = plan.jobs()
    assert (jobs["srdd_diagnose"], jobs["srdd_diagnose_npu"], jobs["measure_parity_npu"]) == (2, 2, 1)
    assert "measure_parity" not in jobs
    assert plan.rules_by_kind()["npu"] == {
        "srdd_diagnose_npu": "srdd_diagnose",
        "measure_parity_npu": "measure_parity",
    }
    assert plan.machines_on("npu") == ["npu", "also_npu"]


def test_each_job_gets_the_device_of_its_machine():
    plan = plan_of({"npu": {"device": "npu", "counterpart": {"dtype": "bfloat16"}}})
    assert tuple(map(plan.study.config.device_of, ("device", "npu"))) == ("cuda", "npu")
    assert plan.parity_spec(model="base", machine="npu")["device"] == "npu"
    assert plan.training_spec("srdd_guided", 0)["device"] == "cuda"
    spec = plan.evaluation_spec(model="base", arm="srdd_guided", seed="0", step="8")
    assert spec["device"] == "cuda"


def test_the_study_s_own_device_needs_no_other_rule_but_is_recorded():
    plan = plan_of({"device": {"device": "cuda"}})
    assert plan.diagnosed_by_kind() == {None: ("device", "target")}
    assert plan.diagnosed_machine("device")["device"] == "cuda"
    assert "device" not in plan.diagnosed_machine("target")


def test_a_diagnosis_named_as_files_needs_no_device():
    plan = plan_of({"npu": {"device": "npu", "diagnosed_in": "there", "counterpart": {"dtype": "bfloat16"}}})
    assert plan.diagnosed_by_kind() == {None: ("device", "target", "npu")}
    assert plan.measured_by_kind() == {None: (), "npu": ("npu",)}


EVALUATED = {
    "machines": {
        "npu": {"device": "npu", "diagnosed_in": "there"},
        "bf16": {"counterpart": {"dtype": "bfloat16", "threads": 2}},
    },
    "evaluation": {"machines": ["npu", "bf16", "target"]},
}
CHECKPOINT = {"model": "base", "arm": "baseline", "seed": "0", "step": "8"}


def test_every_checkpoint_is_evaluated_on_further_machines_too():
    plan = plan_of(**EVALUATED)
    assert plan.evaluated_by_kind() == {None: ("bf16", "target"), "npu": ("npu",)}
    jobs = plan.jobs()
    assert (jobs["evaluate"], jobs["evaluate_on_machine"], jobs["evaluate_on_machine_npu"]) == (5, 10, 5)
    assert jobs["compare_machines"] == 1
    files = plan.machine_evaluation_files("parquet")
    assert len(files) == 15
    assert files[0] == "results/smoke/eval_on/npu/base/pretrained/seed0/step0.parquet"
    assert plan.rules_by_kind()["npu"]["evaluate_on_machine_npu"] == "evaluate"


def test_an_evaluation_on_a_machine_differs_by_what_the_machine_says():
    plan = plan_of(**EVALUATED)
    here = plan.evaluation_spec(**CHECKPOINT)
    assert plan.on("npu").evaluation_spec(**CHECKPOINT) == here | {"device": "npu"}
    there = plan.on("bf16").evaluation_spec(**CHECKPOINT)
    assert there == here | {"dtype": "bfloat16", "evaluation": here["evaluation"] | {"threads": 2}}
    assert plan.on("bf16").evaluation_threads() == 2
    faulty = plan.on("target").evaluation_spec(**CHECKPOINT)
    assert faulty["faults"]
    assert {name for name in here if here[name] != faulty[name]} == {"faults"}
    assert "machines" not in here["evaluation"]


def test_a_study_without_further_machines_has_none_of_these_jobs():
    plan = plan_of({})
    assert plan.evaluated_by_kind() == {}
    assert plan.machine_evaluation_files("parquet") == []
    assert not [rule for rule in plan.jobs() if "machine" in rule]
