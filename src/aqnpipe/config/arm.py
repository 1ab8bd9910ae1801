"""Arms: which noise a training run gets. An arm is data; adding one never means code."""

from typing import Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.noise import TRAINING_PHASES, AdaptiveNoise, ModuleNoise, OperatorNoise

ModelRole = Literal["base", "large"]

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class ImportanceSampling(FrozenModel):
    """Weighs what was rolled out by p(actor)/p(sampler): rollouts come from other noise, weights or kernels.

    TRL's `vllm_importance_sampling_correction`, for the rollouts of either backend.
    """

    mode: Correction = Field(
        default="sequence_mask",
        description="ratio of each token or of the whole response; beyond the limits it is truncated to them, or the "
        "token or response is masked",
    )
    clip_max: float | None = Field(default=3.0, gt=0, description="upper limit of the ratio; null: none")
    clip_min: float | None = Field(default=None, gt=0, description="lower limit of the ratio; null: none")

    @model_validator(mode="after")
    def _limits_are_in_order(self) -> Self:
        if self.clip_max is None and self.clip_min is None:
            raise ValueError(f"mode {self.mode} needs a clip_max, a clip_min, or both")
        if self.clip_max is not None and self.clip_min is not None and self.clip_min >= self.clip_max:
            raise ValueError(f"clip_min {self.clip_min:g} must be below clip_max {self.clip_max:g}")
        return self


class Arm(FrozenModel):
    """One experimental condition: the noise during training, on top of the study's shared settings."""

    description: str
    model: ModelRole = "base"
    operator_noise: OperatorNoise | None = None
    module_noise: ModuleNoise | None = None
    aqn: AdaptiveNoise | None = None
    importance_sampling: ImportanceSampling | None = Field(
        default=None, description="correct for how far rollouts are from the policy that learns; null: not at all"
    )
    machine: str | None = Field(
        default=None,
        description="name of a machine of the study whose simulated faults the policy has in all of training and in "
        "its evaluation; null: the real device as it is",
    )
    task: str | None = Field(
        default=None, description="task of the data set that the arm is meant for; null: any. Others are refused"
    )
    aa_control_of: str | None = Field(
        default=None,
        description="id of the arm that this one imitates without its active part: their comparison is an A/A test",
    )
    seed_offset: int = Field(
        default=0,
        ge=0,
        description="added to the study's seeds for everything random in training: the same arm with other seed_variance",
    )

    @model_validator(mode="after")
    def _phases_are_of_training(self) -> Self:
        for key, noise in (("operator_noise", self.operator_noise), ("module_noise", self.module_noise)):
            others = set(noise.phases) - set(TRAINING_PHASES) if noise else set()
            if others:
                raise ValueError(f"{key}.phases: training has no phase {', '.join(sorted(others))}")
        return self


class ArmsFile(FrozenModel):
    """The content of `config/arms.yaml`: arms by id."""

    arms: dict[str, Arm] = Field(min_length=1)
