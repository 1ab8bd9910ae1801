"""Data sets as the command line names them."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import DatasetConfig
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.errors import ConfigError


class DatasetFile(FrozenModel):
    """Content of a file that describes a data set: the section `dataset` of a study."""

    dataset: DatasetConfig


GENERATED = ("word_problems", "comparison")
NAMES = (
    "word_problems, comparison (generated), gsm8k, a folder with train and test as .jsonl, .csv or .parquet, one such "
    "file, a .yaml file with the section `dataset` of a study (columns, formats of answers), or a hub id"
)


def dataset_of(data: str, num_test: int | None) -> Any:
    """Return the data set (`DatasetConfig`) that `--data` names, with its first `num_test` test questions or all.

    Raises ConfigError if it is neither a known name nor of the form of a folder or hub id.
    """
    settings: dict[str, Any]
    if Path(data).suffix in (".yaml", ".yml"):
        described: Any = load_yaml(Path(data), DatasetFile).dataset
        return described if num_test is None else described.model_copy(update={"num_test": num_test})
    if data in GENERATED:
        settings = {"source": "generated", "task": data}
    elif data == "gsm8k":
        settings = {"source": "hub", "hub_id": "openai/gsm8k"}
    elif Path(data).exists():
        settings = {"source": "local", "path": data}
    elif data.startswith((".", "/")) or Path(data).suffix in (".jsonl", ".csv", ".parquet"):
        raise ConfigError(f"--data {data}: no such file or folder, expected {NAMES}")
    else:
        settings = {"source": "hub", "hub_id": data}
    if num_test is not None:
        settings["num_test"] = num_test
    try:
        return TypeAdapter(DatasetConfig).validate_python(settings)
    except ValidationError as error:
        raise ConfigError(f"--data: found {data!r}, which is no file or folder here, expected {NAMES}") from error
