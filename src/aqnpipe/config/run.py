"""The settings of one job, and of a loss study: how faults and noise change the loss of a model not trained with them.

A job's spec contains only the settings that the job uses, so an edit elsewhere in the study does not re-run it.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field

from aqnpipe.config.arm import Arm, ModelRole
from aqnpipe.config.base import EACH_ONCE, FrozenModel, Identifier, Seed, Threads
from aqnpipe.config.custom_code import CustomFunction
from aqnpipe.config.dataset import LmEvalDataset, PromptFormat
from aqnpipe.config.evaluation import EvaluationConfig, Scorer
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.config.noise import Counterpart, Fault, FaultOrder
from aqnpipe.config.training import DEFAULT_LOSS_SCALE, TrainingConfig
from aqnpipe.device import RequestedDevice


class TrainingSpec(FrozenModel):
    """One training run: an arm, a seed and the shared settings. `faults` are those of the arm's machine.

    `seed` identifies the run; `random_seed` keys all its random numbers. `scorer`: grades validations; `scorer_sha256`:
    digest of its source if it is a function of the user's own.
    """

    model_role: str
    arm_id: str
    arm: Arm
    faults: tuple[Fault, ...] = ()
    seed: int
    num_steps: int
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    generation: GenerationConfig = GenerationConfig()
    training: TrainingConfig
    scorer: Scorer | CustomFunction = "strict"
    scorer_sha256: str | None = None

    @property
    def random_seed(self) -> int:
        """Seed of the run's prompts, sampling and noise."""
        return self.seed + self.arm.seed_offset

    @property
    def loss_scale(self) -> int:
        """Factor on the loss while gradients are computed in float16; 1 in other formats."""
        return (self.training.loss_scale or DEFAULT_LOSS_SCALE) if self.dtype == "float16" else 1


class ParitySpec(FrozenModel):
    """The parity of a model: the device as the study uses it, and its counterpart in another configuration."""

    model_role: str
    machine: str
    counterpart: Counterpart
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat


class EvaluationSpec(FrozenModel):
    """Evaluation of a checkpoint; `step` 0 is the model before training. `faults` are those of the arm's machine.

    `task`: the task of lm-evaluation-harness whose questions they are; None for questions of other data sets.
    """

    model_role: str
    arm_id: str
    seed: int
    step: int
    faults: tuple[Fault, ...] = ()
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    generation: GenerationConfig = GenerationConfig()
    evaluation: EvaluationConfig
    task: LmEvalDataset | None = None


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


class LossStudySpec(FrozenModel):
    """One loss study. `faults` are those of its machine; the settings replace their magnitudes and orders."""

    model_role: str
    faults: tuple[Fault, ...]
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    settings: LossStudyConfig
