"""The record of a prepared model folder, readable without torch."""

from pathlib import Path

from pydantic import Field

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.config.base import FrozenModel
from aqnpipe.errors import DataError, ModelError

PREPARED_MODEL_FILE = "aqnpipe_model.json"


class PreparedModel(FrozenModel):
    """Provenance and shape of a prepared model or of a checkpoint, and the digests of its files.

    `source` of a checkpoint is its run and step. `num_parameters` counts the stored tensors; tied ones count once.
    """

    source: str
    revision: str | None
    architecture: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_parameters: int = Field(ge=1)
    weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokenizer_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    config_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def read_prepared_model(folder: Path) -> PreparedModel:
    """Read the record that `prepare_model` wrote to `folder`; raises ModelError if it is missing or malformed."""
    path = folder / PREPARED_MODEL_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: no {PREPARED_MODEL_FILE} there, expected a folder made by prepare_model")
    try:
        return read_json(path, PreparedModel)
    except DataError as error:
        raise ModelError(str(error)) from error


def write_prepared_model(folder: Path, record: PreparedModel) -> None:
    """Write the record of a model into its folder."""
    write_json(folder / PREPARED_MODEL_FILE, record)
