"""The generation backend of evaluations and of training rollouts, and which noise, arms and layers vLLM can compute."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from aqnpipe.config.arm import Arm
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import ErrorModel, FakeQuantization, is_fixed

RequestedBackend = Literal["auto", "transformers", "vllm"]


class GenerationConfig(FrozenModel):
    """The generation backend, and the device memory that vLLM may use."""

    backend: RequestedBackend = "auto"
    """auto, transformers or vllm. auto: vLLM if the device is a GPU or NPU and vLLM is installed and supports the
    requested noise, else transformers"""
    rollout_backend: RequestedBackend | None = None
    """backend of training rollouts; null: same as `backend`. auto: one for all arms of the study"""
    tensor_parallel: int = Field(default=1, ge=1)
    """devices that share every layer in evaluations by vLLM; the engine of a training worker has one"""
    gpu_memory_utilization: float = Field(default=0.8, gt=0, le=1)
    """fraction of a device's memory that vLLM may use; ignored on a CPU"""
    rollout_gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """the same in training, where policy, gradients and optimiser state are on the device too"""
    rollout_sleep: bool = False
    """vLLM frees the memory of its weights and cache between rollouts; GPUs and NPUs only"""

    cuda_graphs: bool = False
    """vLLM replays CUDA graphs in evaluations without noise and in training rollouts of arms without noise in them
    (NVIDIA and AMD GPUs); arms with noise in rollouts then differ in it too"""
    rollout_batch_invariance: bool = False
    """training rollouts use vLLM's batch-invariant mode where the device has it (NVIDIA GPUs of compute capability 8.0
    and above) and the arm has no operator noise in rollouts; other arms then differ in it too"""

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


def is_without_vllm(error: ErrorModel) -> bool:
    """Return whether vLLM cannot have an error: measured, fixed (attention), or a custom one."""
    return isinstance(error, MeasuredError | CustomError) or is_fixed(error)


def name_of(error: ErrorModel) -> str:
    """Return the kind of an error."""
    return f"{error.kind} with redraw: never" if is_fixed(error) else error.kind


def why_vllm_cannot_roll_out(arm: Arm) -> str | None:
    """Return the setting of `arm` that vLLM does not support in rollouts, with its value; None if there is none."""
    for key, part in (("operator_noise", arm.operator_noise), ("module_noise", arm.module_noise)):
        if part is not None and part.is_active and "rollout" in part.phases and is_without_vllm(part.error):
            return f"{key}.error is {name_of(part.error)} in the rollout, expected a scaled error or a truncation"
    if arm.routing_replay:
        return "routing_replay is true, expected false: the experts that vLLM chooses are not read"
    noise = arm.operator_noise
    if noise is None or not noise.is_active or "rollout" not in noise.phases:
        return None
    if noise.attention != "fused" and not isinstance(noise.error, FakeQuantization):
        return (
            f"operator_noise.attention is {noise.attention} in the rollout, expected fused (with the "
            "model's attention: sdpa): vLLM computes attention as one operator"
        )
    return None


def why_not_shared(config: Mapping[str, Any], num_workers: int) -> str | None:
    """Return the size that `num_workers` tensor-parallel workers cannot share; None if they can.

    config: content of config.json with common names. Heads of keys and values may be copied to several workers. Sizes
    that it does not name are not looked at; vLLM itself looks at all.
    """
    heads, width = config.get("num_attention_heads"), config.get("intermediate_size")
    kv_heads = config.get("num_key_value_heads") or heads
    if isinstance(heads, int) and heads % num_workers:
        return f"{heads} attention heads do not divide by {num_workers}"
    if isinstance(kv_heads, int) and kv_heads % num_workers and num_workers % kv_heads:
        return f"{kv_heads} heads of keys and values neither divide by {num_workers} nor {num_workers} by them"
    if isinstance(width, int) and width % num_workers:
        return f"an intermediate_size of {width} does not divide by {num_workers}"
    return None
