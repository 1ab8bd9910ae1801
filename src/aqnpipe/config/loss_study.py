"""The loss study: how faults and hidden-state noise change the loss of a model that was not trained with them."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from aqnpipe.config.arm import ModelRole
from aqnpipe.config.base import EACH_ONCE, FrozenModel, Identifier, Seed, Threads
from aqnpipe.config.noise import FaultOrder

LossCondition = Literal[
    "clean", "noise_only", "fault_only", "global", "targeted", "healthy_layers", "wrong_layers", "random_layers"
]
"""Conditions of a loss study.

- clean: neither fault nor noise. noise_only: noise in all layers, no fault. fault_only: the fault, no noise.
- The others have the fault and noise: global in all layers, targeted in the faulty layers, healthy_layers in all
  others, wrong_layers in as many healthy layers as are faulty, those farthest from the fault in depth, random_layers in
  as many healthy layers drawn at random.
"""


class LossStudyConfig(FrozenModel):
    """Loss of texts (question and gold solution) with and without a machine's faults, at several magnitudes, and noise.

    The noise is AQN noise on hidden states, with relative standard deviation `gamma` in each of its layers. Conditions
    with more noisy layers therefore have more noise in total.
    """

    name: Identifier
    """name of the study's files"""
    model: ModelRole = "base"
    machine: str
    """machine of the study whose faults are simulated at each of the magnitudes"""
    magnitudes: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], EACH_ONCE] = Field(min_length=1)
    orders: Annotated[tuple[FaultOrder, ...], EACH_ONCE] = Field(default=("after_noise", "around_noise"), min_length=1)
    """order of fault and noise where both apply"""
    conditions: Annotated[tuple[LossCondition, ...], EACH_ONCE] = Field(default=get_args(LossCondition), min_length=1)
    gamma: float = Field(default=0.01, gt=0, lt=1)
    """standard deviation of the noise relative to the hidden states"""
    noise_seeds: Annotated[tuple[Seed, ...], EACH_ONCE] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    num_texts: int = Field(default=50, ge=1)
    """number of texts, the first of the test split"""
    layer_seed: Seed = 0
    """seed of the random choice of layers for random_layers"""
    threads: Threads = 1
