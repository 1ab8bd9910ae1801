"""Training on prompts with examples: no prompt contains its own answer, and leaks are refused."""

from functools import partial

import polars as pl
import pytest
from tiny_training import run, training_spec, write_inputs

from aqnpipe.artifacts.files import read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.config.model import read_model_config
from aqnpipe.errors import DataError
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.training.run import _train_dataset

PROMPT = {"layout": "question_answer", "num_examples": 2}


@pytest.fixture
def inputs(tmp_path, make_model):
    made = write_inputs(tmp_path, partial(make_model, max_position_embeddings=256))
    table = read_table(made.test_problems, ProblemTable)
    other = table.with_columns(question=pl.col("question").str.replace("plus", "times"))
    write_table(made.test_problems, other, ProblemTable)
    return made


def spec(**training):
    made = training_spec(**training)
    return type(made).model_validate(made.model_dump() | {"prompt": PROMPT})


def test_every_prompt_has_the_examples_and_never_its_own_answer(inputs):
    prompts = _train_dataset(spec(), inputs, load_tokenizer(inputs.model))["prompt"]
    for number, prompt in enumerate(prompts):
        own = f"Question: What is {number} plus {number} ?\nAnswer:"
        assert prompt.count("Question:") == 3
        assert prompt.endswith(own)
        assert prompt.count(own) == 1


def test_a_run_trains_and_validates(inputs, tmp_path):
    folder = run(spec(num_steps=1), inputs, tmp_path / "run")
    assert read_table(folder / "metrics.parquet", TrainingMetrics)["validation_accuracy"].null_count() == 0


def test_prompts_that_became_too_long_are_refused(inputs):
    with pytest.raises(DataError, match=r"training\.max_prompt_tokens is 20: 8 of 8 prompts are longer"):
        _train_dataset(spec(max_prompt_tokens=20), inputs, load_tokenizer(inputs.model))


def test_responses_beyond_the_positions_of_the_model_are_refused_before_training(inputs):
    """The evaluation of the checkpoint would refuse them, hours later."""
    tokenizer = load_tokenizer(inputs.model)
    positions = read_model_config(inputs.model)["max_position_embeddings"]
    prompts = list(_train_dataset(spec(), inputs, tokenizer)["prompt"])
    longest = max(map(len, tokenizer(prompts)["input_ids"]))
    _train_dataset(spec(max_response_tokens=positions - longest), inputs, tokenizer)
    with pytest.raises(DataError, match=rf"together more than the {positions} positions of the model"):
        _train_dataset(spec(max_response_tokens=positions - longest + 1), inputs, tokenizer)


def test_validation_prompts_leave_room_for_responses_too(inputs, tmp_path):
    positions = read_model_config(inputs.model)["max_position_embeddings"]
    table = read_table(inputs.test_problems, ProblemTable)
    longer = table.with_columns(question=pl.lit("plus " * positions) + pl.col("question"))
    write_table(inputs.test_problems, longer, ProblemTable)
    with pytest.raises(DataError, match=rf"together more than the {positions} positions of the model"):
        run(spec(num_steps=1), inputs, tmp_path / "run")


def test_validation_questions_among_the_examples_are_refused(inputs, tmp_path):
    write_table(inputs.test_problems, read_table(inputs.train_problems, ProblemTable), ProblemTable)
    with pytest.raises(DataError, match="is an example of the prompt"):
        run(spec(num_steps=1), inputs, tmp_path / "run")
