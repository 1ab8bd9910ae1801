"""Overhead of this project's trainer over TRL's own, and CPU time of the parts of a step, on one CPU thread.

    OMP_NUM_THREADS=1 python benchmarks/training_overhead.py [--rounds 40] [--json FILE]

The first table compares this project's trainer, without noise, with the plain GRPOTrainer, as ratios of CPU time. Both
train the tiny model with the settings of the default study (config/config.yaml) on the same prompts in the same order.
They run in two threads of one process and take turns, one optimiser step each, never both at once. Our trainer has its
receipts, guard and progress messages; neither trainer validates or saves. The two draw different tokens but equally
many: the end of a response is a token that the model never draws, so every response has the full length.

The second table shows the CPU time of each part of a step: without noise, with 5 % noise, and with noise and AQN.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from scipy.stats import bootstrap
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import TrainingSpec
from aqnpipe.config.study import load_study_file
from aqnpipe.data.prompts import format_prompt
from aqnpipe.data.stage import prepare_data
from aqnpipe.generation.rollout_engines import TransformersRolloutEngine
from aqnpipe.models.loading import load_model, load_tokenizer, prepare_model
from aqnpipe.training.arguments import grpo_arguments
from aqnpipe.training.breakdown import BreakdownGuard
from aqnpipe.training.callbacks import CleanWeightsCallback, ProgressCallback
from aqnpipe.training.noise_plan import build_noise_plan
from aqnpipe.training.policy import load_policy
from aqnpipe.training.run import reward_correct
from aqnpipe.training.trainer import NoisyGRPOTrainer
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
        self._turns, self._place = turns, place
        self._started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Wait for the first turn."""
        self._turns.wait(self._place)
        self._started = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the time, then wait while the others make a step."""
        self.seconds.append(time.process_time() - self._started)
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


class TimedTrainer(NoisyGRPOTrainer):
    """Our trainer, which also measures the CPU time of the parts of a step."""

    def __init__(self, **kwargs: Any) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        super().__init__(**kwargs)
        self.accelerator.backward = self._timed("backward", self.accelerator.backward)

    def _timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = work(*args, **kwargs)
            self.parts[part] += time.process_time() - started
            return result

        return timed

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the optimiser and measure its steps."""
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.step = self._timed("optimiser", optimizer.step)
        return optimizer

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("rollout", super()._generate_single_turn)(*args, **kwargs)

    def _log_probabilities(self, model: Any, phase: Any, *args: Any, **kwargs: Any) -> Any:
        part = "reference" if phase == "reference" else "actor forward"
        return self._timed(part, super()._log_probabilities)(model, phase, *args, **kwargs)


class Bench:
    """The default study's model and problems in a temporary folder, and trainers for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        study = load_study_file(Path("config/config.yaml"))
        self._plan = StudyPlan(study)
        prepare_model(study.config.models["base"], folder / "model")
        prepare_data(study.config.dataset.model_dump(), "train", folder / "train.parquet")
        self._problems = read_table(folder / "train.parquet", ProblemTable)

    def spec(self, arm: str, num_steps: int) -> TrainingSpec:
        """Return the default study's run of `arm` with `num_steps` steps and a negligible learning rate."""
        spec = TrainingSpec.model_validate(self._plan.training_spec(arm, 0))
        training = spec.training.model_copy(update={"learning_rate": 1e-8})
        return spec.model_copy(update={"num_steps": num_steps, "training": training})

    def plain(self, spec: TrainingSpec, *callbacks: TrainerCallback) -> GRPOTrainer:
        """Return TRL's trainer with our settings."""
        model = load_model(self.folder / "model", dtype="float32", attention=spec.attention)
        return self._trainer(GRPOTrainer, spec, model=model, callbacks=list(callbacks))

    def ours(self, spec: TrainingSpec, kind: type[NoisyGRPOTrainer], *callbacks: TrainerCallback) -> NoisyGRPOTrainer:
        """Return our trainer with the callbacks that every run has."""
        model = load_policy(spec, self.folder / "model")
        plan = build_noise_plan(spec, model, None)
        guard = BreakdownGuard("benchmark", spec.training)
        own = [
            guard,
            CleanWeightsCallback(plan.recorder),
            ProgressCallback("benchmark", spec.num_steps, lambda _: None),
        ]
        trainer: NoisyGRPOTrainer = self._trainer(
            kind,
            spec,
            model=model,
            callbacks=[*own, *callbacks],
            noise_plan=plan,
            prompt_format=spec.prompt,
            guard=guard,
            workspace=Workspace(self.folder / "scratch"),
            rollouts=TransformersRolloutEngine(self._tokenizer()),
            validation_accuracy={},
        )
        return trainer

    def _tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.folder / "model")
        tokenizer.eos_token = tokenizer.pad_token
        return tokenizer

    def _trainer(self, kind: Any, spec: TrainingSpec, **kwargs: Any) -> Any:
        tokenizer = self._tokenizer()
        kwargs["model"].generation_config.eos_token_id = tokenizer.eos_token_id
        prompts = [format_prompt(question, spec.prompt, tokenizer) for question in self._problems["question"]]
        trainer = kind(
            args=grpo_arguments(spec, self.folder),
            reward_funcs=reward_correct,
            train_dataset=Dataset.from_dict(
                {
                    "prompt": prompts,
                    "gold_answer": self._problems["gold_answer"].to_list(),
                    "stop_text": [spec.prompt.stop_text] * len(prompts),
                }
            ),
            processing_class=tokenizer,
            **kwargs,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def overhead(bench: Bench, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds per step of both trainers, in pairs."""
    spec = bench.spec("baseline", rounds + WARM_UP)
    turns = Turns(2)
    watches = [Stopwatch(turns, place) for place in range(2)]
    trainers = [bench.plain(spec, watches[0]), bench.ours(spec, NoisyGRPOTrainer, watches[1])]
    with ThreadPoolExecutor() as threads:
        trainings = [threads.submit(trainer.train) for trainer in trainers]
        for training in as_completed(trainings):
            if training.exception():
                turns.end()
            training.result()
    if any(watch.lengths != {spec.training.max_response_tokens} for watch in watches):
        raise RuntimeError(f"responses of other lengths were drawn: {[watch.lengths for watch in watches]}")
    plain, ours = (watch.seconds[WARM_UP:] for watch in watches)
    return {"plain": plain, "ours": ours}


def ratio_of_sums(plain: Any, ours: Any, axis: int = -1) -> Any:
    """Return the ratio of the total times; `scipy.stats.bootstrap` passes arrays and an axis."""
    return np.sum(ours, axis=axis) / np.sum(plain, axis=axis)


def breakdown(bench: Bench, arm: str, rounds: int) -> dict[str, float]:
    """Return the mean CPU seconds of each part of a step of `arm`, of the rest, and of the whole step."""
    watch = Stopwatch(Turns(1), 0)
    trainer = bench.ours(bench.spec(arm, rounds), TimedTrainer, watch)
    trainer.train()
    problems = trainer.noise_plan.recorder.receipt().problems()
    if problems != ["phase validation never ran"]:
        raise RuntimeError("; ".join(problems))
    parts = {part: trainer.parts[part] / rounds for part in PARTS}
    whole = sum(watch.seconds) / rounds
    return {**parts, "rest": whole - sum(parts.values()), "step": whole}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="optimiser steps of each trainer (default: 40)")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        paired = overhead(bench, options.rounds)
        ratios = [ours / plain for plain, ours in zip(paired["plain"], paired["ours"], strict=True)]
        interval = bootstrap(
            (paired["plain"], paired["ours"]), ratio_of_sums, paired=True, rng=np.random.default_rng(0)
        ).confidence_interval
        quartiles = statistics.quantiles(ratios, n=4)
        table = Table("rounds", "ratio of sums", "95 % interval", "quartiles of a round", title="ours / plain")
        table.add_row(
            str(len(ratios)),
            f"{ratio_of_sums(paired['plain'], paired['ours']):.3f}",
            f"{interval.low:.3f} to {interval.high:.3f}",
            f"{quartiles[0]:.3f} to {quartiles[2]:.3f}",
        )
        console.print(table)
        steps = {arm: breakdown(bench, arm, max(5, options.rounds // 4)) for arm in ("baseline", "E5", "E5b")}
    table = Table("CPU seconds of", *steps, title="CPU time of the parts of a step")
    for part in (*PARTS, "rest", "step"):
        table.add_row(part, *(f"{found[part]:.3f} ({found[part] / found['step']:.0%})" for found in steps.values()))
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"overhead": paired, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
