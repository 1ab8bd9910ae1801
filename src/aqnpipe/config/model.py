"""The model of a role in a study. Its shape is read from config.json, without torch."""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, field_validator

from aqnpipe.config.base import FrozenModel, refuse_pipe_or_device
from aqnpipe.errors import ModelError

BuiltinModel = Literal["tiny", "tiny-large", "tiny-comparison", "tiny-mixture"]
SourceKind = Literal["builtin", "folder", "hub"]
Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["eager", "sdpa"]

BUILTIN_MODELS: tuple[str, ...] = get_args(BuiltinModel)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_KERNEL = re.compile(r"[\w|]+")
_EPSILON = re.compile(r"norm_eps(ilon)?$")
_COUNT = re.compile(r"(num|n)_(\w+_)?(layers|labels|experts|heads|groups)")
"""Keys whose number transformers makes parts of, or names of labels, one after the other."""
_LARGEST_THETA = 1e30
_MOST_LAYERS = 10_000
_MOST_PARTS = 1_000_000
_MOST_ENTRIES = 50_000
_LARGEST_SIZE = 2**31 - 1
_MOST_BYTES = 256 * 2**20
"""Most bytes of a text file of a model; the tokenizers of the largest vocabularies have 35 MB."""
_SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"),
    "max_position_embeddings",
)
"""Keys of config.json that are sizes; a family may have one per layer, or none."""
_REFERENCES = ("configuration_files", "transformers_weights", "fusion_config", "distributed_config")
"""Keys by which transformers reads another file than this one, or changes its classes, whatever the caller asks for."""
_DECIDES_NO_VALUE = re.compile(
    r"_?(dtype|torch_dtype|transformers_version|initializer_range|.*dropout|.*_token_id|name_or_path|id2label|label2id"
    r"|output_.*|return_dict|problem_type|chunk_size_.*|tokenizer_class)"
)
"""Keys that change no logit of an evaluated model: names, tokens, training, output formats."""
_PATH_PREFIXES = ("/", "./", "../")
_OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions",),
}
"""Keys of config.json that some families (GPT-2, GPT-J, GPT-Neo, BLOOM, MPT) name differently."""


_QWEN2_5 = {"model_type": "qwen2", "num_hidden_layers": 28}
_QWEN2_5_1_5B = {
    **_QWEN2_5,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": _QWEN2_5_1_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": {**_QWEN2_5_1_5B, "max_position_embeddings": 32768},
    "Qwen/Qwen2.5-7B-Instruct": {
        **_QWEN2_5,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
}
"""Sizes of the hub models of the shipped studies, from their config.json, for use before they are downloaded."""


def noised_attention(attention: str) -> Literal["decomposed", "fused"]:
    """Return what noise on attention is put on with an implementation: both products, or one operator."""
    return "decomposed" if attention == "eager" else "fused"


class ModelConfig(FrozenModel):
    """A model (built-in name, local folder or hub id), its dtype and its attention implementation."""

    source: str
    revision: str | None = None
    dtype: Dtype = "float32"
    attention: Attention = "eager"

    @field_validator("source")
    @classmethod
    def _source_is_known(cls, source: str) -> str:
        try:
            source_kind(source)
        except ModelError as error:
            raise ValueError(str(error)) from error
        return source

    def _problems(self) -> Iterator[str]:
        if self.revision is not None and source_kind(self.source) != "hub":
            yield f"revision: found {self.revision!r}, expected none: {self.source!r} is not from the hub"


CheckpointConfig = Annotated[
    ModelConfig,
    BeforeValidator(
        lambda value: {"source": value} if isinstance(value, str) else value, json_schema_input_type=ModelConfig | str
    ),
]
"""A model, or only its source."""


def source_kind(source: str) -> SourceKind:
    """Return the kind of `source`; raises ModelError if it is none of the three.

    Paths that start with /, ./ or ../ are folders, existing or not. `owner/name` is a folder if that folder exists,
    else a hub id.
    """
    if source in BUILTIN_MODELS:
        return "builtin"
    if source.startswith(_PATH_PREFIXES) or (source and Path(source).is_dir()):
        return "folder"
    if _HUB_ID.fullmatch(source):
        return "hub"
    raise ModelError(
        f"model source {source!r} is unknown: expected {', '.join(BUILTIN_MODELS)}, an existing folder, "
        "or a hub id of the form owner/name"
    )


def builtin_folder(name: str) -> Path:
    """Return the package folder with the weights of the built-in model `name`."""
    return Path(str(files("aqnpipe.models"))) / "weights" / name


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder, with sizes also under their common names.

    Raises ModelError if the file is missing, not a JSON object, names code that is not part of transformers or another
    file, or more layers than any model has. Keys that depend on the family are examined by `load_config`.
    """
    path = folder / "config.json"
    if not path.is_file():
        found, expected = "a folder without config.json", "a model folder with config.json"
        if (folder / "adapter_config.json").is_file():
            found, expected = "the adapters of PEFT alone", "the whole model: merge_and_unload, then save_pretrained"
        elif not folder.is_dir():
            found = "no such folder"
        raise ModelError(f"model {str(folder)!r}: found {found}, expected {expected}")
    config = common_names(read_json_object(path))
    num_layers = config.get("num_hidden_layers", 1)
    if not (isinstance(num_layers, int) and 0 < num_layers <= _MOST_LAYERS):
        raise ModelError(f"{path}: num_hidden_layers is {num_layers!r}, expected a number from 1 to {_MOST_LAYERS:,}")
    for key in (key for key in _SIZES if config.get(key) is not None):
        sizes = config[key] if isinstance(config[key], list) else [config[key]]
        if not all(type(size) is int and 0 < size <= _LARGEST_SIZE for size in sizes):
            raise ModelError(
                f"{path}: {key} is {repr(config[key])[:80]}, expected a whole number from 1 to {_LARGEST_SIZE:,}"
            )
    if reference := next((key for key in _REFERENCES if config.get(key) is not None), None):
        raise ModelError(f"{path}: {reference} would load other files or code than named here, expected none")
    for key, value in _settings("", config):
        # transformers fetches an implementation with another name from a hub, whatever the caller asks for.
        if key.endswith("_implementation") and value is not None and not _KERNEL.fullmatch(str(value)):
            raise ModelError(f"{path}: {key} is {value!r}, expected the name of an implementation in transformers")
        if _EPSILON.search(key) and value is not None and not (_is_number(value) and 0 <= value <= 1):
            raise ModelError(f"{path}: {key} is {value!r}, expected a number from 0 to 1")
        if key == "rope_theta" and value is not None and not (_is_number(value) and 0 < value <= _LARGEST_THETA):
            raise ModelError(f"{path}: {key} is {repr(value)[:80]}, expected a number above 0")
        most = _MOST_LAYERS if key.endswith("layers") else _MOST_PARTS
        if _COUNT.fullmatch(key) and isinstance(value, int) and value > most:
            raise ModelError(f"{path}: {key} is {value}, expected at most {most:,}")
    return config


def settings_of_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that may change a logit of an evaluated model."""
    return {key: value for key, value in config.items() if not _DECIDES_NO_VALUE.fullmatch(key)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _settings(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of a configuration and of those inside; a list, or values by part, have its key."""
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _settings(key if key.endswith("_implementation") else name, inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _settings(key, inside)
    else:
        yield key, value


def may_route(config: Mapping[str, Any]) -> bool:
    """Return whether the content of a config.json names a number of experts, so that routers choose among them."""
    return any("expert" in key and isinstance(value, int) and value > 1 for key, value in _settings("", config))


def common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json in which sizes that its family names differently have their common names."""
    named = dict(config)
    for name, others in _OTHER_NAMES.items():
        found = next((config[other] for other in others if other in config), None)
        if name not in config and found is not None:
            named[name] = found
    return named


def refuse_odd_file(path: Path, most_bytes: int | None = _MOST_BYTES) -> None:
    """Raise ModelError unless `path` is a regular file of at most `most_bytes`; reading a pipe would wait for ever."""
    if path.is_dir():
        raise ModelError(f"{path}: found a folder, expected a file")
    if path.is_symlink() and not path.exists():
        raise ModelError(f"{path}: found a link to nothing, expected a file")
    refuse_pipe_or_device(path, ModelError)
    if most_bytes is not None and (size := path.stat().st_size) > most_bytes:
        raise ModelError(f"{path}: {size:,} bytes, expected at most {most_bytes:,}")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raises ModelError if the file is or contains anything else."""
    try:
        refuse_odd_file(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        _refuse_many_entries(path, "", content)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


def _refuse_many_entries(path: Path, key: str, value: Any) -> None:
    """Raise ModelError for entries with which transformers would compute for minutes: factors of positions, tokens."""
    if isinstance(value, list | Mapping) and len(value) > _MOST_ENTRIES and key != "weight_map":
        raise ModelError(f"{path}: {key} has {len(value):,} entries, expected at most {_MOST_ENTRIES:,}")
    for inside in value if isinstance(value, list) else ():
        _refuse_many_entries(path, key, inside)
    for name, inside in value.items() if isinstance(value, Mapping) else ():
        _refuse_many_entries(path, name, inside)


def known_config(source: str) -> Mapping[str, Any] | None:
    """Return config.json of a built-in, local or well-known model; None for another hub id (unknown until download).

    Raises ModelError for a folder without a readable config.json.
    """
    kind = source_kind(source)
    if kind == "hub":
        return KNOWN_CONFIGS.get(source)
    return read_model_config(builtin_folder(source) if kind == "builtin" else Path(source))


def num_layers_of(source: str) -> int | None:
    """Return the number of decoder layers of a built-in, local or well-known model; None for another hub id."""
    kind = source_kind(source)
    if kind == "hub":
        return KNOWN_CONFIGS.get(source, {}).get("num_hidden_layers")
    return num_layers_in(builtin_folder(source) if kind == "builtin" else Path(source))


def num_layers_in(folder: Path) -> int:
    """Return the number of decoder layers of the model in a folder; raises ModelError if config.json does not say."""
    num_layers = read_model_config(folder).get("num_hidden_layers")
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        raise ModelError(f"{folder / 'config.json'}: num_hidden_layers is {num_layers!r}, expected a positive integer")
    return num_layers
