"""The record of a prepared model or checkpoint, and what a checkpoint of adapters says of itself; without torch.

A checkpoint of low-rank adapters stores these and not the frozen weights below them. The header of its file contains
the SHA-256 of these weights, so that the digest of the file covers both. The base is found again by that digest, among
the prepared models of the same results folder.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.config.base import FrozenModel, describe_validation_error
from aqnpipe.config.model import Dtype
from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import DataError, ModelError

PREPARED_MODEL_FILE = "aqnpipe_model.json"

ADAPTERS_FILE = "adapters.safetensors"
HEADER_KEY = "aqnpipe"
"""The only key of the file's metadata: safetensors does not keep the order of several."""

_MODELS_FOLDER = "models"


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


class AdaptersHeader(FrozenModel):
    """Header of adapters.safetensors: the base of the adapters and how they are applied.

    `dtype` is the number format in which they were trained and compute; they are stored in float32, which contains it.
    """

    base_source: str
    base_weights_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    dtype: Literal["float32", "bfloat16"]
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    target_modules: tuple[str, ...]

    def lora(self) -> LoraConfig:
        """Return the settings of the adapters outside of training: without dropout."""
        return LoraConfig(rank=self.rank, alpha=self.alpha, target_modules=self.target_modules)


def has_only_adapters(folder: Path) -> bool:
    """Return whether a model folder is a checkpoint of adapters."""
    return (folder / ADAPTERS_FILE).is_file()


def read_adapters_header(folder: Path) -> AdaptersHeader:
    """Return the header of the adapters in `folder`; ModelError if there is none or it is malformed."""
    from safetensors import SafetensorError, safe_open

    path = folder / ADAPTERS_FILE
    try:
        with safe_open(path, framework="numpy") as tensors:
            metadata = tensors.metadata() or {}
        return AdaptersHeader.model_validate_json(metadata.get(HEADER_KEY, ""))
    except SafetensorError as error:
        raise ModelError(f"{path}: not a valid safetensors file ({error})") from error
    except ValidationError as error:
        raise ModelError(f"{path}: malformed header: {describe_validation_error(error)}") from error


def find_base(folder: Path) -> Path:
    """Return the folder of the model that the adapters in `folder` were trained on, found by the digest of its weights.

    Searched are the prepared models in the folders `models/*` beside `folder` or beside any folder above it
    (results/models for a study). Raises ModelError if none of them has these weights, or the one that has them has
    another configuration.
    """
    header = read_adapters_header(folder)
    found = {path: read_prepared_model(path) for path in _prepared_models(folder)}
    matching = [path for path, record in found.items() if record.weights_sha256 == header.base_weights_sha256]
    wanted = f"{header.base_source!r} with weights {header.base_weights_sha256[:12]}"
    if not matching:
        seen = ", ".join(f"{path} has {record.weights_sha256[:12]}" for path, record in found.items())
        raise ModelError(
            f"model {str(folder)!r}: it has adapters only, trained on {wanted}, and no prepared model with these "
            f"weights was found ({seen or f'no folder {_MODELS_FOLDER} above it contains one'})"
        )
    config = read_prepared_model(folder).config_sha256
    for path in matching:
        if found[path].config_sha256 == config:
            return path
    raise ModelError(
        f"model {str(folder)!r}: its adapters were trained on {wanted}; {matching[0]} has these weights, but another "
        "config.json or generation_config.json (SHA-256 differs)"
    )


def _prepared_models(folder: Path) -> list[Path]:
    pattern = f"{_MODELS_FOLDER}/*/{PREPARED_MODEL_FILE}"
    return [path.parent for above in folder.absolute().parents for path in sorted(above.glob(pattern))]
