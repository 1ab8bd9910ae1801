"""Which arms can have their rollouts drawn by vLLM."""

from aqnpipe.config.arm import Arm
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import FakeQuantization


def why_vllm_cannot_roll_out(arm: Arm) -> str | None:
    """Return the setting of `arm` that vLLM does not support in rollouts, with its value; None if there is none."""
    noise = arm.operator_noise
    if noise is None or not noise.is_active or "rollout" not in noise.phases:
        return None
    if isinstance(noise.error, FakeQuantization | MeasuredError):
        return f"operator_noise.error is {noise.error.kind} in the rollout, expected a scaled error or a truncation"
    if noise.attention != "fused":
        return (
            f"operator_noise.attention is {noise.attention} in the rollout, expected fused (with the "
            "model's attention: sdpa): vLLM computes attention as one operator"
        )
    return None
