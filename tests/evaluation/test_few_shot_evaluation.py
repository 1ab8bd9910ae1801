"""Evaluation with examples in the prompt: the prompts, the end of a response, refusals."""

import polars as pl
import pytest

import aqnpipe.evaluation.stage as stage
from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import DataError
from aqnpipe.evaluation.stage import evaluate, score
from aqnpipe.generation.backend import Completion


def write_problems(path, questions):
    table = pl.DataFrame(
        {
            "question_id": [f"q{number}" for number in range(len(questions))],
            "question": questions,
            "answer": ["#### 2"] * len(questions),
            "gold_answer": ["2"] * len(questions),
        }
    )
    write_table(path, table, ProblemTable)
    return path


@pytest.fixture(scope="module")
def model_dir(save_model):
    return save_model(num_layers=2)


@pytest.fixture
def files(tmp_path):
    train = write_problems(
        tmp_path / "train.parquet", ["What is 1 plus 1 ?", "What is 2 plus 0 ?", "What is 0 plus 2 ?"]
    )
    return train, write_problems(tmp_path / "test.parquet", ["What is 3 minus 1 ?", "What is 4 minus 2 ?"])


@pytest.fixture
def run(tmp_path, model_dir, files):
    outputs = StageFiles(*(tmp_path / name for name in ("t.parquet", "r.json", "run.json")))

    def evaluated(num_examples, train="given", max_response_tokens=4, **prompt):
        spec = EvaluationSpec(
            model_role="base",
            arm_id="a",
            seed=0,
            step=1,
            dtype="float32",
            attention="eager",
            prompt={"layout": "question_answer", "num_examples": num_examples} | prompt,
            evaluation={"noise_levels": (0.0,), "max_response_tokens": max_response_tokens, "batch_size": 2},
        )
        evaluate(spec, model_dir, files[1], outputs, lambda _: None, files[0] if train == "given" else train)
        return outputs

    return evaluated


def test_every_prompt_has_the_examples_and_the_record_names_their_source(run, files, monkeypatch):
    seen = []
    original = stage.prompt_token_ids

    def recorded(questions, prompt_format, tokenizer, examples):
        ids = original(questions, prompt_format, tokenizer, examples)
        seen.extend((len(prompt), len(examples)) for prompt in ids)
        return ids

    monkeypatch.setattr(stage, "prompt_token_ids", recorded)
    outputs = run(2)
    assert [examples for _, examples in seen] == [3, 3]
    assert len(read_table(outputs.table, EvaluationTable)) == 2
    record = read_json(outputs.record, RunRecord)
    assert record.inputs_sha256["train_problems"] == sha256_of_file(files[0])
    lengths = [length for length, _ in seen]
    run(0, train=None)
    assert all(longer > shorter for longer, (shorter, _) in zip(lengths, seen[2:], strict=True))


def test_missing_examples_are_refused(run):
    with pytest.raises(DataError, match="no training questions were given"):
        run(1, train=None)
    with pytest.raises(DataError, match="3 different questions, expected at least 4"):
        run(3)


def test_a_test_question_among_the_examples_is_refused(run, files):
    write_problems(files[0], ["what is  3 minus 1 ?", "What is 2 plus 0 ?"])
    with pytest.raises(DataError, match="is an example of the prompt"):
        run(1)


def test_prompts_that_leave_no_room_are_refused(run):
    with pytest.raises(DataError, match="together more than the 128 positions of the model"):
        run(0, max_response_tokens=128)


class Letters:
    """Decodes a list of texts as their concatenation."""

    def batch_decode(self, responses, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(texts) for texts in responses]


def test_a_response_ends_before_the_models_own_question():
    problems = pl.DataFrame({"question_id": ["a", "b"], "gold_answer": ["7", "9"]})
    completions = [
        Completion(["#### 7\n\n", "Question: 8?\nAnswer: #### 9"], "length"),
        Completion(["It is", " 8"], "length"),
    ]
    rows = score(problems, [completions], Letters(), 0.0, 0, "Question:")
    assert rows["response"].to_list() == ["#### 7\n\n", "It is 8"]
    assert rows["correct_last_number"].to_list() == [True, False]
    assert rows["finish_reason"].to_list() == ["stop", "length"]
    whole = score(problems, [completions], Letters(), 0.0, 0)
    assert whole["correct_last_number"].to_list() == [False, False]
    assert whole["finish_reason"].to_list() == ["length", "length"]
