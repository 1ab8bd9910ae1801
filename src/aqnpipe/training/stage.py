"""The train stage: one arm, one seed, from prepared model and problems to checkpoints, metrics and receipt."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback

from aqnpipe.artifacts import (
    ProblemTable,
    RunRecord,
    TrainingMetrics,
    atomic_path,
    read_table,
    write_json,
    write_table,
)
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.prompts import format_prompt, prompt_token_ids
from aqnpipe.errors import TrainingError
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.recorder import ReceiptRecorder
from aqnpipe.provenance import code_digest, sha256_of_file, versions
from aqnpipe.scoring import is_correct
from aqnpipe.training.arguments import grpo_arguments
from aqnpipe.training.callbacks import CheckpointCallback, ProgressCallback, ValidationCallback
from aqnpipe.training.metrics import metrics_table
from aqnpipe.training.noise_plan import build_noise_plan
from aqnpipe.training.trainer import NoisyGRPOTrainer


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
    plan = build_noise_plan(spec, model, inputs.sigmas)
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
