"""A run with rewards of its own: trained with them, and graded again with the same function."""

import json

import pytest
from tiny_training import NOISE, run, training_spec, write_inputs

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import CustomRewardMetrics, RunRecord
from aqnpipe.config.custom_code import source_digest
from aqnpipe.errors import NoRewardError, ReceiptError

SOURCE = """
import itertools

calls, gradings = itertools.count(), itertools.count()

def changing(response, gold_answer):
    return next(gradings) < 3

def length(response, gold_answer):
    return len(response) / 100

def same(response, gold_answer):
    return -1.0

def everything(response, gold_answer):
    return True

def moody(response, gold_answer):
    return float(next(calls))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_model):
    return write_inputs(tmp_path_factory.mktemp("inputs"), make_model)


@pytest.fixture
def module(own_module):
    return own_module(SOURCE)


def own(module, name):
    return {"function": f"{module}:{name}", "source_sha256": source_digest(f"{module}:{name}")}


@pytest.mark.slow
def test_a_run_learns_from_its_own_rewards_and_records_their_source(inputs, tmp_path, module):
    rewards = [own(module, "length") | {"weight": -2.0}, {"scorer": "last_number", "weight": 0.5}]
    digest = rewards[0]["source_sha256"]
    folder = run(training_spec(rewards=rewards), inputs, tmp_path / "run")
    record = read_json(folder / "run.json", RunRecord)
    assert record.config["training"]["rewards"][0]["source_sha256"] == digest
    metrics = read_table(folder / "metrics.parquet", CustomRewardMetrics)
    # A length over 100, twice, is no multiple of the half that a right number gives; rewards may be below 0.
    assert any(reward % 0.5 for reward in metrics["reward_mean"].to_list())
    assert metrics["reward_mean"].min() < 0
    assert json.loads((folder / "run.json").read_text())["config"]["training"]["rewards"][1]["scorer"] == "last_number"


@pytest.mark.slow
def test_a_reward_that_is_not_the_same_when_graded_again_is_refused(inputs, tmp_path, module):
    with pytest.raises(ReceiptError, match="graded again give"):
        run(training_spec(rewards=[own(module, "moody")]), inputs, tmp_path / "run")


@pytest.mark.slow
def test_rewards_that_never_differ_are_not_said_to_be_0_or_1(inputs, tmp_path, module):
    with pytest.raises(NoRewardError, match="each of 16 responses has the reward of its whole group"):
        run(training_spec(NOISE, kl_coefficient=0.0, rewards=[own(module, "same")]), inputs, tmp_path / "run")


@pytest.mark.slow
def test_validations_use_the_scorer_of_the_study(inputs, tmp_path, module):
    scorer = f"{module}:everything"
    graded = {"scorer": scorer, "scorer_sha256": source_digest(scorer)}
    spec = training_spec(rewards=[own(module, "length")]).model_copy(update=graded)
    metrics = read_table(run(spec, inputs, tmp_path / "run") / "metrics.parquet", CustomRewardMetrics)
    # A random model finds no number: by the scorer strict, no answer is right.
    assert metrics["validation_accuracy"].drop_nulls().to_list() == [1.0]


@pytest.mark.slow
def test_a_validation_that_is_graded_otherwise_a_second_time_is_refused(inputs, tmp_path, module):
    scorer = f"{module}:changing"
    graded = {"scorer": scorer, "scorer_sha256": source_digest(scorer)}
    spec = training_spec(rewards=[own(module, "length")]).model_copy(update=graded)
    with pytest.raises(ReceiptError, match="graded again it is"):
        run(spec, inputs, tmp_path / "run")
