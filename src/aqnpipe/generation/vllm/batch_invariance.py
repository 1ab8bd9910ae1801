"""Decides on vLLM's batch-invariant mode, in which the numbers of a row do not depend on the other rows of its batch.

vLLM 0.32 has it on NVIDIA GPUs of compute capability 8.0 and above, on some GPUs of AMD and Intel, and not on CPUs
(vllm/model_executor/determinism/batch_invariant.py). vllm-ascend needs a library of its own for it.
"""

from aqnpipe.device import DeviceKind

LEAST_CAPABILITY = (8, 0)
"""Compute capability from which on vLLM has the mode (its documentation of 0.32, "Hardware Requirements")."""


def why_not_batch_invariant(
    *,
    is_requested: bool,
    device: DeviceKind,
    capability: tuple[int, int] | None,
    noised_rollouts: bool,
) -> str | None:
    """Return in one line why rollouts do not use the mode; None if they do.

    `capability`: compute capability of an NVIDIA GPU, None for other devices. `noised_rollouts`: operators have noise
    in the rollouts. It is decided for each arm alone: an arm that is added to a study repeats no training of others.
    """
    if not is_requested:
        return "generation.rollout_batch_invariance is false"
    if device != "cuda":
        return f"vLLM has no batch-invariant mode for a device of kind {device} that is tried here"
    if capability is None:
        return "vLLM's batch-invariant mode is tried here on NVIDIA GPUs only"
    if capability < LEAST_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"vLLM's batch-invariant mode needs compute capability {needed} or above, the device has {found}"
    if noised_rollouts:
        # Its norms are Triton kernels without an operator; the audit refuses such launches in noised layers.
        return "the arm has operator noise in rollouts, whose audit does not know the kernels of the mode"
    return None
