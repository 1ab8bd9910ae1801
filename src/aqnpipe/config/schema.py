"""The JSON schema of study files, for editors. What a setting is for is the text below it in the source.

No stage needs this module: digests of code leave such texts out, so that a better description repeats no job.
"""

import ast
import inspect
import json
from itertools import zip_longest
from textwrap import dedent
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from aqnpipe.config.study import CheckpointStudyConfig, StudyConfig


class _WithTexts(GenerateJsonSchema):
    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        found = super().model_schema(schema)
        texts = texts_of(schema["cls"])
        for name, field in schema["cls"].model_fields.items():
            if name in texts:
                found["properties"][field.alias or name]["description"] = texts[name]
        return found


def texts_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each setting of a model, inherited ones too; nothing for a setting without one."""
    found: dict[str, str | None] = {}
    for kind in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        (source,) = ast.parse(dedent(inspect.getsource(kind))).body
        for setting, below in zip_longest(source.body, source.body[1:]):  # type: ignore[attr-defined]
            if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                found[setting.target.id] = " ".join(below.value.value.split()) if is_text else None
    return {name: text for name, text in found.items() if text}


def study_schema() -> str:
    """Return the schema as indented JSON, exactly the content of config/schema.json."""
    adapter: TypeAdapter[Any] = TypeAdapter(StudyConfig | CheckpointStudyConfig)
    schema = adapter.json_schema(schema_generator=_WithTexts)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
