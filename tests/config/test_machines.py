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


def _set(config, path, value):
    *parents, last = path
    for key in parents:
        config = config[key]
    config[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["machines"],
            {"device": {}},
            r"arms\.dead_zone_none\.machine: found 'dead_zone', expected one of device",
        ),
        (["evaluation", "pretrained_machine"], "x", r"evaluation\.pretrained_machine: found 'x', expected one of"),
        (
            ["loss_studies", 0, "machine"],
            "x",
            r"loss_studies\.0\.machine: found 'x', expected one of .*dead_zone",
        ),
        (["loss_studies", 0, "model"], "large", r"loss_studies\.0\.model: found 'large', expected one of base"),
        (["loss_studies", 0, "magnitudes"], [0.1, 1.5], r"loss_studies\.0\.magnitudes\.1: .*found 1\.5"),
        (["loss_studies", 0, "magnitudes"], [], r"loss_studies\.0\.magnitudes: "),
        (["loss_studies", 0, "conditions"], ["dirty"], r"loss_studies\.0\.conditions\.0: .*found 'dirty'"),
        (["loss_studies", 0, "orders"], ["sideways"], r"loss_studies\.0\.orders\.0: .*found 'sideways'"),
        (["loss_studies", 0, "gamma"], 0, r"loss_studies\.0\.gamma: .*found 0"),
        (["loss_studies", 0, "noise_seeds"], [1, 1], r"noise_seeds: found 1 twice, expected each value once"),
        (["loss_studies", 0, "texts"], 3, r"loss_studies\.0\.texts: unknown key"),
        (
            ["machines", "dead_zone", "faults"],
            [],
            r"loss_studies\.0\.machine: found 'dead_zone', expected a machine with simulated faults",
        ),
        (
            ["machines", "dead_zone", "faults", 0, "site"],
            "o_proj",
            r"loss_studies\.0\.orders: .* dead_zone has faults at sites other than layer_output",
        ),
        (
            ["machines", "dead_zone", "faults", 0],
            {"type": "bias", "layer": 1, "magnitude": 0.1, "site": "o_proj", "order": "before_noise"},
            r"machines\.dead_zone\.faults\.0: .*order is before_noise, which needs site layer_output",
        ),
    ],
)
def test_a_mistake_is_one_line(config, path, value, message):
    _set(config, path, value)
    with pytest.raises(ConfigError, match=message) as caught:
        load_study(config, "study.yaml")
    assert "\n" not in str(caught.value)


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


def test_a_machine_with_faults_has_no_counterpart():
    config = yaml.safe_load((ROOT / "config" / "dead-zone.yaml").read_text())
    config["arms_file"] = str(ROOT / "config" / "arms.yaml")
    config["machines"]["dead_zone"]["counterpart"] = {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="counterpart: a parity is measured without simulated faults"):
        load_study(config)
