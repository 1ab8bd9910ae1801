"""The study's GRPO settings as arguments of TRL's trainer."""

from pathlib import Path

from trl import GRPOConfig

from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ConfigError
from aqnpipe.training.policy import computes_in_mixed_precision


def grpo_arguments(spec: TrainingSpec, folder: Path, device: DeviceKind = "cpu") -> GRPOConfig:
    """Return the study's settings as TRL's; defaults of TRL that differ from the published recipe are set explicitly.

    Raises ConfigError for float16, which would need a loss scaler.
    """
    training, correction = spec.training, spec.arm.importance_sampling
    if spec.dtype == "float16":
        raise ConfigError(
            f"models.{spec.model_role}.dtype: training computes in float32 or bfloat16, found float16 (its small "
            "gradients vanish without a loss scaler)"
        )
    return GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=spec.random_seed,
        max_steps=spec.num_steps,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup" if training.learning_rate_schedule == "constant" else "linear",
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=training.sequences_per_call,
        gradient_accumulation_steps=training.accumulation_steps,
        steps_per_generation=training.accumulation_steps * training.steps_per_rollout,
        num_generations=training.rollouts_per_prompt,
        num_iterations=1,
        max_completion_length=training.max_response_tokens,
        temperature=training.temperature,
        beta=training.kl_coefficient,
        epsilon=training.clip_ratio,
        # TRL limits the ratio before it clips: for a positive advantage the clipped ratio is the smaller one anyway.
        delta=training.clip_ratio_c,
        vllm_importance_sampling_correction=correction is not None,
        vllm_importance_sampling_mode=correction.mode if correction else "sequence_mask",
        vllm_importance_sampling_clip_max=correction.clip_max if correction else 3.0,
        vllm_importance_sampling_clip_min=correction.clip_min if correction else None,
        loss_type="dapo",
        scale_rewards="group",
        use_bias_correction_kl=False,
        # The study has no term that balances experts.
        router_aux_loss_coef=0.0,
        bf16=computes_in_mixed_precision(spec),
        gradient_checkpointing=training.gradient_checkpointing,
        # A reentrant checkpoint recomputes layers without the hooks of the forward pass, and so without noise.
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=device == "cpu",
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(training.report_to) or "none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
    )
