"""Own data: nested columns, messages, formats of answers, choices; each mistake is one line with row and column."""

import csv
import json

import polars as pl
import pytest
from pydantic import TypeAdapter, ValidationError

from aqnpipe.cli.datasets import dataset_of
from aqnpipe.config.dataset import LocalDataset
from aqnpipe.data.loader import load_problems
from aqnpipe.errors import AqnpipeError, DataError

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 and 3? Output the final answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"answer": "2+3=5\n#### 5", "index": 0, "question": "2 and 3?", "split": "test"},
}


def problems(tmp_path, rows, suffix="jsonl", **settings):
    path = tmp_path / f"own.{suffix}"
    if suffix == "parquet":
        pl.DataFrame(rows).write_parquet(path)
    elif suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TypeAdapter(LocalDataset).validate_python({"source": "local", "path": str(path), **settings})
    return load_problems(config, "test").select("question", "answer", "gold_answer").rows()


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"question_column": "prompt", "answer_column": "reward_model.ground_truth", "answer_format": "number"},
            ("2 and 3? Output the final answer after ####.", "#### 5", "5"),
        ),
        (
            {"question_column": "extra_info.question", "answer_column": "extra_info.answer"},
            ("2 and 3?", "2+3=5\n#### 5", "5"),
        ),
    ],
)
def test_the_parquet_file_of_verl(tmp_path, suffix, columns, expected):
    assert problems(tmp_path, [VERL], suffix, **columns) == [expected]


def test_messages_hold_question_and_answer(tmp_path):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is \\boxed{2}."}]
    both = {"question_column": "messages", "answer_column": "messages", "answer_format": "boxed"}
    assert problems(tmp_path, [{"messages": turns}], **both) == [("1+1?", "It is \\boxed{2}.", "2")]
    told = {"messages": [{"role": "system", "content": "Be brief."}, *turns]}
    with pytest.raises(DataError, match="row 0: column messages has messages of system, user, expected one of user"):
        problems(tmp_path, [told], **both)
    assert problems(tmp_path, [told], **both, system_messages="drop") == [("1+1?", "It is \\boxed{2}.", "2")]


def test_csv_with_named_columns(tmp_path):
    rows = [{"q": "a, b?", "a": "1,000.50"}, {"q": 'a "quote"?', "a": "007"}]
    found = problems(tmp_path, rows, "csv", question_column="q", answer_column="a", answer_format="number")
    assert found == [("a, b?", "#### 1000.5", "1000.5"), ('a "quote"?', "#### 7", "7")]


@pytest.mark.parametrize(("given", "letter"), [("B", "B"), ("b", "B"), (1, "B"), ("two", "B"), (0, "A")])
def test_choices_are_lettered_and_the_answer_is_a_letter(tmp_path, given, letter):
    row = {"question": "1+1?", "choices": ["one", "two"], "answer": given}
    (found,) = problems(tmp_path, [row], answer_format="choice", choices_column="choices")
    assert found == ("1+1?\nA. one\nB. two", letter, letter)


def test_choices_with_labels_beside_them(tmp_path):
    row = {"question": "1+1?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "A"}
    settings = {"answer_column": "answerKey", "answer_format": "choice", "choices_column": "choices"}
    assert problems(tmp_path, [row], **settings) == [("1+1?\nA. one\nB. two", "A", "A")]
    numbered = row | {"choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "1"}
    assert problems(tmp_path, [numbered], **settings) == [("1+1?\nA. one\nB. two", "A", "A")]
    with pytest.raises(DataError, match="row 0: column answerKey: found 'B', expected a label, 1 or 2"):
        problems(tmp_path, [numbered | {"answerKey": "B"}], **settings)


def test_the_text_of_a_choice_may_consist_of_letters(tmp_path):
    row = {"question": "Blood group?", "choices": ["A", "B", "AB", "O"], "answer": "AB"}
    ((_, _, gold),) = problems(tmp_path, [row], answer_format="choice", choices_column="choices")
    assert gold == "C"


ROW = {"question": "q", "answer": "#### 1"}
CHOICE = {"answer_format": "choice", "choices_column": "choices"}


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (ROW, {"answer_column": "solution"}, "found columns question, answer, expected question and solution"),
        (
            VERL,
            {"question_column": "extra_info.q", "answer_column": "prompt"},
            "extra_info has keys answer, index, que",
        ),
        (ROW, {"answer_column": "answer.gold"}, "row 0: column answer has str, expected gold in it"),
        (ROW | {"answer": None}, {}, "column answer is empty in 1 rows"),
        (ROW | {"question": [{"role": "user"}]}, {}, "row 0: column question: found {'role': 'user'"),
        (ROW | {"question": []}, {}, "row 0: column question has messages of , expected one of user"),
        (
            ROW | {"question": [{"role": "user", "content": "a"}] * 2},
            {},
            "messages of user, user, expected one of user",
        ),
        (
            ROW | {"answer": [{"role": "user", "content": "a"}]},
            {},
            "row 0: column answer has no last message of the ass",
        ),
        (ROW, {"answer_format": "boxed"}, "row 0: answer '#### 1' has no \\boxed{...}"),
        (ROW | {"answer": " "}, {"answer_format": "text"}, "row 0: the answer is empty"),
        (ROW | {"choices": ["a"]}, CHOICE, "row 0: column choices: found ['a'], expected a list of 2 to 26 choices"),
        (
            ROW | {"choices": ["a", "b"], "answer": 2},
            CHOICE,
            "row 0: column answer: found 2, expected the letter (A to B)",
        ),
        (ROW | {"choices": ["a", "b"], "answer": "C"}, CHOICE, "row 0: column answer: found 'C', expected the letter"),
    ],
)
def test_each_mistake_is_one_line(tmp_path, row, settings, message):
    with pytest.raises(DataError) as refused:
        problems(tmp_path, [row], **settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_choices_and_their_format_need_each_other():
    for settings in ({"answer_format": "choice"}, {"choices_column": "choices"}):
        with pytest.raises(ValidationError, match="need each other"):
            LocalDataset(source="local", path="x", **settings)


def test_a_file_has_no_training_questions(tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(DataError, match="a file has test questions alone"):
        load_problems(LocalDataset(source="local", path=str(tmp_path / "own.jsonl")), "train")
    (tmp_path / "own.txt").write_text("")
    with pytest.raises(DataError, match=r"found a file \.txt, expected \.jsonl, \.csv, \.parquet"):
        load_problems(LocalDataset(source="local", path=str(tmp_path / "own.txt")), "test")


def test_the_command_line_reads_the_keys_of_a_data_set_from_a_file(tmp_path):
    described = tmp_path / "data.yaml"
    described.write_text("dataset: {source: local, path: ./own, question_column: prompt, answer_format: boxed}\n")
    config = dataset_of(str(described), 7)
    assert (config.question_column, config.answer_format, config.num_test) == ("prompt", "boxed", 7)
    described.write_text("dataset: {source: local, path: ./own, question_colum: prompt}\n")
    with pytest.raises(AqnpipeError, match=r"question_colum: unknown key \(did you mean question_column\?\)"):
        dataset_of(str(described), None)
