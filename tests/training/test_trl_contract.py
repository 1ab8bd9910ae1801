"""What the trainer relies on of TRL's private interface; an upgrade that changes it must fail here, loudly."""

import inspect

import torch
import trl
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from aqnpipe.config.training import TrainingConfig
from aqnpipe.training.arguments import grpo_arguments


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_version_is_the_pinned_one():
    assert trl.__version__.startswith("1.16.")


def test_overridden_methods_have_the_signatures_that_we_override():
    assert parameters(GRPOTrainer._tokenize_prompts) == ["self", "prompts"]
    assert parameters(GRPOTrainer._generate_single_turn) == [
        "self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images",
    ]  # fmt: skip
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:8] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss",
    ]  # fmt: skip


def test_callers_use_them_as_we_expect():
    source = inspect.getsource(GRPOTrainer)
    assert "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)" in source
    assert "completion_ids, logprobs = self._generate_single_turn(" in source
    assert "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(" in source
    assert "ref_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(" in source
    assert "self._step += 1" in source


def test_helpers_that_we_import_keep_their_meaning():
    logits, index = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    expected = logits.log_softmax(-1).gather(-1, index[..., None])[..., 0]
    torch.testing.assert_close(selective_log_softmax(logits, index), expected)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_from_logits(logits), entropy)


def test_the_published_recipe_reaches_trl(tmp_path):
    training = TrainingConfig(
        epochs=2,
        prompts_per_step=16,
        rollouts_per_prompt=8,
        micro_batch_size=32,
        learning_rate=2e-4,
        max_response_tokens=40,
    )
    arguments = grpo_arguments(training, seed=3, num_steps=60, folder=tmp_path)
    assert isinstance(arguments, GRPOConfig)
    found = {
        name: getattr(arguments, name)
        for name in (
            "seed", "max_steps", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
            "steps_per_generation", "generation_batch_size", "num_generations", "num_iterations", "beta", "epsilon",
            "loss_type", "scale_rewards", "use_bias_correction_kl", "temperature", "bf16", "gradient_checkpointing",
            "entropy_coef", "weight_decay",
        )
    }  # fmt: skip
    assert found == {
        "seed": 3, "max_steps": 60, "learning_rate": 2e-4, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 4, "steps_per_generation": 4, "generation_batch_size": 128,
        "num_generations": 8, "num_iterations": 1, "beta": 0.001, "epsilon": 0.2, "loss_type": "dapo",
        "scale_rewards": "group", "use_bias_correction_kl": False, "temperature": 1.0, "bf16": False,
        "gradient_checkpointing": False, "entropy_coef": 0.0, "weight_decay": 0.0,
    }  # fmt: skip
    assert arguments.lr_scheduler_type == "constant_with_warmup"
    assert arguments.warmup_steps == 0
