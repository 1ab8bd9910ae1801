"""The generation backend of evaluations and of training rollouts."""

from typing import Literal

from pydantic import Field

from aqnpipe.config.base import FrozenModel

RequestedBackend = Literal["auto", "transformers", "vllm"]


class GenerationConfig(FrozenModel):
    """The generation backend, and the device memory that vLLM may use."""

    backend: RequestedBackend = Field(
        default="auto",
        description="auto, transformers or vllm. auto: vLLM if the device is a GPU or NPU and vLLM is installed and "
        "supports the requested noise, else transformers",
    )
    rollout_backend: RequestedBackend | None = Field(
        default=None, description="backend of training rollouts; null: same as `backend`"
    )
    gpu_memory_utilization: float = Field(
        default=0.8, gt=0, le=1, description="fraction of a device's memory that vLLM may use; ignored on a CPU"
    )
    rollout_gpu_memory_utilization: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="the same in training, where policy, gradients and optimiser state are on the device too",
    )
    rollout_sleep: bool = Field(
        default=False,
        description="vLLM frees the memory of its weights and cache between rollouts; GPUs and NPUs only",
    )

    @property
    def requested_for_rollouts(self) -> RequestedBackend:
        """The backend requested for training rollouts."""
        return self.rollout_backend or self.backend
