"""Arms: which noise a training run gets. An arm is data; adding one never means code."""

from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import OperatorNoise, WeightNoise

ModelRole = Literal["base", "large"]


class Arm(FrozenModel):
    """One experimental condition: the noise during training, on top of the study's shared settings."""

    description: str
    model: ModelRole = "base"
    operator_noise: OperatorNoise | None = None
    aqn: WeightNoise | None = None


class ArmsFile(FrozenModel):
    """The content of `config/arms.yaml`: arms by id."""

    arms: dict[str, Arm] = Field(min_length=1)
