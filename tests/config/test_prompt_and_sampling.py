"""Examples and samples in a study file: the parameters of the jobs, and mistakes in one line."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(monkeypatch):
    monkeypatch.chdir(ROOT)
    return yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text()) | {"arms_file": "config/arms.yaml"}


def test_jobs_get_the_training_questions_only_where_prompts_have_examples(config):
    assert StudyPlan(load_study(config)).examples_input() == []
    config["prompt"] = {"layout": "question_answer", "num_examples": 5}
    plan = StudyPlan(load_study(config))
    assert plan.examples_input() == [f"{plan.results}/data/train.parquet"]


def test_jobs_get_scorer_and_sampling(config):
    config["evaluation"].update(primary_scorer="harness_strict", sampling={"temperature": 0.7, "num_samples": 8})
    spec = StudyPlan(load_study(config)).evaluation_spec(model="base", arm="baseline", seed="0", step="8")
    assert spec["evaluation"]["primary_scorer"] == "harness_strict"
    assert spec["evaluation"]["sampling"] == {"temperature": 0.7, "num_samples": 8, "seed": 0}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("prompt", {"num_examples": 5}, "needs layout question_answer"),
        ("prompt", {"layout": "question_answer", "num_examples": -1}, "prompt.num_examples"),
        ("evaluation", {"sampling": {"temperature": 0.7}}, "evaluation.sampling.num_samples"),
        ("evaluation", {"sampling": {"temperature": 0.0, "num_samples": 2}}, "evaluation.sampling.temperature"),
        ("evaluation", {"primary_scorer": "flexible"}, "evaluation.primary_scorer"),
    ],
)
def test_mistakes_are_one_line(config, key, value, message):
    config[key] = config.get(key, {}) | value
    with pytest.raises(ConfigError) as error:
        load_study(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
