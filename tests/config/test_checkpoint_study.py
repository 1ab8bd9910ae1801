"""Studies of given checkpoints: what they plan and compare, and what is refused before any job."""

import json
import shutil
from contextlib import nullcontext
from itertools import combinations

import pytest

from aqnpipe.cli.study import open_study
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.plan import StudyPlan, plan_of
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

TWO_FOLDERS = (
    "study: mine\ncheckpoints: {a: tiny, b: ./copy}\ndataset: {source: generated}\n"
    "evaluation: {max_response_tokens: 8, batch_size: 4}\nreport: {title: t, question: q}\n"
)


def content(**changes):
    study = {
        "study": "mine",
        "checkpoints": {"a": "tiny", "b": {"source": "tiny-large"}, "c": "tiny-comparison"},
        "dataset": {"source": "generated", "num_test": 20},
        "evaluation": {"noise_levels": [0.0, 0.05, 0.1], "max_response_tokens": 8, "batch_size": 20},
        "report": {"title": "t", "question": "q"},
    }
    return study | changes


def test_each_checkpoint_is_evaluated_once_and_nothing_is_trained_or_diagnosed():
    plan = StudyPlan(load_study(content()))
    assert plan.evaluations() == [("checkpoints", name, 0, 0) for name in "abc"]
    assert plan.jobs() == {"prepare_data": 1, "prepare_model": 3, "evaluate": 3, "compare": 1, "report": 1}
    wildcards = {"model": "checkpoints", "arm": "b", "seed": "0", "step": "0"}
    assert plan.checkpoint_input(**wildcards) == "results/models/b/aqnpipe_model.json"
    assert plan.checkpoint_record(**wildcards) == []


def test_examples_in_the_prompt_need_the_training_questions():
    plan = StudyPlan(load_study(content(prompt={"layout": "question_answer", "num_examples": 2})))
    assert plan.data_files() == ["results/data/train.parquet", "results/data/test.parquet"]


def test_without_declared_comparisons_every_pair_is_compared_at_every_level():
    comparisons = load_study(content()).comparisons()
    arms = [(c.treatment, c.control, c.noise_level) for c in comparisons if c.kind == "arms"]
    assert arms == [(*pair, level) for pair in combinations("abc", 2) for level in (0.0, 0.05, 0.1)]
    assert [(c.arm, c.noise_level) for c in comparisons if c.kind == "levels"] == [
        (name, level) for name in "abc" for level in (0.05, 0.1)
    ]
    assert [(c.treatment, c.control, c.noise_level) for c in comparisons if c.kind == "degradation"] == [
        (*pair, 0.1) for pair in combinations("abc", 2)
    ]
    assert {c.expected for c in comparisons if c.kind != "levels"} == {"different"}


def test_a_study_survives_its_way_through_the_parameters_of_a_job():
    study = load_study(content())
    assert plan_of(StudyPlan(study).study_params()).study == study


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda copy: None, "checkpoints.b: has the same weights as checkpoint a"),
        (lambda copy: (copy / "tokenizer.json").unlink(), "checkpoints.b: model 'copy': found no tokenizer"),
        (lambda copy: (copy / "model.safetensors").rename(copy / "model.bin"), "pickle weights (model.bin)"),
        (lambda copy: (copy / "adapters.safetensors").touch(), "only the adapters of another model"),
    ],
)
def test_files_are_looked_at_before_any_job(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(builtin_folder("tiny"), tmp_path / "copy")
    change(tmp_path / "copy")
    (tmp_path / "s.yaml").write_text(TWO_FOLDERS)
    with pytest.raises(ConfigError) as refused:
        open_study([tmp_path / "s.yaml"])
    assert message in str(refused.value)


@pytest.mark.parametrize(("key", "value", "is_another"), [("rms_norm_eps", 1e-5, True), ("bos_token_id", 3, False)])
def test_the_same_weights_under_other_settings_are_another_model(tmp_path, monkeypatch, key, value, is_another):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(builtin_folder("tiny"), tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config[key] != value
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config | {key: value}))
    (tmp_path / "s.yaml").write_text(TWO_FOLDERS)
    with nullcontext() if is_another else pytest.raises(ConfigError, match="has the same weights as checkpoint a"):
        open_study([tmp_path / "s.yaml"])
