"""Which arms vLLM can draw the rollouts of."""

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import FakeQuantization


def what_vllm_cannot_roll_out(arm: Arm) -> str | None:
    """Return which setting of an arm keeps vLLM from drawing its rollouts, with what was found; None if none does."""
    noise = arm.operator_noise
    if noise is None or not noise.is_active or "rollout" not in noise.phases:
        return None
    if isinstance(noise.error, FakeQuantization):
        return f"operator_noise.error is {noise.error.kind} in the rollout, expected an error on outputs"
    if noise.attention != "fused":
        return (
            f"operator_noise.attention is {noise.attention} in the rollout, expected fused (and attention: sdpa of the "
            "model): vLLM computes attention as one operator"
        )
    return None
