"""Small training runs for tests: a random model with two layers, eight questions, two optimiser steps."""

import shutil
from pathlib import Path

import polars as pl
from tiny_tokenizer import build_tokenizer

from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import TrainingSpec
from aqnpipe.data.loader import load_problems
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import write_prepared_model
from aqnpipe.runtime.training import run_training_job
from aqnpipe.training.run import TrainingInputs

NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
AQN = {"schedule": {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.01}}


def write_inputs(folder: Path, make_model, num_problems: int = 8, **model_settings) -> TrainingInputs:
    """Write model, tokenizer and problems into `folder`."""
    tokenizer = build_tokenizer()
    settings = {
        "num_layers": 2,
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    make_model(**{**settings, **model_settings}).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prepared_model(folder / "model", describe_model(folder / "model", "made/up"))
    for split, sum_of in (("train", "plus"), ("test", "and")):
        table = pl.DataFrame(
            {
                "question_id": [f"{split}-{i}" for i in range(num_problems)],
                "question": [f"What is {i} {sum_of} {i} ?" for i in range(num_problems)],
                "answer": [f"{i} + {i} = {2 * i}\n#### {2 * i}" for i in range(num_problems)],
                "gold_answer": [str(2 * i) for i in range(num_problems)],
            }
        )
        write_table(folder / f"{split}.parquet", table, ProblemTable)
    return inputs_in(folder)


def inputs_in(folder: Path) -> TrainingInputs:
    """Return the inputs that were written into `folder`."""
    return TrainingInputs(folder / "model", folder / "train.parquet", folder / "test.parquet")


def write_builtin_inputs(folder: Path) -> TrainingInputs:
    """Write the built-in tiny model and problems for it; it solves enough of them that rewards differ within groups."""
    shutil.copytree(builtin_folder("tiny"), folder / "model")
    write_prepared_model(folder / "model", describe_model(folder / "model", "tiny"))
    for split in ("train", "test"):
        problems = load_problems(GeneratedDataset(num_train=16, num_test=8), split)
        write_table(folder / f"{split}.parquet", problems, ProblemTable)
    return inputs_in(folder)


def training_spec(operator_noise=None, aqn=None, *, num_steps=2, dtype="float32", **training) -> TrainingSpec:
    """Return a run of two steps with 4 prompts x 2 rollouts; keywords replace training settings."""
    settings = {
        "epochs": 1,
        "prompts_per_step": 4,
        "rollouts_per_prompt": 2,
        "micro_batch_size": 4,
        "learning_rate": 1e-3,
        "max_response_tokens": 6,
        "checkpoint_every": 1,
        "validation_questions": 3,
    }
    return TrainingSpec(
        model_role="base",
        arm_id="test",
        arm={"description": "", "operator_noise": operator_noise, "aqn": aqn},
        seed=0,
        num_steps=num_steps,
        dtype=dtype,
        attention="eager",
        prompt={},
        training={**settings, **training},
    )


def run(spec: TrainingSpec, inputs: TrainingInputs, folder: Path, say=lambda _: None) -> Path:
    """Run a training job with the output `folder` and a scratch folder beside it; return `folder`."""
    run_training_job(spec, inputs, folder, folder.with_name(f"{folder.name}.scratch"), say)
    return folder


def scattered_rewards(completions, **_) -> list[float]:
    """Return rewards that differ within groups, so that a model that solves nothing has a gradient."""
    return [float(index % 2) for index in range(len(completions))]


def teach(monkeypatch, rewards=scattered_rewards) -> None:
    """Give these rewards in training and in its audit, for models that solve nothing and so have no gradient."""
    monkeypatch.setattr("aqnpipe.training.run.reward_correct", rewards)
    monkeypatch.setattr("aqnpipe.training.audit.rollouts.strict_rewards", lambda texts, golds: rewards(texts))
