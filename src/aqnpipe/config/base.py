"""The base class of all configuration models, and the type of names that become folders and wildcards."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from aqnpipe.config.validation_messages import IDENTIFIER_PATTERN, describe_validation_error

__all__ = ["FrozenModel", "Identifier", "describe_validation_error"]

Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
"""A name that is used as a folder name and as a wildcard of the workflow."""


class FrozenModel(BaseModel):
    """Base class of configuration models: immutable; unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
