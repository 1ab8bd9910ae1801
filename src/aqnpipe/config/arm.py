"""Arms: which noise a training run gets. An arm is data; adding one never means code."""

from typing import Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import TRAINING_PHASES, OperatorNoise, WeightNoise

ModelRole = Literal["base", "large"]


class Arm(FrozenModel):
    """One experimental condition: the noise during training, on top of the study's shared settings."""

    description: str
    model: ModelRole = "base"
    operator_noise: OperatorNoise | None = None
    aqn: WeightNoise | None = None

    @model_validator(mode="after")
    def _phases_are_of_training(self) -> Self:
        others = set(self.operator_noise.phases) - set(TRAINING_PHASES) if self.operator_noise else set()
        if others:
            raise ValueError(f"operator_noise.phases: training has no phase {', '.join(sorted(others))}")
        return self


class ArmsFile(FrozenModel):
    """The content of `config/arms.yaml`: arms by id."""

    arms: dict[str, Arm] = Field(min_length=1)
