"""Which noise vLLM can compute, which arms can have their rollouts drawn by it, and which layers it can share."""

from collections.abc import Iterator, Mapping
from typing import Any

from aqnpipe.config.arm import Arm
from aqnpipe.config.evaluation_noise import EvaluationNoise
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import ErrorModel, FakeQuantization
from aqnpipe.config.own_noise import OwnError


def is_without_vllm(error: ErrorModel) -> bool:
    """Return whether vLLM cannot compute an error: formats of operands, measured errors and those of a user's own."""
    return isinstance(error, FakeQuantization | MeasuredError | OwnError)


def kinds_without_vllm(noise: EvaluationNoise) -> Iterator[str]:
    """Yield the kinds of errors of an evaluation's noise that vLLM cannot compute."""
    for part in (noise.operator_noise, noise.module_noise):
        if part is not None and is_without_vllm(part.error):
            yield part.error.kind


def why_vllm_cannot_roll_out(arm: Arm) -> str | None:
    """Return the setting of `arm` that vLLM does not support in rollouts, with its value; None if there is none."""
    for key, part in (("operator_noise", arm.operator_noise), ("module_noise", arm.module_noise)):
        if part is not None and part.is_active and "rollout" in part.phases and is_without_vllm(part.error):
            return f"{key}.error is {part.error.kind} in the rollout, expected a scaled error or a truncation"
    noise = arm.operator_noise
    if noise is None or not noise.is_active or "rollout" not in noise.phases:
        return None
    if noise.attention != "fused":
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
