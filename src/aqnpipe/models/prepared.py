"""What is known about a prepared model folder, readable without torch."""

from pathlib import Path

from pydantic import Field, ValidationError

from aqnpipe.config.base import FrozenModel
from aqnpipe.errors import ModelError

PREPARED_MODEL_FILE = "aqnpipe_model.json"


class PreparedModel(FrozenModel):
    """Provenance and shape of a prepared model; `num_parameters` counts the tensors stored (tied ones once)."""

    source: str
    revision: str | None
    architecture: str
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_parameters: int = Field(ge=1)
    weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tokenizer_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def read_prepared_model(folder: Path) -> PreparedModel:
    """Read the record that `prepare_model` left in `folder`; raises ModelError if it is missing or malformed."""
    path = folder / PREPARED_MODEL_FILE
    if not path.is_file():
        raise ModelError(f"{folder}: no {PREPARED_MODEL_FILE} there, expected a folder made by prepare_model")
    try:
        return PreparedModel.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ModelError(f"{path}: malformed, {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
