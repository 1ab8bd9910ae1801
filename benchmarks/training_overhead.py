"""Overhead of this project's trainer over TRL's own, and CPU time of the parts of a step, on one CPU thread.

    OMP_NUM_THREADS=1 python benchmarks/training_overhead.py [--rounds 40] [--json FILE]

The first table compares this project's trainer, without noise, with the plain GRPOTrainer, as ratios of CPU time: once
as every run has it, once without the audits of the training. All train the tiny model with the settings of the default
study (config/config.yaml) on the same prompts in the same order. They run in threads of one process and take turns, one
optimiser step each, never two at once. Our trainer has its receipts, guard and progress messages. Validation, saving
and the explained distance to the sampler happen at the first and the last step, which are not counted. The trainers
draw different tokens but equally many: the end of a response is a token that the model never draws, so every response
has the full length.

The second table shows the CPU time of each part of a step: without noise, with 5 % noise, and with noise and AQN.
"""

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap
from smallest import parse
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.study import load_study_file
from aqnpipe.data.stage import prepare_data
from aqnpipe.models.loading import load_model, load_tokenizer, prepare_model
from aqnpipe.training import run
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.run import (
    TrainingInputs,
    _build_trainer,
    _train_dataset,
    grpo_arguments,
    open_rollouts,
    reward_correct,
)
from aqnpipe.training.workspace import Workspace

WARM_UP = 2
PARTS = ("rollout", "reference", "actor forward", "backward", "optimiser")


class Turns:
    """Makes the trainers of several threads take turns, one step each."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Condition()
        self._count, self._next = count, 0
        self._is_over = False

    def wait(self, place: int) -> None:
        """Return when it is the turn of `place`; RuntimeError if another trainer has failed."""
        with self._lock:
            self._lock.wait_for(lambda: self._next == place or self._is_over)
        if self._is_over:
            raise RuntimeError("the other trainer has failed")

    def pass_on(self, place: int) -> None:
        """Pass the turn to the next trainer."""
        with self._lock:
            self._next = (place + 1) % self._count
            self._lock.notify_all()

    def end(self) -> None:
        """Wake all waiting trainers after one has failed."""
        with self._lock:
            self._is_over = True
            self._lock.notify_all()


class Stopwatch(TrainerCallback):
    """Measures CPU time per step of one trainer, and the lengths of its responses. Must be its last callback."""

    def __init__(self, turns: Turns, place: int) -> None:
        self.seconds: list[float] = []
        self.lengths: set[float] = set()
        self.after_step: Callable[[], None] = lambda: None
        self._turns, self._place = turns, place
        self._started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the first turn."""
        self._turns.wait(self._place)
        self._started = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the time, then wait while the others make a step."""
        self.seconds.append(time.process_time() - self._started)
        self.after_step()
        self._turns.pass_on(self._place)
        self._turns.wait(self._place)
        self._started = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Record the mean length of the responses."""
        if "completions/mean_length" in logs:
            self.lengths.add(logs["completions/mean_length"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Pass the turn on, so that the others can finish."""
        self._turns.pass_on(self._place)


class NoAudit(TrainerCallback):
    """Stands in for the audit of a training, and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def attach(self, trainer: Any) -> None:
        """Observe nothing."""

    def begin_validation(self, prompts: Any) -> None:
        """Observe nothing."""

    def end_validation(self, completions: Any) -> None:
        """Observe nothing."""

    def begin_rollout(self, rollout: Any) -> None:
        """Observe nothing."""

    def end_rollout(self, completions: Any) -> None:
        """Observe nothing."""


class Bench:
    """The default study's model and problems in a temporary folder, and trainers for them."""

    def __init__(self, folder: Path, shrunk: bool = False) -> None:
        self.folder = folder
        self._shrunk = shrunk
        study = load_study_file(Path("config/config.yaml"))
        self._plan = StudyPlan(study)
        self.inputs = TrainingInputs(folder / "model", folder / "train.parquet", folder / "test.parquet")
        prepare_model(study.config.models["base"], folder / "model")
        for split in ("train", "test"):
            prepare_data(study.config.dataset.model_dump(), split, folder / f"{split}.parquet")

    def spec(self, arm: str, num_steps: int) -> TrainingSpec:
        """Return the default study's run of `arm` with a negligible learning rate, saved and validated only at its end.

        `num_steps` steps and one more: what happens at the last step is no part of a step.
        """
        spec = TrainingSpec.model_validate(self._plan.training_spec(arm, 0))
        training = spec.training.model_dump() | {
            "learning_rate": 1e-8,
            "checkpoint_every": None,
            "validate_every": None,
            "validation_questions": 1,
            "resume_every": num_steps + 1,
        }
        if self._shrunk:
            training |= {"prompts_per_step": 2, "rollouts_per_prompt": 2, "micro_batch_size": 4}
        return TrainingSpec.model_validate(spec.model_dump() | {"num_steps": num_steps + 1, "training": training})

    def plain(self, spec: TrainingSpec, watch: Stopwatch) -> GRPOTrainer:
        """Return TRL's trainer with our settings."""
        tokenizer = self.tokenizer()
        model = load_model(self.folder / "model", dtype="float32", attention=spec.attention)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        trainer = GRPOTrainer(
            model=model,
            args=grpo_arguments(spec, self.folder / "plain"),
            reward_funcs=reward_correct,
            train_dataset=_train_dataset(spec, self.inputs, tokenizer),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(watch)
        return trainer

    def ours(self, spec: TrainingSpec, watch: Stopwatch, audit: Any = TrainingAudit) -> Any:
        """Return our trainer as every run has it, with this audit."""
        tokenizer = self.tokenizer()
        dataset = _train_dataset(spec, self.inputs, tokenizer)
        rollouts = open_rollouts(spec, self.folder / "model", dataset["prompt"], tokenizer)
        workspace = Workspace(self.folder / f"scratch {spec.arm_id} {audit.__name__}")
        with patch.object(run, "TrainingAudit", audit):
            trainer = _build_trainer(spec, self.inputs, workspace, tokenizer, dataset, rollouts, lambda _: None)
        trainer.add_callback(watch)
        return trainer

    def tokenizer(self) -> Any:
        """Return the tokenizer; a response may end with padding."""
        tokenizer = load_tokenizer(self.folder / "model")
        tokenizer.eos_token = tokenizer.pad_token
        return tokenizer


def overhead(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per step of TRL's trainer, and of ours without and with audits, by rounds."""
    spec = bench.spec("baseline", rounds + WARM_UP)
    turns = Turns(3)
    watches = [Stopwatch(turns, place) for place in range(3)]
    trainers = [
        bench.plain(spec, watches[0]),
        bench.ours(spec, watches[1], NoAudit),
        bench.ours(spec, watches[2]),
    ]
    with ThreadPoolExecutor() as threads:
        trainings = [threads.submit(trainer.train) for trainer in trainers]
        for training in as_completed(trainings):
            if training.exception():
                turns.end()
            training.result()
    if any(watch.lengths != {spec.training.max_response_tokens} for watch in watches):
        raise RuntimeError(f"responses of other lengths were drawn: {[watch.lengths for watch in watches]}")
    return {
        name: watch.seconds[WARM_UP:-1]
        for name, watch in zip(("plain", "ours without audits", "ours"), watches, strict=True)
    }


def ratio_of_sums(plain: Any, ours: Any, axis: int = -1) -> Any:
    """Return the ratio of the total times; `scipy.stats.bootstrap` passes arrays and an axis."""
    return np.sum(ours, axis=axis) / np.sum(plain, axis=axis)


def overhead_table(measured: dict[str, list[float]]) -> Table:
    """Return the ratios of our CPU times to TRL's."""
    plain = measured["plain"]
    table = Table("", "rounds", "median of ratios", "quartiles", "ratio of sums", "95 % interval", title="ours / TRL's")
    for name in ("ours without audits", "ours"):
        times = measured[name]
        low, median, high = statistics.quantiles([a / b for a, b in zip(times, plain, strict=True)], n=4)
        interval = bootstrap((plain, times), ratio_of_sums, paired=True, rng=np.random.default_rng(0))
        table.add_row(
            name,
            str(len(times)),
            f"{median:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{ratio_of_sums(plain, times):.3f}",
            f"{interval.confidence_interval.low:.3f} to {interval.confidence_interval.high:.3f}",
        )
    return table


def time_parts(trainer: Any) -> dict[str, float]:
    """Make a trainer measure the CPU time of its parts; returns the sums, which grow as it trains."""
    parts: dict[str, float] = defaultdict(float)

    def timed(work: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = work(*args, **kwargs)
            # A reference has its own model.
            part = name or ("reference" if args[0] is trainer.ref_model else "actor forward")
            parts[part] += time.process_time() - started
            return result

        return measured

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        optimizer.step = timed(optimizer.step, "optimiser")
        return optimizer

    create = trainer.create_optimizer
    trainer.create_optimizer = create_optimizer
    trainer._generate_single_turn = timed(trainer._generate_single_turn, "rollout")
    trainer._computed = timed(trainer._computed)
    trainer.accelerator.backward = timed(trainer.accelerator.backward, "backward")
    return parts


def breakdown(bench: Bench, arm: str, rounds: int) -> dict[str, float]:
    """Return the mean CPU seconds of each part of a step of `arm`, of the rest, and of the whole step.

    The first step explains the distance to the sampler and the last one saves: both are run, neither is counted.
    """
    watch = Stopwatch(Turns(1), 0)
    trainer = bench.ours(bench.spec(arm, rounds + 1), watch)
    parts = time_parts(trainer)
    seen: list[dict[str, float]] = []
    watch.after_step = lambda: seen.append(dict(parts))
    trainer.train()
    trainer.noise_plan.recorder.receipt().check()
    means = {part: (seen[-2][part] - seen[0][part]) / rounds for part in PARTS}
    whole = sum(watch.seconds[1:-1]) / rounds
    return {**means, "rest": whole - sum(means.values()), "step": whole}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="optimiser steps of each trainer (default: 40)")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    options = parse(parser, rounds=2)
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), shrunk=options.smallest)
        measured = overhead(bench, options.rounds)
        console.print(overhead_table(measured))
        steps = {arm: breakdown(bench, arm, math.ceil(options.rounds / 4)) for arm in ("baseline", "E5")}
    table = Table("CPU seconds of", *steps, title="CPU time of the parts of a step")
    for part in (*PARTS, "rest", "step"):
        table.add_row(part, *(f"{found[part]:.3f} ({found[part] / found['step']:.0%})" for found in steps.values()))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"overhead": measured, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
