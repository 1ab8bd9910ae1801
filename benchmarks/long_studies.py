"""Memory and log size of long jobs, and time and memory that comparison and report need for many artifacts.

    OMP_NUM_THREADS=1 python benchmarks/long_studies.py training --steps 1000
    OMP_NUM_THREADS=1 python benchmarks/long_studies.py evaluation --questions 20000
    OMP_NUM_THREADS=1 python benchmarks/long_studies.py artifacts --evaluations 100 1000 10000

training: resident memory of one job after each optimiser step (random model of 2 layers, noise in every phase, AQN,
resume points and validations), its growth as a straight line after warm-up, and the bytes of the job's log.
evaluation: the same, after each batch of questions.
artifacts: seconds and peak memory of comparing and reporting synthetic evaluations, each count in its own process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import psutil
from scipy import stats
from smallest import parse

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

WARM_UP = 0.3
"""Fraction of the samples that the fit leaves out, while caches fill and the allocator reaches its size."""
BLOCKS = 14
"""Neighbouring samples are correlated, so the line is fitted to the means of this many blocks of samples."""


def main() -> None:
    """Run one of the three measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["training", "evaluation", "artifacts"], help="the measurement")
    parser.add_argument("--steps", type=int, default=1000, help="optimiser steps to train (default: 1000)")
    parser.add_argument("--questions", type=int, default=20_000, help="questions to evaluate (default: 20000)")
    parser.add_argument(
        "--evaluations",
        type=int,
        nargs="+",
        default=[100, 1000, 10_000],
        help="numbers of evaluations to compare and report (default: 100 1000 10000)",
    )
    arguments = parse(parser, steps=40, questions=700, evaluations=[20])
    if arguments.what == "artifacts":
        if len(arguments.evaluations) > 1:
            for number in arguments.evaluations:
                command = [sys.executable, __file__, "artifacts", "--evaluations", str(number)]
                subprocess.run(command, check=True)  # noqa: S603 - this file
        else:
            artifacts(arguments.evaluations[0])
    elif arguments.what == "training":
        training(arguments.steps)
    else:
        evaluation(arguments.questions)


def training(num_steps: int) -> None:
    """Train `num_steps` steps; print the growth of the memory and the size of the log."""
    import torch
    from tiny_training import AQN, NOISE, training_spec, write_inputs

    from aqnpipe.runtime.jobs import logged_job
    from aqnpipe.runtime.training import run_training_job
    from conftest import random_qwen2

    spec = training_spec(
        NOISE,
        AQN,
        num_steps=num_steps,
        epochs=10,
        prompts_per_step=2,
        micro_batch_size=4,
        max_response_tokens=4,
        checkpoint_every=num_steps,
        validate_every=num_steps // 10,
        resume_every=5,
    )
    memory = Memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = write_inputs(folder, random_qwen2, num_problems=num_steps // 5)
        began = time.perf_counter()
        stdout, stderr = os.dup(1), os.dup(2)
        with (
            mock.patch.object(torch.optim.AdamW, "step", memory.after(torch.optim.AdamW.step)),
            logged_job(folder / "job.log") as say,
        ):
            run_training_job(spec, inputs, folder / "run", folder / "scratch", say)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        seconds, log = time.perf_counter() - began, (folder / "job.log").stat().st_size
        receipt = (folder / "run" / "receipt.json").stat().st_size
    _print(f"{num_steps} optimiser steps in {seconds:.0f} s: {memory.growth(1000, 'steps')}")
    _print(f"log {log} bytes, {1000 * log / num_steps:.0f} per 1,000 steps; receipt {receipt} bytes")


def evaluation(num_questions: int) -> None:
    """Evaluate `num_questions` questions under noise; print the growth of the memory."""
    from tiny_training import write_inputs

    from aqnpipe.artifacts.runs import StageFiles
    from aqnpipe.config.run import EvaluationSpec
    from aqnpipe.evaluation import shards
    from aqnpipe.evaluation.stage import evaluate
    from aqnpipe.runtime.jobs import logged_job
    from conftest import random_qwen2

    settings = {"noise_levels": [0.1], "noise_seeds": [0], "max_response_tokens": 2, "batch_size": 50}
    spec = EvaluationSpec.model_validate(
        {
            **{"model_role": "base", "arm_id": "test", "seed": 0, "step": 1, "device": "cpu", "dtype": "float32"},
            **{"attention": "eager", "prompt": {}, "evaluation": settings},
        }
    )
    memory = Memory()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = write_inputs(folder, random_qwen2, num_problems=num_questions)
        outputs = StageFiles(*(folder / f"out.{end}" for end in ("parquet", "receipt.json", "run.json")))
        began = time.perf_counter()
        stdout, stderr = os.dup(1), os.dup(2)
        with (
            mock.patch.object(shards, "run_shard", memory.after(shards.run_shard)),
            logged_job(folder / "job.log") as say,
        ):
            evaluate(spec, inputs.model, inputs.test_problems, outputs, say)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        seconds, log = time.perf_counter() - began, (folder / "job.log").stat().st_size
    _print(f"{num_questions} answers in {seconds:.0f} s: {memory.growth(10_000, 'answers', 50)}; log {log} bytes")


class Memory:
    """Samples of the resident memory of this process, one after each call of a function."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._samples: list[int] = []

    def after(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with a sample taken after each call."""

        def sampled(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._samples.append(self._process.memory_info().rss)
            return result

        return sampled

    def growth(self, count: int, unit: str, per_sample: int = 1) -> str:
        """Return the growth per `count` units of work in words: slope after warm-up, with its 95 % interval."""
        kept = np.array(self._samples[int(WARM_UP * len(self._samples)) :]) / 2**20
        blocks = np.array_split(np.column_stack([np.arange(len(kept)), kept]), BLOCKS)
        place, size = np.array([block.mean(axis=0) for block in blocks]).T
        line = stats.linregress(place, size)
        half = stats.t.ppf(0.975, BLOCKS - 2) * line.stderr
        factor = count / per_sample
        low, high = (line.slope - half) * factor, (line.slope + half) * factor
        return (
            f"{line.slope * factor:+.2f} MB per {count} {unit} (95 % interval {low:+.2f} to {high:+.2f}), "
            f"{kept[0]:.1f} MB after warm-up, {kept[-1]:.1f} at the end, {kept.min():.1f} to {kept.max():.1f} between"
        )


def artifacts(num_evaluations: int) -> None:
    """Compare and report `num_evaluations` synthetic evaluations of 20 questions; print seconds and peak memory."""
    import synthetic_study as synthetic

    from aqnpipe.comparison.stage import compare
    from aqnpipe.report.stage import build_report

    num_seeds = 10
    kinds = list(synthetic.ARMS)
    names = [f"{kinds[number % len(kinds)]}-{number:04}" for number in range(num_evaluations // num_seeds)]
    for number, name in enumerate(names):
        synthetic.ARMS[name] = synthetic.ARMS[kinds[number % len(kinds)]]
    study = synthetic.study(
        arms=names,
        seeds=list(range(num_seeds)),
        comparisons=[],
        dataset={"source": "generated", "num_train": 32, "num_test": 20},
        evaluation={"noise_levels": [0.0, 0.1], "noise_seeds": [0], "max_response_tokens": 40, "batch_size": 20},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = synthetic.write_study(folder, study, 20)
        files = [path for path in folder.rglob("*") if path.is_file()]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.perf_counter()
        compare(study, made.evaluations, folder)
        compared = time.perf_counter() - began
        after_comparing = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        began = time.perf_counter()
        build_report(study, made.report_data(folder), folder)
        reported = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        page = (folder / "report.html").stat().st_size / 1e6
        rows = pl.read_parquet(folder / "comparisons.parquet").height
    row = {
        "evaluations": num_evaluations,
        "files": len(files),
        "comparisons": rows,
        "compare s": round(compared, 1),
        "report s": round(reported, 1),
        "MB before": round(before),
        "MB after comparing": round(after_comparing),
        "MB peak": round(peak),
        "page MB": round(page, 2),
    }
    _print(json.dumps(row))


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
