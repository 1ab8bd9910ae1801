"""Training on prompts with examples: no prompt contains its own answer, and leaks are refused."""

import polars as pl
import pytest
from tiny_training import run, training_spec, write_inputs

from aqnpipe.artifacts.files import read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.errors import DataError
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.training.run import _train_dataset

PROMPT = {"layout": "question_answer", "num_examples": 2}


@pytest.fixture
def inputs(tmp_path, make_model):
    made = write_inputs(tmp_path, make_model)
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


def test_validation_questions_among_the_examples_are_refused(inputs, tmp_path):
    write_table(inputs.test_problems, read_table(inputs.train_problems, ProblemTable), ProblemTable)
    with pytest.raises(DataError, match="is an example of the prompt"):
        run(spec(num_steps=1), inputs, tmp_path / "run")
