"""The JSON schema of study files, generated from the models. Snakemake validates the configuration against it."""

import json

from aqnpipe.config.study import StudyConfig


def study_schema() -> str:
    """Return the schema as indented JSON, exactly the content of config/schema.json."""
    schema = StudyConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
