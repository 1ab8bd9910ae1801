from pathlib import Path

import pandera.polars as pa
import polars as pl
import pytest
from pydantic import ValidationError

from aqnpipe.artifacts.files import (
    atomic_path,
    read_json,
    read_table,
    read_yaml,
    validate_tables,
    write_json,
    write_table,
    write_text,
    write_yaml,
)
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.errors import DataError

PROBLEMS = pl.DataFrame({"question_id": ["a"], "question": ["q"], "answer": ["#### 1"], "gold_answer": ["1"]})
RECORD = RunRecord(
    stage="train", identity={"seed": 0}, config={}, code_digest="x", inputs_sha256={}, versions={}, device="cpu"
)


def test_tables_round_trip_and_have_stable_bytes(tmp_path):
    write_table(tmp_path / "one.parquet", PROBLEMS, ProblemTable)
    write_table(tmp_path / "two.parquet", PROBLEMS, ProblemTable)
    assert read_table(tmp_path / "one.parquet", ProblemTable).equals(PROBLEMS)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def test_a_table_of_the_wrong_shape_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(DataError, match="question_id"):
        write_table(tmp_path / "x.parquet", pl.concat([PROBLEMS, PROBLEMS]), ProblemTable)
    with pytest.raises(DataError, match="extra"):
        write_table(tmp_path / "x.parquet", PROBLEMS.with_columns(extra=pl.lit(1)), ProblemTable)
    assert list(tmp_path.iterdir()) == []


ACCURACY = pl.DataFrame({"arm": ["a", "b"], "seed": [0, 0], "accuracy": [0.5, 1.0]})


class AccuracyOfArms(pa.DataFrameModel):
    arm: str = pa.Field(unique=True)
    seed: int
    accuracy: float = pa.Field(ge=0, le=1, nullable=True)

    class Config:
        strict = True
        unique = ["seed", "accuracy"]  # noqa: RUF012 - pandera's own form


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (ACCURACY, None),
        (ACCURACY.with_columns(accuracy=pl.lit(None, pl.Float64)).head(1), None),
        (ACCURACY.head(0), None),
        (ACCURACY.with_columns(accuracy=pl.lit(1.5)).head(1), "accuracy"),
        (ACCURACY.with_columns(arm=pl.lit("a"), accuracy=pl.Series([0.1, 0.2])), "arm"),
        (ACCURACY.with_columns(accuracy=pl.lit(0.5)), "seed"),
        (ACCURACY.with_columns(seed=pl.lit(0.5)), "seed"),
        (ACCURACY.with_columns(extra=pl.lit(1)), "extra"),
        (ACCURACY.drop("seed"), "seed"),
    ],
)
def test_tables_of_many_files_are_validated_as_each_alone_would_be(second, message):
    """Rows that are unique in their file may be in several."""
    tables = {Path("one"): ACCURACY, Path("two"): second, Path("three"): ACCURACY}
    if message is None:
        validate_tables(tables, AccuracyOfArms)
    else:
        with pytest.raises(DataError, match=f"^two: .*{message}"):
            validate_tables(tables, AccuracyOfArms)


def test_no_tables_are_valid():
    validate_tables({}, AccuracyOfArms)


def test_missing_truncated_and_foreign_files_are_one_line(tmp_path):
    write_table(tmp_path / "good.parquet", PROBLEMS, ProblemTable)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-20])
    (tmp_path / "text.parquet").write_text("hello")
    for name in ("missing", "cut", "text"):
        with pytest.raises(DataError, match=f"{name}.parquet") as caught:
            read_table(tmp_path / f"{name}.parquet", ProblemTable)
        assert "\n" not in str(caught.value)


def test_json_and_yaml_round_trip_and_refuse_unknown_keys(tmp_path):
    write_json(tmp_path / "r.json", RECORD)
    write_yaml(tmp_path / "r.yaml", RECORD)
    assert read_json(tmp_path / "r.json", RunRecord) == RECORD == read_yaml(tmp_path / "r.yaml", RunRecord)
    (tmp_path / "r.json").write_text('{"stage": "x", "surprise": 1}')
    with pytest.raises(DataError, match=r"r\.json: "):
        read_json(tmp_path / "r.json", RunRecord)
    with pytest.raises(DataError, match="no such file"):
        read_json(tmp_path / "missing.json", RunRecord)


def test_artifacts_are_frozen():
    with pytest.raises(ValidationError):
        RECORD.stage = "other"


def test_a_failure_keeps_the_old_file_and_leaves_no_temporary_one(tmp_path):
    write_text(tmp_path / "f.txt", "old")
    with pytest.raises(RuntimeError), atomic_path(tmp_path / "f.txt") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert (tmp_path / "f.txt").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.txt"]


def test_a_folder_replaces_a_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stale").touch()
    with atomic_path(tmp_path / "run") as temporary:
        temporary.mkdir()
        (temporary / "fresh").touch()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["fresh"]
