"""The generation backend of evaluations and of training rollouts."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

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
        default=None,
        description="backend of training rollouts; null: same as `backend`. auto: one for all arms of the study",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="devices that share every layer in evaluations by vLLM; the engine of a training worker has one",
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

    cuda_graphs: bool = Field(
        default=False,
        description="vLLM replays CUDA graphs in evaluations without noise and in training rollouts of arms without "
        "noise in them (NVIDIA and AMD GPUs); arms with noise in rollouts then differ in it too",
    )
    rollout_batch_invariance: bool = Field(
        default=False,
        description="training rollouts use vLLM's batch-invariant mode where the device has it (NVIDIA GPUs of compute "
        "capability 8.0 and above) and the arm has no operator noise in rollouts; other arms then differ in it too",
    )

    @field_validator("tensor_parallel")
    @classmethod
    def _only_vllm_shares_layers(cls, number: int, info: ValidationInfo) -> int:
        backend = info.data.get("backend", "vllm")
        if number > 1 and backend != "vllm":
            raise ValueError(
                f"found {number} with backend {backend}, expected backend: vllm, which shares layers, or 1"
            )
        return number

    @property
    def for_training(self) -> "GenerationConfig":
        """Return what training uses of these settings: a change of what only evaluations use repeats no run."""
        return self.model_copy(update={"tensor_parallel": 1})

    @property
    def requested_for_rollouts(self) -> RequestedBackend:
        """The backend requested for training rollouts."""
        return self.rollout_backend or self.backend
