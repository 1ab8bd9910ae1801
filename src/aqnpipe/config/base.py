"""What all configuration models share."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable model that refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
