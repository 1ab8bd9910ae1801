"""Writes and reads captures. A file is checked whole before any of its values is used."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from aqnpipe.artifacts.files import atomic_path
from aqnpipe.artifacts.parities import CAPTURE_FORMAT, CaptureIdentity
from aqnpipe.config.base import describe_validation_error
from aqnpipe.errors import DataError
from aqnpipe.parity.sample import Sample

_IDENTITY = "identity.json"
_OPERATORS, _TOKENS, _TENSORS = "operators.parquet", "tokens.parquet", "tensors.safetensors"
_MEMBERS = (_OPERATORS, _TOKENS, _TENSORS)
_EPOCH = (1980, 1, 1, 0, 0, 0)

OPERATOR_COLUMNS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("name", "kind"), pl.String),
    **dict.fromkeys(("layer", "width"), pl.Int64),
    "dtype": pl.String,
    **dict.fromkeys(("mean", "rms", "largest", "zero_share"), pl.Float64),
    "sha256": pl.String,
    **dict.fromkeys(("strict", "loose", "reduced"), pl.Float64),
    "algorithms": pl.String,
    "is_linked": pl.Boolean,
}
"""One operator per row, in the order in which they ran.

strict, loose, reduced: largest error as a multiple of the bounds in parity/forms.py. algorithms: JSON, the share of
elements that each known algorithm gives bit for bit. is_linked: nothing computes between the operators before and this
one that was not there on random weights. mean to sha256 are of the recorded results.
"""

TOKEN_COLUMNS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("sequence", "position", "token_id"), pl.Int64),
    "is_decoded": pl.Boolean,
    "log_probability": pl.Float64,
    "predicted": pl.Int64,
    "replayed_log_probability": pl.Float64,
}
"""One token per row: its id, its log-probability after the tokens before it, and the most likely id in its place.

The first token of a sequence has no prediction. replayed_log_probability: with the other side's last hidden state.
"""


@dataclass(frozen=True)
class Capture:
    """A capture in memory. `tensors`: by kind/operator; `digest`: SHA-256 of identity.json, once it is sealed."""

    identity: CaptureIdentity
    operators: pl.DataFrame
    tokens: pl.DataFrame
    tensors: dict[str, Tensor] = field(repr=False)
    digest: str = ""

    @property
    def sample(self) -> Sample:
        """The recorded tokens."""
        return Sample(self.identity.lengths)

    @property
    def sequences(self) -> list[list[int]]:
        """The token ids of every sequence."""
        rows = self.tokens.group_by("sequence", maintain_order=True).agg("token_id")
        return [list(ids) for ids in rows["token_id"]]

    def tensor(self, kind: str, operator: str) -> Tensor:
        """Return the tensor of a kind (output, exact, bound, input_rms, replay) of an operator."""
        return self.tensors[f"{kind}/{operator}"]


def seal(capture: Capture) -> tuple[Capture, dict[str, bytes]]:
    """Return the capture with the digests of its members, and the bytes of all members."""
    contents = {
        _OPERATORS: _parquet(capture.operators),
        _TOKENS: _parquet(capture.tokens),
        _TENSORS: save({name: tensor.contiguous() for name, tensor in capture.tensors.items()}),
    }
    identity = capture.identity.model_copy(update={"members": {name: _sha256(data) for name, data in contents.items()}})
    text = identity.model_dump_json(indent=2).encode()
    return replace(capture, identity=identity, digest=_sha256(text)), {_IDENTITY: text, **contents}


def write_capture(path: Path, capture: Capture) -> Capture:
    """Write a capture to one file, atomically; return it with its digest."""
    sealed, contents = seal(capture)
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return sealed


def read_capture(path: Path) -> Capture:
    """Return the capture in a file; DataError, in one line, if it is missing, damaged or of another version."""
    contents = _members(path)
    identity = _identity(path, contents[_IDENTITY])
    for name in _MEMBERS:
        if identity.members.get(name) != _sha256(contents[name]):
            raise DataError(f"{path}: {name} and its SHA-256 do not match: damaged or edited; capture again")
    try:
        tables = (_table(contents[_OPERATORS], OPERATOR_COLUMNS), _table(contents[_TOKENS], TOKEN_COLUMNS))
        capture = Capture(identity, *tables, load(contents[_TENSORS]), _sha256(contents[_IDENTITY]))
    except (SafetensorError, pl.exceptions.PolarsError, ValueError) as error:
        raise DataError(f"{path}: not readable as a capture ({str(error).splitlines()[0]})") from error
    rows, kinds = capture.sample.num_rows, ["output", "exact", "bound", "input_rms"]
    for name in capture.operators["name"]:
        for kind in [*kinds, "replay"] if identity.replay_of else kinds:
            tensor = capture.tensors.get(f"{kind}/{name}")
            if tensor is None or tensor.shape[0] != rows:
                raise DataError(f"{path}: no {kind} of operator {name} for {rows} tokens; capture again")
    return capture


def _members(path: Path) -> dict[str, bytes]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: found {found}, expected a file of `aqnpipe capture`")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if sorted(names) != sorted((_IDENTITY, *_MEMBERS)):
                found = ", ".join(names[:4]) or "nothing"
                raise DataError(f"{path}: holds {found}, expected a file of `aqnpipe capture`")
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise DataError(f"{path}: its members are compressed, which `aqnpipe capture` does not do")
            return {name: archive.read(name) for name in names}
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path}: damaged or no file of `aqnpipe capture` ({error})") from error


def _identity(path: Path, text: bytes) -> CaptureIdentity:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}: identity.json is not valid JSON ({error})") from error
    version = content.get("format") if isinstance(content, dict) else None
    if version != CAPTURE_FORMAT:
        raise DataError(
            f"{path}: format {version}, expected {CAPTURE_FORMAT}: capture again with the same aqnpipe on both sides"
        )
    try:
        return CaptureIdentity.model_validate(content)
    except ValidationError as error:
        raise DataError(f"{path}: identity.json: {describe_validation_error(error)}") from error


def _parquet(table: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


def _table(data: bytes, columns: Mapping[str, type[pl.DataType]]) -> pl.DataFrame:
    table = pl.read_parquet(io.BytesIO(data))
    if dict(table.schema) != {name: kind() for name, kind in columns.items()}:
        raise ValueError(f"columns are {', '.join(table.columns)}")
    return table


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
