"""Arms: the noise of a training run. An arm is pure data, so adding one needs no code."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel, Identifier, TrainingSeed
from aqnpipe.config.custom_code import NamesCode
from aqnpipe.config.model import Attention, noised_attention
from aqnpipe.config.noise import (
    TRAINING_PHASES,
    AdaptiveNoise,
    CacheNoise,
    FakeQuantization,
    ModuleNoise,
    OperatorNoise,
)

ModelRole = Literal["base", "large", "checkpoints"]
"""checkpoints: the role of given models in a study without training, where no arms file is read."""

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class ImportanceSampling(FrozenModel):
    """Weights rollouts by p(actor)/p(sampler), because they were sampled under other noise, weights or kernels.

    This is TRL's `vllm_importance_sampling_correction`, for rollouts of either backend.
    """

    mode: Correction = "sequence_mask"
    """ratio per token or per response; outside the limits the ratio is truncated, or its token or response is masked"""
    clip_max: float | None = Field(default=3.0, gt=0)
    """upper limit of the ratio; null: none"""
    clip_min: float | None = Field(default=None, gt=0)
    """lower limit of the ratio; null: none"""

    def _problems(self) -> Iterator[str]:
        if self.clip_max is None and self.clip_min is None:
            yield f"mode {self.mode} needs a clip_max, a clip_min, or both"
        if self.clip_max is not None and self.clip_min is not None and self.clip_min >= self.clip_max:
            yield f"clip_min {self.clip_min:g} must be below clip_max {self.clip_max:g}"


class Arm(NamesCode):
    """An experimental condition: the noise during training. All other settings are shared by the study."""

    description: str
    description_zh: str | None = None
    """the description in a Chinese report; null: the English one, marked"""
    model: ModelRole = "base"
    operator_noise: OperatorNoise | None = None
    module_noise: ModuleNoise | None = None
    kv_cache: CacheNoise | None = Field(default=None, exclude_if=lambda noise: noise is None)
    """format in which the cache stores keys and values; null: exactly"""
    aqn: AdaptiveNoise | None = None
    importance_sampling: ImportanceSampling | None = None
    """correction for the distance between the sampling and the trained policy; null: none"""
    routing_replay: bool = Field(default=False, exclude_if=lambda replays: not replays)
    """of a mixture of experts: the policy is trained with the experts that the routers of its rollouts chose, and with
    its scores of them"""
    machine: str | None = None
    """machine of the study whose simulated faults the policy has throughout training and in its evaluation; null: the
    real device without simulated faults"""
    task: str | None = None
    """the only task of a data set on which this arm may run; null: any task"""
    aa_control_of: str | None = None
    """id of the arm that this A/A control imitates without its active part; they should not differ"""
    seed_offset: TrainingSeed = 0
    """added to the study's seeds in training: gives an independent repetition of an arm"""

    @property
    def has_noised_rollouts(self) -> bool:
        """Return whether operators have noise in the rollouts."""
        noise = self.operator_noise
        return noise is not None and noise.is_active and "rollout" in noise.phases

    def as_trained(self) -> "Arm":
        """Return the arm without what does not affect its training, so that editing that re-trains nothing."""
        return self.model_copy(update={"description": "", "description_zh": None, "task": None, "aa_control_of": None})

    def on_attention(self, attention: Attention) -> "Arm":
        """Return the arm with noise on attention as a model with that implementation computes it.

        An arm that says itself where the noise is stays as it is. 4-bit formats leave attention alone.
        """
        noise = self.operator_noise
        if noise is None or "attention" in noise.model_fields_set or isinstance(noise.error, FakeQuantization):
            return self
        computed = noise.model_copy(update={"attention": noised_attention(attention)})
        return self.model_copy(update={"operator_noise": computed})

    def _problems(self) -> Iterator[str]:
        noises = {"operator_noise": self.operator_noise, "module_noise": self.module_noise, "kv_cache": self.kv_cache}
        for key, noise in noises.items():
            others = set(noise.phases) - set(TRAINING_PHASES) if noise else set()
            if others:
                yield f"{key}.phases: training has no phase {', '.join(sorted(others))}"


class ArmsFile(FrozenModel):
    """Content of `config/arms.yaml`: arms by id."""

    arms: dict[Identifier, Arm] = Field(min_length=1)
