"""The study's GRPO settings as arguments of the pinned trainer."""

from pathlib import Path

from trl import GRPOConfig

from aqnpipe.config.training import TrainingConfig


def grpo_arguments(training: TrainingConfig, seed: int, num_steps: int, folder: Path) -> GRPOConfig:
    """Translate our settings into TRL's; defaults of TRL that differ from the published recipe are set explicitly."""
    return GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=seed,
        max_steps=num_steps,
        num_train_epochs=training.epochs,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant_with_warmup" if training.learning_rate_schedule == "constant" else "linear",
        warmup_steps=training.warmup_steps,
        weight_decay=0.0,
        max_grad_norm=training.max_grad_norm,
        per_device_train_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=training.accumulation_steps,
        steps_per_generation=training.accumulation_steps,
        num_generations=training.rollouts_per_prompt,
        num_iterations=1,
        max_completion_length=training.max_response_tokens,
        temperature=training.temperature,
        beta=training.kl_coefficient,
        epsilon=training.clip_ratio,
        loss_type="dapo",
        scale_rewards="group",
        use_bias_correction_kl=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
