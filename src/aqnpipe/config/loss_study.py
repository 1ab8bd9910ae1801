"""The loss study: what faults and hidden-state noise do to the loss of a model that is not trained on them."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from aqnpipe.config.arm import ModelRole
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import FaultOrder

LossCondition = Literal[
    "clean", "noise_only", "fault_only", "global", "targeted", "healthy_layers", "wrong_layers", "random_layers"
]
"""clean: neither fault nor noise. noise_only: noise in all layers, no fault. fault_only: no noise. The others have the
fault and noise in all layers, in the faulty ones, in all but these, or in as many healthy layers: the farthest from the
fault in depth, or drawn."""


class LossStudyConfig(FrozenModel):
    """Loss of texts (question, gold solution) under a machine's faults at several magnitudes, with and without noise.

    The noise is AQN's on hidden states, relative with standard deviation `gamma` in every layer that has it, so that
    conditions with more layers have more noise in all.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="name of its files")
    model: ModelRole = "base"
    machine: str = Field(description="machine of the study; its faults get each of the magnitudes in turn")
    magnitudes: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(min_length=1)
    orders: tuple[FaultOrder, ...] = Field(
        default=("after_noise", "around_noise"), min_length=1, description="when the fault strikes where there is noise"
    )
    conditions: tuple[LossCondition, ...] = Field(default=get_args(LossCondition), min_length=1)
    gamma: float = Field(default=0.01, gt=0, lt=1, description="relative standard deviation of the noise")
    noise_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    num_texts: int = Field(default=50, ge=1, description="first questions of the test split")
    layer_seed: int = Field(default=0, ge=0, description="draws the layers of random_layers")
    threads: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        for name in ("magnitudes", "orders", "conditions", "noise_seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must not repeat a value")
        return self
