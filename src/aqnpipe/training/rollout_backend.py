"""The rollout backend of a run: the policy in this process, or a vLLM engine that receives the policy's weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aqnpipe.config.generation import why_vllm_cannot_roll_out
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.prompts import tokenize_prompts
from aqnpipe.device import nvidia_capability, resolve_device
from aqnpipe.errors import ConfigError
from aqnpipe.generation.backend_choice import chosen_backend, open_engine
from aqnpipe.generation.rollout_engines import RolloutEngine, TransformersRolloutEngine, VllmRolloutEngine
from aqnpipe.generation.vllm.launch import check_vllm, vllm_version, why_no_graphs, why_not_batch_invariant
from aqnpipe.models.adapters import MergedForEngine
from aqnpipe.training.noise_plan import noise_of
from aqnpipe.training.ranks import rank_and_size


def describe_rollouts(spec: TrainingSpec) -> dict[str, str | int | bool]:
    """Return the rollout backend of `spec` for run.json, because it affects the bytes of the rollouts.

    Raises ConfigError if vLLM was requested but does not support the arm, ModelError if vLLM is missing.
    """
    if _backend(spec) == "transformers":
        return {"backend": "transformers"}
    check_vllm(resolve_device(spec.device).kind)
    reason = _why_not_batch_invariant(spec)
    no_graphs = _why_no_graphs(spec)
    described: dict[str, str | int | bool] = {
        "backend": "vllm",
        "vllm": vllm_version(),
        "enforce_eager": no_graphs is not None,
        "batch_invariant": reason is None,
    }
    described |= {} if reason is None else {"why_not_batch_invariant": reason}
    return described | ({"why_enforce_eager": no_graphs} if no_graphs and spec.generation.cuda_graphs else {})


def merges_adapters(spec: TrainingSpec) -> bool:
    """Return whether vLLM draws the rollouts or the evaluations of `spec`: it receives weights with adapters merged."""
    evaluating = chosen_backend(spec.generation, spec.attention, resolve_device(spec.device))
    return spec.training.lora is not None and "vllm" in (_backend(spec), evaluating)


def open_rollouts(spec: TrainingSpec, model_folder: Path, prompts: Sequence[str], tokenizer: Any) -> RolloutEngine:
    """Return the engine for the rollouts of `spec` on these prompts; the caller closes it.

    Each worker has its own engine for its share of the prompts.
    """
    if _backend(spec) == "transformers":
        return TransformersRolloutEngine(tokenizer)
    training, (_, num_workers) = spec.training, rank_and_size()
    lengths = map(len, tokenize_prompts(list(prompts), spec.prompt, tokenizer))
    engine = open_engine(
        spec.generation,
        model_folder,
        tokenizer,
        dtype=spec.dtype,
        device=resolve_device(spec.device),
        max_tokens=max(lengths) + training.max_response_tokens,
        batch_size=training.sequences_per_step * training.steps_per_rollout // num_workers,
        threads=training.threads,
        for_training=True,
        batch_invariant=_why_not_batch_invariant(spec) is None,
        cuda_graphs=_why_no_graphs(spec) is None,
    )
    return VllmRolloutEngine(
        engine,
        weights=MergedForEngine(getattr(torch, spec.dtype)),
        dtype=getattr(torch, spec.dtype),
        sleeps=spec.generation.rollout_sleep,
        cuda_graphs=_why_no_graphs(spec) is None,
    )


def _why_no_graphs(spec: TrainingSpec) -> str | None:
    device = resolve_device(spec.device).kind
    return why_no_graphs(is_requested=spec.generation.cuda_graphs, device=device, rollouts=noise_of(spec))


def _why_not_batch_invariant(spec: TrainingSpec) -> str | None:
    device = resolve_device(spec.device).kind
    return why_not_batch_invariant(
        is_requested=spec.generation.rollout_batch_invariance,
        device=device,
        capability=nvidia_capability(device),
        noised_rollouts=spec.arm.has_noised_rollouts,
    )


def _backend(spec: TrainingSpec) -> str:
    requested = spec.generation.requested_for_rollouts
    of_rollouts = spec.generation.model_copy(update={"backend": requested})
    chosen = chosen_backend(of_rollouts, spec.attention, resolve_device(spec.device))
    reason = why_vllm_cannot_roll_out(spec.arm) if chosen == "vllm" else None
    if reason is not None and requested == "vllm":
        raise ConfigError(
            f"arm {spec.arm_id}: vLLM cannot make its rollouts: {reason}; generation.rollout_backend: transformers can"
        )
    return chosen if reason is None else "transformers"
