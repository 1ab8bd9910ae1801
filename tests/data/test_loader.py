import csv
import json
import os
from pathlib import Path

import polars as pl
import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from aqnpipe.cli.options import dataset_of
from aqnpipe.config.dataset import DatasetConfig, GeneratedDataset, HubDataset, LocalDataset, PromptFormat
from aqnpipe.data import loader
from aqnpipe.data.generated import Problem
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import format_prompt
from aqnpipe.errors import AqnpipeError, DataError, ModelError

TRAIN = [{"question": "2 and 3?", "answer": "2+3=5\n#### 5"}, {"question": "Cost?", "answer": "#### $1,250.50"}]
TEST = [{"question": "One?", "answer": "#### 1"}, {"question": "Two?", "answer": "#### 2"}]

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 and 3? Output the final answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"answer": "2+3=5\n#### 5", "index": 0, "question": "2 and 3?", "split": "test"},
}
ROW = {"question": "q", "answer": "#### 1"}


def write_jsonl(folder: Path, train=TRAIN, test=TEST) -> LocalDataset:
    for split, rows in (("train", train), ("test", test)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LocalDataset(source="local", path=str(folder))


def test_local_jsonl_and_parquet_give_the_same_table(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    from_jsonl = load_problems(write_jsonl(tmp_path / "a"), "train")
    pl.DataFrame(TRAIN).with_columns(extra=1).write_parquet(tmp_path / "b" / "train.parquet")
    pl.DataFrame(TEST).write_parquet(tmp_path / "b" / "test.parquet")
    from_parquet = load_problems(LocalDataset(source="local", path=str(tmp_path / "b")), "train")
    assert from_jsonl.equals(from_parquet)
    assert from_jsonl.columns == ["question_id", "question", "answer", "gold_answer"]
    assert from_jsonl.rows() == [
        ("train-00000", "2 and 3?", "2+3=5\n#### 5", "5"),
        ("train-00001", "Cost?", "#### $1,250.50", "1250.5"),
    ]


def test_limit_takes_the_first_rows_and_may_not_exceed_them(tmp_path):
    config = write_jsonl(tmp_path)
    assert load_problems(config.model_copy(update={"num_test": 1}), "test")["question"].to_list() == ["One?"]
    with pytest.raises(DataError, match="num_test is 3, but the split has 2 rows"):
        load_problems(config.model_copy(update={"num_test": 3}), "test")


def one_more(question: str, answer: str) -> list[dict[str, str]]:
    return [*TEST, {"question": question, "answer": answer}]


@pytest.mark.parametrize(
    ("test_rows", "message"),
    [
        (one_more("2  AND 3?", "#### 5"), r"1 test question\(s\) are also in train.*'2  AND 3\?'"),
        (one_more("one?", "#### 7"), "question 'one\\?' has two answers, 1 and 7"),
        (one_more("Three?", "three"), "row 2: answer 'three' has no"),
        ([{"question": "q"}], "found columns question, expected question and answer"),
        ([{"question": "q", "answer": 4}], "column answer is int, expected text"),
        ([{"question": None, "answer": "#### 1"}, *TEST], "column question is empty in 1 rows"),
    ],
)
def test_wrong_content_is_one_clear_error(tmp_path, test_rows, message):
    with pytest.raises(DataError, match=message) as caught:
        load_problems(write_jsonl(tmp_path, test=test_rows), "test")
    assert "\n" not in str(caught.value)


def test_repeated_question_with_the_same_answer_is_allowed(tmp_path):
    assert load_problems(write_jsonl(tmp_path, test=one_more("one?", "1*1=1\n#### 1")), "test").height == 3


def test_missing_doubled_and_broken_files(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load_problems(LocalDataset(source="local", path=str(tmp_path / "none")), "test")
    config = LocalDataset(source="local", path=str(tmp_path))
    with pytest.raises(DataError, match=r"found none of train\.jsonl, train\.csv, train\.parquet"):
        load_problems(config, "test")
    write_jsonl(tmp_path)
    pl.DataFrame(TRAIN).write_parquet(tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"found train\.jsonl and train\.parquet of"):
        load_problems(config, "test")
    (tmp_path / "train.parquet").unlink()
    (tmp_path / "test.jsonl").write_text('{"question": ')
    with pytest.raises(DataError, match=r"test\.jsonl: cannot be read as jsonl"):
        load_problems(config, "test")


def test_generated_data_set_is_a_table_without_overlap():
    config = GeneratedDataset(num_train=60, num_test=40)
    train, test = load_problems(config, "train"), load_problems(config, "test")
    assert (train.height, test.height) == (60, 40)
    assert test["question_id"][17] == "test-00017"
    assert not set(train["question"]) & set(test["question"])
    assert all(answer.endswith(f"\n#### {gold}") for answer, gold in test.select("answer", "gold_answer").rows())


def test_generated_overlap_would_be_caught(monkeypatch):
    same = [Problem("How many?", "1+1=2\n#### 2", 1, False, "+")]
    monkeypatch.setattr(loader, "generate_problems", lambda config, split: same)
    with pytest.raises(DataError, match="also in train"):
        load_problems(GeneratedDataset(num_train=1, num_test=1), "test")


def test_hub_data_set_goes_through_the_same_checks(monkeypatch):
    import datasets

    requested = []

    def fake_load_dataset(hub_id, subset, *, revision, split):
        requested.append((hub_id, subset, revision, split))
        return datasets.Dataset.from_list(TRAIN if split == "train" else TEST)

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    config = HubDataset(source="hub", num_test=1)
    assert load_problems(config, "test").rows() == [("test-00000", "One?", "#### 1", "1")]
    assert ("openai/gsm8k", "main", "main", "test") in requested


def test_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch):
    import datasets

    def no_network(*arguments, **options):
        raise ConnectionError("Couldn't reach 'no/data' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(DataError, match=r"no/data.*could not be fetched from the hub") as caught:
        load_problems(HubDataset(source="hub", hub_id="no/data"), "test")
    assert "\n" not in str(caught.value)


SVAMP_LIKE = [{"Body": "x", "question_concat": "Ann has 3 pens. More?", "Answer": "145.0"}]


def stored(folder: Path, train, test, **columns) -> LocalDataset:
    return write_jsonl(folder, train, test).model_copy(update=columns)


@pytest.mark.parametrize(("value", "gold"), [("145.0", "145"), (145, "145"), (2.5, "2.5"), ("1,250", "1250")])
def test_bare_numbers_in_columns_of_other_names(tmp_path, value, gold):
    columns = {"question_column": "question_concat", "answer_column": "Answer", "answer_format": "number"}
    test = [{"question_concat": "How many?", "Answer": value, "Type": "Addition"}]
    config = stored(tmp_path, SVAMP_LIKE, test, **columns)
    assert load_problems(config, "test").rows() == [("test-00000", "How many?", f"#### {gold}", gold)]


def test_columns_of_a_hub_data_set(monkeypatch):
    import datasets

    def fake_load_dataset(hub_id, subset, *, revision, split):
        return datasets.Dataset.from_list([{"question_concat": f"{split}?", "Answer": "8"}])

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    config = HubDataset(
        source="hub",
        hub_id="ChilleD/SVAMP",
        subset="default",
        question_column="question_concat",
        answer_column="Answer",
        answer_format="number",
    )
    assert load_problems(config, "train").rows() == [("train-00000", "train?", "#### 8", "8")]


def test_source_decides_which_keys_are_known():
    adapter = TypeAdapter(DatasetConfig)
    assert isinstance(adapter.validate_python({"source": "generated", "max_number": 30}), GeneratedDataset)
    with pytest.raises(ValidationError, match="Extra inputs"):
        adapter.validate_python({"source": "local", "path": "x", "max_number": 30})


def test_real_gsm8k_loads_whole():
    folder = os.environ.get("AQNPIPE_GSM8K_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("AQNPIPE_GSM8K_DIR names no folder with the real GSM8K")
    config = LocalDataset(source="local", path=folder)
    assert load_problems(config, "train").height == 7473
    test = load_problems(config, "test")
    assert test.height == 1319
    assert test["gold_answer"][0] == "18"


class StubTokenizer:
    chat_template = "yes"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"


def test_prompts():
    tokenizer = StubTokenizer()
    assert format_prompt("How many?", PromptFormat(), tokenizer) == "How many?\n"
    assert format_prompt("How many?", PromptFormat(instruction="Think."), tokenizer) == "Think.\nHow many?\n"
    chat = PromptFormat(style="chat", instruction="Think.")
    assert format_prompt("How many?", chat, tokenizer) == "<user>How many? Think.<assistant>"
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        format_prompt("How many?", chat, tokenizer)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, suffix):
    rows = {"jsonl": '{"question": "a", "answer": "#### 1"}\n', "csv": "question,answer\na,#### 1\n"}
    path = tmp_path / f"test.{suffix}"
    path.write_text(rows[suffix], encoding="utf-8-sig")
    assert load_problems(LocalDataset(source="local", path=str(path)), "test")["question"].to_list() == ["a"]


@pytest.mark.parametrize("header", ['question,answer,"a, note"', "question,answer,,", "question,answer,Answer"])
def test_columns_with_different_names_are_read(tmp_path, header):
    path = tmp_path / "test.csv"
    path.write_text(f"{header}\na,#### 1,x{',y' if header.endswith(',,') else ''}\n")
    assert load_problems(LocalDataset(source="local", path=str(path)), "test")["gold_answer"].to_list() == ["1"]


def with_clusters(rows, names):
    return [row | {"meta": {"document": name}} for row, name in zip(rows, names, strict=True)]


def test_a_column_that_names_clusters_is_read_and_may_not_be_empty(tmp_path):
    config = write_jsonl(tmp_path, with_clusters(TRAIN, ["a", "b"]), with_clusters(TEST, ["c", 7]))
    named = config.model_copy(update={"cluster_column": "meta.document"})
    assert load_problems(named, "test")["cluster"].to_list() == ["c", "7"]
    assert "cluster" not in load_problems(config, "test").columns
    empty = write_jsonl(tmp_path, with_clusters(TRAIN, ["a", "b"]), with_clusters(TEST, ["c", None]))
    with pytest.raises(DataError, match=r"column meta\.document is empty in 1 rows"):
        load_problems(empty.model_copy(update={"cluster_column": "meta.document"}), "test")


def test_generated_problems_are_clustered_by_their_operations():
    problems = load_problems(GeneratedDataset(num_train=5, num_test=60, max_steps=2), "test")
    for answer, kind in problems.select("answer", "cluster").iter_rows():
        steps = answer.split("\n")[:-1]
        assert len(kind) == len(steps)
        assert all(operation in step for operation, step in zip(kind, steps, strict=True))
    assert 4 < problems["cluster"].n_unique() <= 20


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


@pytest.mark.parametrize("mistake", yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text()))
def test_each_mistake_is_one_line(tmp_path, mistake):
    with pytest.raises(DataError, match=mistake["says"]) as refused:
        problems(tmp_path, [mistake["row"]], **mistake.get("settings", {}))
    assert "\n" not in str(refused.value)


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
    config = dataset_of(str(described), 7, trust_code=False)
    assert (config.question_column, config.answer_format, config.num_test) == ("prompt", "boxed", 7)
    described.write_text("dataset: {source: local, path: ./own, question_colum: prompt}\n")
    with pytest.raises(AqnpipeError, match=r"question_colum: unknown key \(did you mean question_column\?\)"):
        dataset_of(str(described), None, trust_code=False)
