"""The base class of all JSON artifacts."""

from pydantic import BaseModel, ConfigDict


class Artifact(BaseModel):
    """Base class of JSON artifacts: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
