"""Audit of settings: whatever the trainer holds is the study's value or TRL's default.

A setting that this list does not know must have the default of TRL, so that a new argument cannot change a run unseen.
"""

import dataclasses
import enum
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import GRPOConfig

from aqnpipe.artifacts.training_facts import SETTINGS
from aqnpipe.config.run import TrainingSpec
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.layout import dropout_rates
from aqnpipe.models.untrusted import load_config
from aqnpipe.training.audit.measure import Ledger
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

_FLAGS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
"""Settings of AdamW that are no numbers."""

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Names of norms and biases, which have no weight decay; nor has any `nn.LayerNorm`."""


def check_trainer(trainer: Any, spec: TrainingSpec, ledger: Ledger) -> None:
    """Compare the settings that the trainer holds with the study's, all others with TRL's defaults."""
    expected = {**expected_settings(spec), **_correction(spec), **_FIXED}
    arguments = {**_defaults(trainer.args), **expected}
    held = {name: (_plain(getattr(trainer.args, name, value)), value) for name, value in arguments.items()}
    ledger.require(SETTINGS, "the trainer's", held)
    clip, variable = spec.training.clip_ratio, f" (set by {_PRECISION})" if _PRECISION in os.environ else ""
    in_effect = {name: (_plain(getattr(trainer, name, value)), value) for name, value in expected.items()} | {
        "epsilon_low": (trainer.epsilon_low, clip),
        "epsilon_high": (trainer.epsilon_high, clip),
        "loss_scale": (trainer.loss_scale, spec.loss_scale),
        "use_vllm": (trainer.use_vllm, spec.arm.importance_sampling is not None),
        "reward_weights": ([float(weight) for weight in trainer.reward_weights], [1.0]),
        f"mixed precision{variable}": (
            trainer.accelerator.mixed_precision,
            "bf16" if autocast_dtype(spec) == torch.bfloat16 else "no",
        ),
    }
    ledger.require(SETTINGS, "the trainer's", in_effect)


def check_optimizer(
    optimizer: torch.optim.Optimizer,
    spec: TrainingSpec,
    decays: Mapping[str, tuple[nn.Parameter, float]],
    ledger: Ledger,
) -> None:
    """Compare the settings of the optimiser; `decays`: each trained weight with its weight decay, by name."""
    training, groups = spec.training, [group for group in optimizer.param_groups if group["params"]]
    settings: dict[str, tuple[Any, Any]] = {"kind": (type(optimizer).__name__, "AdamW")}
    for name, value in {"betas": (training.adam_beta1, training.adam_beta2), "eps": 1e-8, **_FLAGS}.items():
        others = [found for group in groups if (found := group.get(name, _FLAGS.get(name))) != value]
        settings[name] = (others[0] if others else value, value)
    ledger.require(SETTINGS, "the optimiser's", settings)
    held = {id(weight): float(group["weight_decay"]) for group in groups for weight in group["params"]}
    of_weights = {name: (held.get(id(weight), decay), decay) for name, (weight, decay) in decays.items()}
    ledger.require(SETTINGS, "the weight decay of", of_weights)


def expected_settings(spec: TrainingSpec) -> dict[str, str | int | float | bool | None]:
    """Return the settings of TRL's trainer that `spec` asks for, by the names of TRL's arguments."""
    training = spec.training
    correction = spec.arm.importance_sampling
    sequences = training.sequences_per_step // training.num_workers
    rows = training.micro_batch_size or sequences
    return {
        "max_steps": spec.num_steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": {"constant": "constant_with_warmup", "linear": "linear"}[training.learning_rate_schedule],
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "max_grad_norm": training.max_grad_norm,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": sequences // rows,
        "steps_per_generation": sequences // rows * training.steps_per_rollout,
        "num_generations": training.rollouts_per_prompt,
        "num_iterations": 1,
        "max_completion_length": training.max_response_tokens,
        "temperature": training.temperature,
        "beta": training.kl_coefficient,
        "epsilon": training.clip_ratio,
        # Where the study sets none, the audit expects TRL's default, which is none.
        **({} if training.clip_ratio_c is None else {"delta": training.clip_ratio_c}),
        "loss_type": "dapo",
        "scale_rewards": "group",
        "importance_sampling_level": "token",
        "use_bias_correction_kl": False,
        "router_aux_loss_coef": 0.0,
        "mask_truncated_completions": False,
        "shuffle_dataset": True,
        "vllm_importance_sampling_correction": correction is not None,
        "seed": spec.random_seed,
        "bf16": spec.training.lora is None and spec.dtype not in ("float16", training.weights_dtype),
        "gradient_checkpointing": training.gradient_checkpointing,
    }


def check_dropout(model: nn.Module, spec: TrainingSpec, model_folder: Path, ledger: Ledger) -> None:
    """Report a dropout rate of `model` that neither its own configuration nor the study's adapters ask for."""
    allowed = {0.0, spec.training.lora.dropout if spec.training.lora else 0.0, *_own_dropout(model_folder)}
    for name, module in model.named_modules():
        for attribute, rate in dropout_rates(module):
            if rate not in allowed:
                return ledger.report(
                    f"{name}: {attribute} is {rate:g}, neither the model nor the study has this dropout"
                )


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


def check_trainable(model: nn.Module, spec: TrainingSpec, ledger: Ledger) -> None:
    """Compare which weights are trained: adapters if there are any, else all."""
    words = {True: "trained", False: "frozen"}
    weights = {
        name: (words[weight.requires_grad], words["lora_" in name or spec.training.lora is None])
        for name, weight in model.named_parameters()
    }
    ledger.require(SETTINGS, "the weight", weights)


def check_adapters(model: nn.Module, spec: TrainingSpec, ledger: Ledger) -> None:
    """Compare rank and scale of the low-rank adapters of `model`."""
    lora, layers = spec.training.lora, adapted_modules(model).values()
    ranks = {int(rank) for layer in layers for rank in layer.r.values()}
    scales = {float(scale) for layer in layers for scale in layer.scaling.values()}
    wanted = ({lora.rank}, {lora.alpha / lora.rank}) if lora else (set(), set())
    ledger.require(SETTINGS, "the adapters'", {"rank": (ranks, wanted[0]), "scale": (scales, wanted[1])})


def _correction(spec: TrainingSpec) -> Mapping[str, str | float | None]:
    correction = spec.arm.importance_sampling
    if correction is None:
        return {}
    return {
        "vllm_importance_sampling_mode": correction.mode,
        "vllm_importance_sampling_clip_max": correction.clip_max,
        "vllm_importance_sampling_clip_min": correction.clip_min,
    }


def _defaults(arguments: GRPOConfig) -> dict[str, Any]:
    """Return TRL's default of every argument that has an effect."""
    fields = [field for field in dataclasses.fields(arguments) if not field.name.startswith(("hub_", "_"))]
    return {
        field.name: _plain(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())
        for field in fields
        if field.name not in _WITHOUT_EFFECT
    }


def _plain(value: Any) -> Any:
    """Return a setting for comparisons: a list without elements is none."""
    return value.value if isinstance(value, enum.Enum) else None if value == [] else value
