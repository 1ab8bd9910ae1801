"""Reading and writing artifacts: with_checksum, validated, and never half a file."""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pandera.polars as pa
import polars as pl
import yaml
from pydantic import BaseModel, ValidationError

from aqnpipe.artifacts.checksums import CHECKSUM_PLACEHOLDER, read_verified, with_checksum
from aqnpipe.config.base import describe_validation_error
from aqnpipe.errors import DataError, first_line

_JSON_END = "\n}"
_JSON_CHECKSUM = ',\n  "checksum": "'

_FILE = "aqnpipe_file"

Model = TypeVar("Model", bound=BaseModel)

RESULT_FOLDERS = ("data", "models", "srdd", "runs", "eval", "loss_study")
"""The folders of a study's results; the results of another study may be in a folder beside them."""

STAGED = ".staged"
"""End of the names of hidden folders in which artifacts are written; a killed job leaves its own behind."""


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it there on success, remove it on any exception.

    The body may create a file or a folder at the yielded path. An existing target is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=STAGED, dir=target.parent))
    temporary = staging / target.name
    try:
        yield temporary
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def remove_staged(results: Path) -> None:
    """Remove the folders in `results` in which killed jobs were writing; for when no job of the study runs."""
    name = f".*{STAGED}"
    deeper = (path for folder in RESULT_FOLDERS for path in (results / folder).rglob(name))
    for path in [*results.glob(name), *deeper]:
        shutil.rmtree(path)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as indented, with_checksum JSON, atomically."""
    text = model.model_dump_json(indent=2)
    _write_with_checksum(
        target, f'{text.removesuffix(_JSON_END)}{_JSON_CHECKSUM}{CHECKSUM_PLACEHOLDER}"{_JSON_END}\n'.encode()
    )


def read_json(path: Path, model: type[Model]) -> Model:
    """Read and validate a JSON artifact; DataError naming the file and the first problem."""
    content, seal, _ = read_verified(path).decode().rpartition(_JSON_CHECKSUM)
    if not seal:
        raise DataError(f"{path}: its seal is not where write_json puts it; make it again")
    return _valid(path, lambda: model.model_validate_json(content + _JSON_END))


def write_yaml(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as YAML, atomically; the seal is its last line."""
    text = yaml.safe_dump(json.loads(model.model_dump_json()), sort_keys=False, allow_unicode=True)
    _write_with_checksum(target, f"{text}# {CHECKSUM_PLACEHOLDER}\n".encode())


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML artifact; DataError naming the file and the first problem."""
    return _valid(path, lambda: model.model_validate(yaml.safe_load(read_verified(path).decode())))


def read_users_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML file that a person wrote, which has no seal; DataError as `read_yaml`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise DataError(f"{path}: {'no such file' if missing else f'cannot be read ({error})'}") from error
    return _valid(path, lambda: model.model_validate(yaml.safe_load(text)))


def write_table(target: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> None:
    """Validate `table` against `schema` and write it as parquet with a seal in its metadata, atomically."""
    validated = _validated(target, table, schema)
    buffer = io.BytesIO()
    validated.write_parquet(buffer, compression="zstd", statistics=True, metadata={"checksum": CHECKSUM_PLACEHOLDER})
    _write_with_checksum(target, buffer.getvalue())


def write_csv(target: Path, table: pl.DataFrame) -> None:
    """Write `table` as CSV, atomically: the same rows as the parquet beside it, for other people's tools."""
    with atomic_path(target) as temporary:
        table.write_csv(temporary)


def read_table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    """Read a parquet artifact and validate it; DataError naming the file and the first problem."""
    return _validated(path, read_unchecked_table(path), schema)


def validate_tables(tables: Mapping[Path, pl.DataFrame], schema: type[pa.DataFrameModel]) -> None:
    """Validate what `read_unchecked_table` read from many files, in the time of one; DataError as `read_table`."""
    if tables and not _is_valid_together(list(tables.values()), schema):
        for path, table in tables.items():
            _validated(path, table, schema)


def _is_valid_together(tables: Sequence[pl.DataFrame], schema: type[pa.DataFrameModel]) -> bool:
    single = schema.to_schema()
    alone = [name for name, column in single.columns.items() if column.unique]
    sets = [[name] for name in alone] + ([list(single.unique)] if single.unique else [])
    joint = single.update_columns({name: {"unique": False} for name in alone}).add_columns(
        {_FILE: pa.Column(pl.UInt32)}
    )
    joint.unique = None
    try:
        together = pl.concat(
            [table.with_columns(pl.lit(number, dtype=pl.UInt32).alias(_FILE)) for number, table in enumerate(tables)]
        )
        joint.validate(together)
    except (pa.errors.SchemaError, pl.exceptions.PolarsError):
        return False
    return not any(together.select(_FILE, *names).is_duplicated().any() for names in sets)


def read_unchecked_table(path: Path) -> pl.DataFrame:
    """Read a parquet artifact whole, whatever its columns; DataError as `read_table`."""
    content = read_verified(path)
    try:
        return pl.read_parquet(io.BytesIO(content))
    except pl.exceptions.PolarsError as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from error


def _write_with_checksum(target: Path, content: bytes) -> None:
    with atomic_path(target) as temporary:
        temporary.write_bytes(with_checksum(content))


def _valid(path: Path, read: Callable[[], Model]) -> Model:
    try:
        return read()
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not valid YAML ({first_line(error)})") from error
    except ValidationError as error:
        raise DataError(f"{path}: {describe_validation_error(error)}") from error


def _validated(path: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    try:
        return schema.validate(table)
    except pa.errors.SchemaError as error:
        raise DataError(f"{path}: {first_line(error)}") from error
