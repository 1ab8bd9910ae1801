"""The JSON schema of study files, generated from the models. Snakemake validates the configuration against it."""

import json
from typing import Any

from pydantic import TypeAdapter

from aqnpipe.config.study import CheckpointStudyConfig, StudyConfig


def study_schema() -> str:
    """Return the schema as indented JSON, exactly the content of config/schema.json."""
    adapter: TypeAdapter[Any] = TypeAdapter(StudyConfig | CheckpointStudyConfig)
    schema = adapter.json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
