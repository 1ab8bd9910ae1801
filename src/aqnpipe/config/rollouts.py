"""Which runs vLLM can draw the rollouts of."""

from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import FakeQuantization


def what_vllm_cannot_roll_out(arm: Arm, num_workers: int) -> str | None:
    """Return which setting keeps vLLM from drawing the rollouts of a run, with what was found; None if nothing does."""
    if num_workers > 1:
        return f"training.num_workers is {num_workers}, expected 1: each worker would need an engine on its own device"
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
