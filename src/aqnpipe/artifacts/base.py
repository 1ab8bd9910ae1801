"""The base class of all JSON artifacts, and statements as data: what a stage found, without prose.

A stage stores statements in its artifacts. The report puts them into English or Chinese with its catalogue of words,
`report/templates/words.yaml`. So every text that people read is in one file, and no code needs to read a sentence.
"""

from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field

_Value: TypeAlias = "int | float | str | Statement | tuple[Statement, ...]"
"""Numbers are not rounded and fractions are not percentages: the catalogue formats them. Strings are names and data."""


class Artifact(BaseModel):
    """Base class of JSON artifacts: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Statement(Artifact):
    """The key of a text in the report's catalogue, and a value for each placeholder of that text."""

    key: str
    values: dict[str, _Value] = Field(default_factory=dict)


def statement(key: str, /, **values: _Value) -> Statement:
    """Return the statement `key` with its values."""
    return Statement(key=key, values=values)
