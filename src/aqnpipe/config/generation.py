"""Which engine generates, in evaluations and for the rollouts of training."""

from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel

AskedBackend = Literal["auto", "transformers", "vllm"]


class GenerationConfig(FrozenModel):
    """The backend that evaluations and rollouts generate with."""

    backend: AskedBackend = Field(
        default="auto",
        description="auto: vLLM where the device is a GPU or NPU, vLLM is installed and can compute the noise that is "
        "requested, else transformers; transformers; vllm",
    )
    rollout_backend: AskedBackend | None = Field(
        default=None, description="the same for the rollouts of training alone; null: as `backend`"
    )
    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="share of a device's memory that vLLM may take; not used on a CPU"
    )
    rollout_gpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="the same in training, where the policy, its gradients and the optimiser are on the device too",
    )
    rollout_sleep: bool = Field(
        default=False,
        description="vLLM gives the memory of its weights and cache back between rollouts; GPUs and NPUs only",
    )

    @property
    def requested_for_rollouts(self) -> AskedBackend:
        """What was requested the rollouts of training."""
        return self.rollout_backend or self.backend
