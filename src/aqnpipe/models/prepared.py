"""The record of a prepared model folder, readable without torch."""

from pathlib import Path

from pydantic import Field

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.model import Dtype
from aqnpipe.errors import DataError, ModelError

PREPARED_MODEL_FILE = "aqnpipe_model.json"


class AdapterEffect(FrozenModel):
    """Values that the adapters of one kind of module added to their outputs in a probe, over all layers.

    `projection` is the sum of the added values with fixed random signs: unlike the norm, it changes if two layers are
    exchanged.
    """

    norm: float
    projection: float


class Probe(FrozenModel):
    """Results of the trainer's model for a few fixed tokens when it saved a checkpoint, without noise.

    Computed in double precision with the weights rounded to `dtype`, which an evaluation loads. `top_tokens` and
    `top_logits` are the largest logits at the last positions; `logits_sha256` is of all of them in float32.
    `adapter_effects` maps the names of adapted modules to the effect of their adapters.
    """

    dtype: Dtype
    token_ids: tuple[int, ...]
    top_tokens: tuple[tuple[int, ...], ...]
    top_logits: tuple[tuple[float, ...], ...]
    logits_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    adapter_effects: dict[str, AdapterEffect] = Field(default_factory=dict)


class PreparedModel(FrozenModel):
    """Provenance and shape of a prepared model or of a checkpoint, and the digests of its files.

    `source` of a checkpoint is its run and step. `num_parameters` counts the stored tensors; tied ones count once. A
    checkpoint of adapters stores only these; the digest of its weights covers that of their base (see `adapted`).
    `probe` is set for checkpoints. `merge_loss`: what rounding to the model's number format would lose of the adapters'
    update if they were merged, as a fraction; null without adapters or without an update.
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
    probe: Probe | None = None
    merge_loss: float | None = None


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
