"""The train stage: one arm, one seed, from prepared model and problems to checkpoints, metrics and receipt."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from aqnpipe.artifacts import (
    ProblemTable,
    RunRecord,
    SigmaFile,
    TrainingMetrics,
    atomic_path,
    read_table,
    read_yaml,
    write_json,
    write_table,
)
from aqnpipe.config.noise import TRAINING_PHASES, Phase
from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.training import TrainingConfig
from aqnpipe.data.prompts import format_prompt, prompt_token_ids
from aqnpipe.errors import ConfigError, TrainingError
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.aqn import target_factors
from aqnpipe.noise.layout import decoder_layers, rms_norms
from aqnpipe.noise.recorder import ReceiptRecorder
from aqnpipe.provenance import code_digest, sha256_of_file, versions
from aqnpipe.scoring import is_correct
from aqnpipe.training.callbacks import CheckpointCallback, ProgressCallback, ValidationCallback
from aqnpipe.training.metrics import metrics_table
from aqnpipe.training.trainer import NoisePlan, NoisyGRPOTrainer


@dataclass(frozen=True)
class TrainingInputs:
    """Files that a training run reads; `sigmas` only for arms with per-layer sigmas."""

    model: Path
    train_problems: Path
    test_problems: Path
    sigmas: Path | None = None


def train(spec: TrainingSpec, inputs: TrainingInputs, output_dir: Path, say: Callable[[str], None] = print) -> None:
    """Train `spec` and write `output_dir`: checkpoints/step<N>/, metrics.parquet, receipt.json, run.json.

    Works in a temporary folder that becomes `output_dir` only when everything, the receipt included, is in order.
    Raises ReceiptError when measured and asked noise differ, TrainingError when the loss breaks.
    """
    torch.set_num_threads(spec.training.threads)
    # What an earlier run left there must not stand beside a failed one.
    if output_dir.exists():
        shutil.rmtree(output_dir)
    with atomic_path(output_dir) as folder:
        folder.mkdir()
        trainer, validation = _build_trainer(spec, inputs, folder, say)
        trainer.train()
        # TRL keeps files of its own there, none of which a run consists of.
        shutil.rmtree(trainer.args.output_dir, ignore_errors=True)
        if trainer.state.global_step != spec.num_steps:
            raise TrainingError(f"the trainer made {trainer.state.global_step} steps, {spec.num_steps} were declared")
        receipt = trainer.noise_plan.recorder.receipt()
        write_json(folder / "receipt.json", receipt.check())
        table = metrics_table(trainer.state.log_history, receipt.weight_syncs, validation.accuracy)
        write_table(folder / "metrics.parquet", table, TrainingMetrics)
        write_json(folder / "run.json", _run_record(spec, inputs))


def reward_correct(completions: list[str], gold_answer: list[str], **_: Any) -> list[float]:
    """Reward 1 if the number after `####` equals the gold answer, else 0."""
    return [float(is_correct(text, gold, "strict")) for text, gold in zip(completions, gold_answer, strict=True)]


def _build_trainer(
    spec: TrainingSpec, inputs: TrainingInputs, folder: Path, say: Callable[[str], None]
) -> tuple[NoisyGRPOTrainer, ValidationCallback]:
    model = load_model(inputs.model, dtype=spec.dtype, attention=spec.attention)
    tokenizer = load_tokenizer(inputs.model)
    plan = _noise_plan(spec, inputs, model)
    label = f"{spec.model_role}/{spec.arm_id} seed {spec.seed}"
    validation = _validation(spec, inputs, tokenizer, plan.recorder)
    trainer = NoisyGRPOTrainer(
        noise_plan=plan,
        prompt_format=spec.prompt,
        model=model,
        reward_funcs=reward_correct,
        args=grpo_arguments(spec.training, spec.random_seed, spec.num_steps, folder),
        train_dataset=_train_dataset(spec, inputs, tokenizer),
        processing_class=tokenizer,
        callbacks=[
            CheckpointCallback(folder / "checkpoints", spec.training.checkpoint_steps(spec.num_steps), tokenizer),
            validation,
            ProgressCallback(label, spec.num_steps, say),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, validation


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


def _noise_plan(spec: TrainingSpec, inputs: TrainingInputs, model: Any) -> NoisePlan:
    aqn = spec.arm.aqn
    layer_factors = _layer_factors(spec, inputs)
    recorder = ReceiptRecorder(
        operator_noise=spec.arm.operator_noise,
        module_noise=spec.arm.module_noise,
        aqn=aqn,
        faults=spec.faults,
        expected_phases=_expected_phases(spec.training),
        num_layers=len(decoder_layers(model)),
        num_norms=len(rms_norms(model)),
        num_steps=spec.num_steps,
        num_epochs=spec.training.epochs,
        layer_factors=layer_factors,
    )
    return NoisePlan(
        seed=spec.random_seed,
        recorder=recorder,
        aqn_factors=target_factors(model, aqn, layer_factors) if aqn else {},
        num_steps=spec.num_steps,
        num_epochs=spec.training.epochs,
    )


def _layer_factors(spec: TrainingSpec, inputs: TrainingInputs) -> dict[int, float] | None:
    aqn = spec.arm.aqn
    machine = aqn.layer_sigmas_from if aqn else None
    if (machine is None) != (inputs.sigmas is None):
        raise ConfigError(f"arm {spec.arm_id}: layer_sigmas_from is {machine!r}, the sigmas file is {inputs.sigmas}")
    if inputs.sigmas is None:
        return None
    sigmas = read_yaml(inputs.sigmas, SigmaFile)
    metadata = sigmas.srdd_metadata
    found = tuple(metadata.get(key) for key in ("model", "machine", "strategy"))
    needed = (spec.model_role, machine, aqn.layer_sigmas_strategy if aqn else None)
    if found != needed:
        raise ConfigError(
            f"{inputs.sigmas}: these sigmas are of (model, machine, strategy) {found}, arm {spec.arm_id} needs {needed}"
        )
    return {layer: sigma / sigmas.aqn.base_sigma for layer, sigma in sigmas.aqn.layer_sigmas.items()}


def _expected_phases(training: TrainingConfig) -> tuple[Phase, ...]:
    return tuple(phase for phase in TRAINING_PHASES if phase != "reference" or training.kl_coefficient > 0)


def _train_dataset(spec: TrainingSpec, inputs: TrainingInputs, tokenizer: Any) -> Dataset:
    problems = read_table(inputs.train_problems, ProblemTable)
    prompts = [format_prompt(question, spec.prompt, tokenizer) for question in problems["question"]]
    return Dataset.from_dict({"prompt": prompts, "gold_answer": problems["gold_answer"].to_list()})


def _validation(
    spec: TrainingSpec, inputs: TrainingInputs, tokenizer: Any, recorder: ReceiptRecorder
) -> ValidationCallback:
    problems = read_table(inputs.test_problems, ProblemTable).head(spec.training.validation_questions)
    return ValidationCallback(
        spec.training.validation_steps(spec.num_steps),
        prompt_token_ids(problems["question"], spec.prompt, tokenizer),
        problems["gold_answer"].to_list(),
        tokenizer=tokenizer,
        recorder=recorder,
        max_response_tokens=spec.training.max_response_tokens,
        seed=spec.random_seed,
    )


def _run_record(spec: TrainingSpec, inputs: TrainingInputs) -> RunRecord:
    files = {
        "train_problems": inputs.train_problems,
        "test_problems": inputs.test_problems,
        "model": inputs.model / "aqnpipe_model.json",
    }
    if inputs.sigmas is not None:
        files["sigmas"] = inputs.sigmas
    return RunRecord(
        stage="train",
        identity={"model": spec.model_role, "arm": spec.arm_id, "seed": spec.seed, "num_steps": spec.num_steps},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.training.stage"),
        inputs_sha256={name: sha256_of_file(path) for name, path in files.items()},
        versions=versions(),
        device="cpu",
    )
