"""Reading and writing artifacts: with a checksum, validated, and atomically; files that survive a crash (fsync).

Files contain their own SHA-256, so that a truncated, corrupted or edited file is detected before it is used. The digest
is stored inside the file: one rename publishes both, and a copy keeps both. It is computed over the file with zeros in
place of the digest. A checksum detects accidents and edits by other tools. It is not a signature, because anyone who
runs this package can write one. The digests in the run records tie the files of a study together.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandera.polars as pa
import polars as pl
import yaml
from pydantic import BaseModel, ValidationError

from aqnpipe.artifacts.provenance import sha256_of_file, sha256_of_files
from aqnpipe.config.base import RESULT_FOLDERS, describe_validation_error, refuse_pipe_or_device
from aqnpipe.errors import DataError, first_line

_JSON_END = "\n}"
_JSON_CHECKSUM = ',\n  "checksum": "'

_FILE = "aqnpipe_file"
"""Column that marks the table of each row while several tables are validated together."""

Model = TypeVar("Model", bound=BaseModel)

STAGED = ".staged"
"""Suffix of the hidden folders in which artifacts are written before the rename; a killed job leaves one behind."""

_MARK = "aqnpipe-sha256:"
_NUM_DIGITS = 64
_CHECKSUM = re.compile(rf"{_MARK}([0-9a-f]{{{_NUM_DIGITS}}})".encode())
CHECKSUM_PLACEHOLDER = _MARK + "0" * _NUM_DIGITS
"""Text that a writer puts where the digest belongs."""


class Table(pa.DataFrameModel):
    """Base class of the schemas of tables: no other columns are allowed, nor rows that are equal in all of `unique`."""

    class Config:
        """Settings of pandera, which every schema inherits."""

        strict = True

    def __init_subclass__(cls, unique: Sequence[str] = (), **settings: Any) -> None:
        own = {"name": cls.__name__, "unique": list(unique) or None}
        cls.Config = type("Config", (Table.Config,), own)  # type: ignore[misc, assignment]
        super().__init_subclass__(**settings)


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
    """Remove the staging folders that killed jobs left in `results`. Safe only while no job of the study runs."""
    name = f".*{STAGED}"
    nested = (path for folder in RESULT_FOLDERS for path in (results / folder).rglob(name))
    for path in [*results.glob(name), *nested]:
        shutil.rmtree(path)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as indented JSON with a checksum, atomically."""
    text = model.model_dump_json(indent=2)
    _write_with_checksum(
        target, f'{text.removesuffix(_JSON_END)}{_JSON_CHECKSUM}{CHECKSUM_PLACEHOLDER}"{_JSON_END}\n'.encode()
    )


def read_json(path: Path, model: type[Model]) -> Model:
    """Read and validate a JSON artifact; DataError naming the file and the first problem."""
    content, checksum, _ = _read_verified(path).decode().rpartition(_JSON_CHECKSUM)
    if not checksum:
        raise DataError(f"{path}: its checksum is not the last key, so aqnpipe did not write it; make it again")
    return _valid(path, lambda: model.model_validate_json(content + _JSON_END))


def write_yaml(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as YAML with a checksum as its last line, atomically."""
    text = yaml.safe_dump(json.loads(model.model_dump_json()), sort_keys=False, allow_unicode=True)
    _write_with_checksum(target, f"{text}# {CHECKSUM_PLACEHOLDER}\n".encode())


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML artifact; DataError naming the file and the first problem."""
    return _valid(path, lambda: model.model_validate(yaml.safe_load(_read_verified(path).decode())))


def write_table(target: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> None:
    """Validate `table` against `schema` and write it as parquet with a checksum in its metadata, atomically."""
    validated = _validated(target, table, schema)
    buffer = io.BytesIO()
    validated.write_parquet(buffer, compression="zstd", statistics=True, metadata={"checksum": CHECKSUM_PLACEHOLDER})
    _write_with_checksum(target, buffer.getvalue())


def table_of(rows: Iterable[Mapping[str, Any]], schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    """Return rows as a table with the columns of a schema, not validated; what a row lacks is null."""
    types = {name: column.dtype.type for name, column in schema.to_schema().columns.items()}
    return pl.DataFrame([{name: row.get(name) for name in types} for row in rows], schema=types)


def write_csv(target: Path, table: pl.DataFrame) -> None:
    """Write `table` as CSV, atomically: the rows of the parquet file beside it, for other tools."""
    with atomic_path(target) as temporary:
        table.write_csv(temporary)


def read_table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    """Read a parquet artifact and validate it; DataError naming the file and the first problem."""
    return _validated(path, read_unchecked_table(path), schema)


def validate_tables(tables: Mapping[Path, pl.DataFrame], schema: type[pa.DataFrameModel]) -> None:
    """Validate tables from `read_unchecked_table` together, in the time of one; DataError as in `read_table`."""
    joint = schema.to_schema().add_columns({_FILE: pa.Column(pl.UInt32)})
    joint.unique = [_FILE, *joint.unique] if joint.unique else None
    try:
        if tables:
            joint.validate(numbered_together(list(tables.values()), _FILE))
    except (pa.errors.SchemaError, pl.exceptions.PolarsError):
        for path, table in tables.items():
            _validated(path, table, schema)


def numbered_together(tables: Sequence[pl.DataFrame], column: str) -> pl.DataFrame:
    """Return tables of one schema as one, with a `column` that numbers them."""
    numbers = np.repeat(np.arange(len(tables), dtype=np.uint32), [len(table) for table in tables])
    return pl.concat(tables).with_columns(pl.Series(column, numbers))


def read_unchecked_table(path: Path) -> pl.DataFrame:
    """Read all columns of a parquet artifact without validating them; DataError as in `read_table`."""
    content = _read_verified(path)
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


def with_checksum(content: bytes) -> bytes:
    """Return `content` with its digest in place of the last `CHECKSUM_PLACEHOLDER`; DataError if it contains none."""
    place = content.rfind(CHECKSUM_PLACEHOLDER.encode())
    if place < 0:
        raise DataError("content without a place for its checksum; this is a bug")
    return _with_digest(content, place + len(_MARK), hashlib.sha256(content).hexdigest().encode())


def _read_verified(path: Path) -> bytes:
    """Return the bytes of `path`; DataError if the file is missing, unreadable, or fails its checksum."""
    refuse_pipe_or_device(path, DataError)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    found = list(_CHECKSUM.finditer(content))
    if not found:
        raise DataError(f"{path}: no checksum in it, so it is truncated or was not written by aqnpipe; make it again")
    start = found[-1].start(1)
    bare = _with_digest(content, start, b"0" * _NUM_DIGITS)
    if hashlib.sha256(bare).hexdigest().encode() != found[-1].group(1):
        raise DataError(f"{path}: its content and its SHA-256 do not match: damaged or edited; make it again")
    return content


def _with_digest(content: bytes, start: int, digest: bytes) -> bytes:
    return content[:start] + digest + content[start + _NUM_DIGITS :]


def files_in(folder: Path) -> list[str]:
    """Return the relative path of every file under `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file under `folder` by relative path."""
    return sha256_of_files({name: folder / name for name in files_in(folder)})


def damage(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return a message about the first file under `folder` that does not match `digests`; None if all match."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256_of_file(path) != digest:
            return f"{path} changed since it was written (SHA-256 differs)"
    return None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Flush files below `folder`, and the folders that lead to them, to the disk."""
    files = {folder / name for name in names}
    folders = {above for file in files for above in file.parents if above.is_relative_to(folder)}
    for path in (*files, *folders):
        sync(path)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and every file and folder under it to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system, durably: after a crash the file has either its old name or its new one."""
    os.replace(source, target)
    sync(target.parent)


def write_durably(target: Path, text: str) -> None:
    """Write a small file durably: after a crash either the old or the new content is there, complete."""
    staged = target.with_name(f".{target.name}.new")
    staged.write_text(text, encoding="utf-8")
    sync(staged)
    rename(staged, target)
