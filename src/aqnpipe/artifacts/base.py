"""What every JSON artifact is."""

from pydantic import BaseModel, ConfigDict


class Artifact(BaseModel):
    """Base of JSON artifacts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
