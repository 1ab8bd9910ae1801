"""The prepare_data stage: writes one split of the questions of a study as a checked table."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import DatasetConfig, Split
from aqnpipe.data.loader import load_problems


def prepare_data(dataset: dict[str, Any], split: Split, output: Path) -> None:
    """Write the questions of `split` to `output` (schema `ProblemTable`); DataError if the data set is malformed."""
    config: DatasetConfig = TypeAdapter(DatasetConfig).validate_python(dataset)
    write_table(output, load_problems(config, split), ProblemTable)
