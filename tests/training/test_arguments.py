"""Every setting of the study reaches the trainer's arguments, alone and as the published recipe."""

import re
from pathlib import Path

import pytest
from tiny_training import training_spec
from trl import GRPOConfig

import aqnpipe
from aqnpipe.config.training import TrainingConfig
from aqnpipe.training.run import grpo_arguments

PUBLISHED = {
    "epochs": 2,
    "prompts_per_step": 32,
    "steps_per_rollout": 4,
    "rollouts_per_prompt": 5,
    "micro_batch_size": 4,
    "learning_rate": 5e-7,
    "max_prompt_tokens": 1024,
    "max_response_tokens": 1024,
    "gradient_checkpointing": True,
}
"""The 1.5B runs: batches of 128 prompts, mini-batches of 32, 4 sequences at a time."""


def arguments(tmp_path, *, dtype="float32", device="cpu", num_steps=2, **training) -> GRPOConfig:
    return grpo_arguments(training_spec(dtype=dtype, num_steps=num_steps, **training), tmp_path, device)


def test_the_published_recipe_reaches_trl(tmp_path):
    found = arguments(tmp_path, num_steps=464, **PUBLISHED)
    expected = {
        "seed": 0, "max_steps": 464, "learning_rate": 5e-7, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 40, "steps_per_generation": 160, "generation_batch_size": 640,
        "num_generations": 5, "num_iterations": 1, "beta": 0.001, "epsilon": 0.2, "epsilon_high": None,
        "loss_type": "dapo", "scale_rewards": "group", "use_bias_correction_kl": False, "temperature": 1.0,
        "entropy_coef": 0.0, "weight_decay": 0.0, "max_completion_length": 1024, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "warmup_steps": 0, "top_p": 1.0, "top_k": 0,
        "lr_scheduler_type": "constant_with_warmup", "mask_truncated_completions": False, "delta": None,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("setting", "value", "argument", "arrives_as"),
    [
        ("learning_rate", 0.5, "learning_rate", 0.5),
        ("learning_rate_schedule", "linear", "lr_scheduler_type", "linear"),
        ("warmup_steps", 7, "warmup_steps", 7),
        ("kl_coefficient", 0.25, "beta", 0.25),
        ("clip_ratio", 0.3, "epsilon", 0.3),
        ("clip_ratio_c", 3.0, "delta", 3.0),
        ("weight_decay", 0.125, "weight_decay", 0.125),
        ("adam_beta1", 0.5, "adam_beta1", 0.5),
        ("adam_beta2", 0.75, "adam_beta2", 0.75),
        ("max_grad_norm", 3.5, "max_grad_norm", 3.5),
        ("temperature", 0.7, "temperature", 0.7),
        ("rollouts_per_prompt", 4, "num_generations", 4),
        ("max_response_tokens", 9, "max_completion_length", 9),
        ("micro_batch_size", 2, "per_device_train_batch_size", 2),
        ("micro_batch_size", 2, "gradient_accumulation_steps", 4),
        ("steps_per_rollout", 3, "steps_per_generation", 6),
        ("epochs", 3, "num_train_epochs", 3),
        ("gradient_checkpointing", True, "gradient_checkpointing", True),
        ("report_to", ("tensorboard",), "report_to", ["tensorboard"]),
    ],
)
def test_a_setting_arrives_and_only_where_it_should(tmp_path, setting, value, argument, arrives_as):
    """The setting changes its argument, so it is read, and the argument has the value of the setting."""
    without = arguments(tmp_path)
    changed = arguments(tmp_path, **{setting: value})
    assert getattr(changed, argument) == arrives_as != getattr(without, argument)


def test_every_setting_is_read_somewhere():
    """The original experiments lost settings because no code read them."""
    package = Path(aqnpipe.__file__).parent
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    unread = [
        name
        for name in TrainingConfig.model_fields
        if not re.search(rf"(training|self)\.{name}\b|field_validator\(\"{name}\"\)", sources)
    ]
    assert unread == []


@pytest.mark.parametrize(
    ("dtype", "training", "mixed"),
    [
        ("float32", {}, False),
        ("bfloat16", {}, True),
        ("bfloat16", {"weights_dtype": "bfloat16"}, False),
        # accelerate refuses float16 on CPUs, so the trainer computes in it by itself.
        ("float16", {}, False),
        ("bfloat16", {"lora": {"rank": 1, "alpha": 1}}, False),
    ],
)
def test_forward_passes_are_mixed_only_where_weights_are_kept_in_another_format(tmp_path, dtype, training, mixed):
    assert arguments(tmp_path, dtype=dtype, **training).bf16 is mixed


def test_the_device_is_the_one_that_was_found(tmp_path):
    assert arguments(tmp_path).use_cpu
    assert not arguments(tmp_path, device="cuda").use_cpu


def test_nothing_is_reported_unless_requested(tmp_path):
    assert arguments(tmp_path).report_to == []
