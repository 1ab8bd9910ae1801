"""Audit of settings: whatever the trainer holds is the study's value or TRL's default.

A setting that this list does not know must have the default of TRL, so that a new argument cannot change a run unseen.
"""

import dataclasses
import enum
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import GRPOConfig

from aqnpipe.artifacts.training_facts import expected_settings
from aqnpipe.config.run import TrainingSpec
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.allowed_keys import load_config
from aqnpipe.models.layout import dropout_rates
from aqnpipe.training.policy import autocast_dtype

_WITHOUT_EFFECT = frozenset(
    {
        "output_dir", "run_name", "report_to", "disable_tqdm", "use_cpu", "local_rank", "project", "log_level",
        "logging_nan_inf_filter", "save_strategy", "eval_strategy", "num_train_epochs",
        "dataloader_pin_memory", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "generation_batch_size",
        "gradient_checkpointing_kwargs", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "per_device_eval_batch_size", "accelerator_config", "debug",
        "include_for_metrics", "deepspeed", "fsdp", "fsdp_config", "num_generations_eval", "pad_to_multiple_of",
    }
)  # fmt: skip
"""Arguments that name places or how progress is shown, and those that are compared elsewhere."""

_PRECISION = "ACCELERATE_MIXED_PRECISION"

_FIXED = {
    # Problems are judged, and the receipt so far is checked, when a step is logged.
    "logging_steps": 1,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "multi_objective_aggregation": "sum_then_normalize",
    "tools": None,
    "rollout_func": None,
}
"""Attributes and arguments of the trainer that are the same in all studies."""

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Names of norms and biases, which have no weight decay; nor has any `nn.LayerNorm`."""


def held_settings(trainer: Any, spec: TrainingSpec) -> dict[str, str | int | float | bool | None]:
    """Return the settings of the study as the trainer holds them: its attributes, or else its arguments."""
    found = {}
    for name in expected_settings(spec):
        holder = trainer if hasattr(trainer, name) else trainer.args
        found[name] = _plain(getattr(holder, name))
    return found


def held_problems(trainer: Any, spec: TrainingSpec) -> Iterator[str]:
    """Yield every setting of the trainer that is neither the study's nor TRL's default."""
    expected = {**expected_settings(spec), **_correction(spec), **_FIXED}
    clip = {"epsilon_low": spec.training.clip_ratio, "epsilon_high": spec.training.clip_ratio}
    for name, value in {**expected, **clip}.items():
        holders = (trainer.args, trainer) if name not in clip else (trainer,)
        wrong = [found for holder in holders if (found := _plain(getattr(holder, name, value))) != value]
        if wrong:
            yield f"the trainer's {name} is {wrong[0]!r}, the study asks for {value!r}"
    precision = "bf16" if autocast_dtype(spec) == torch.bfloat16 else "no"
    held = trainer.accelerator.mixed_precision
    if held != precision:
        variable = ", set by the environment variable ACCELERATE_MIXED_PRECISION" if _PRECISION in os.environ else ""
        yield f"the trainer's mixed precision is {held}{variable}, the study asks for {precision}"
    if trainer.loss_scale != spec.loss_scale:
        yield f"the trainer multiplies the loss by {trainer.loss_scale}, the study asks for {spec.loss_scale}"
    if trainer.use_vllm != (spec.arm.importance_sampling is not None):
        yield f"the trainer's importance sampling correction is {trainer.use_vllm}, the arm asks for the opposite"
    if [float(weight) for weight in trainer.reward_weights] != [1.0]:
        yield f"rewards are weighted by {trainer.reward_weights.tolist()}, the study asks for one reward of weight 1"
    yield from _other_arguments(trainer.args, {*expected, *_WITHOUT_EFFECT})


def dropout_problems(model: nn.Module, spec: TrainingSpec, model_folder: Path) -> Iterator[str]:
    """Yield every dropout rate of `model` that neither its own configuration nor the study's adapters ask for."""
    allowed = {0.0, spec.training.lora.dropout if spec.training.lora else 0.0, *_own_dropout(model_folder)}
    for name, module in model.named_modules():
        for attribute, rate in dropout_rates(module):
            if rate not in allowed:
                yield f"{name}: {attribute} is {rate:g}, neither the model nor the study has this dropout"
                return


@cache
def _own_dropout(model_folder: Path) -> frozenset[float]:
    """Return the dropout rates in the configuration of a model."""
    config = load_config(model_folder).to_dict()
    return frozenset(float(rate) for name, rate in config.items() if "drop" in name and isinstance(rate, int | float))


def weight_decays(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the weight decay of every weight by its name: norms and biases have none."""
    norms = {
        f"{owner}.{name}" if owner else name
        for owner, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
    return {
        name: 0.0 if name in norms or _NOT_DECAYED.search(name.lower()) else decay
        for name, _ in model.named_parameters()
    }


def decay_problems(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], decays: Mapping[str, float]
) -> Iterator[str]:
    """Yield the first weight that `optimizer` decays by another factor than `decays` has for it."""
    found = {id(weight): float(group["weight_decay"]) for group in optimizer.param_groups for weight in group["params"]}
    for name, weight in trained.items():
        if found.get(id(weight), decays[name]) != decays[name]:
            yield f"the weight decay of {name} is {found[id(weight)]:g}, the study asks for {decays[name]:g}"
            return


def trainable_problems(model: nn.Module, spec: TrainingSpec) -> Iterator[str]:
    """Yield every weight that is frozen and should be trained, or the reverse."""
    for name, weight in model.named_parameters():
        is_trained = "lora_" in name if spec.training.lora else True
        if weight.requires_grad != is_trained:
            yield f"{name} is {'frozen' if is_trained else 'trained'}, the study asks for the opposite"
            return


def adapter_facts(model: nn.Module) -> dict[str, int | float]:
    """Return rank and scale of the low-rank adapters of `model`; nothing if it has none. NaN where they differ."""
    layers = adapted_modules(model).values()
    ranks = {int(rank) for layer in layers for rank in layer.r.values()}
    scales = {float(scale) for layer in layers for scale in layer.scaling.values()}
    if not layers:
        return {}
    return {
        "rank": ranks.pop() if len(ranks) == 1 else -1,
        "scale": scales.pop() if len(scales) == 1 else float("nan"),
    }


def _correction(spec: TrainingSpec) -> Mapping[str, str | float | None]:
    correction = spec.arm.importance_sampling
    if correction is None:
        return {}
    return {
        "vllm_importance_sampling_mode": correction.mode,
        "vllm_importance_sampling_clip_max": correction.clip_max,
        "vllm_importance_sampling_clip_min": correction.clip_min,
    }


def _other_arguments(arguments: GRPOConfig, known: set[str]) -> Iterator[str]:
    for field in dataclasses.fields(arguments):
        if field.name in known or field.name.startswith("hub_") or field.name.startswith("_"):
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        value = getattr(arguments, field.name)
        if _plain(value) != _plain(default):
            yield f"the trainer's {field.name} is {value!r}, the study does not set it and TRL's default is {default!r}"


def _plain(value: Any) -> Any:
    """Return a setting for comparisons: a list without elements is none."""
    return value.value if isinstance(value, enum.Enum) else None if value == [] else value
