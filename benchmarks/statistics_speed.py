"""Time and memory of the compare stage on a large study.

`OMP_NUM_THREADS=1 POLARS_MAX_THREADS=2 python benchmarks/statistics_speed.py` generates evaluations of 50 arms with 5
seeds, 3 noise levels and 1,319 questions (not timed), compares them, and prints seconds and peak memory. The receipts
are short: those of real models contain a cell per operator and layer.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from smallest import parse

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from made_up import facts_of

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import write_json, write_table
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.evaluations import EvaluationInput
from aqnpipe.comparison.stage import compare
from aqnpipe.config.arm import Arm
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study
from aqnpipe.data.scoring import SCORERS
from aqnpipe.noise.receipts.receipt import EvaluationPass, EvaluationReceipts, Receipt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

LEVELS = (0.0, 0.05, 0.1)


def generated_study(num_arms: int, num_seeds: int) -> Study:
    """Return a study that compares every arm with the first one and with itself under noise."""
    names = [f"arm{number:02d}" for number in range(num_arms)]
    claims = [
        {
            "kind": kind,
            "treatment": name,
            "control": names[0],
            "noise_level": level,
            "expected": "higher",
            "claim": f"{name} against {names[0]}",
        }
        for name in names[1:]
        for kind, level in (("arms", 0.0), ("arms", 0.1), ("degradation", 0.1))
    ]
    claims += [{"kind": "levels", "arm": name, "noise_level": 0.1, "claim": f"noise hurts {name}"} for name in names]
    config: dict[str, Any] = {
        "study": "large",
        "models": {"base": {"source": "some/model"}},
        "machines": {"device": {}},
        "dataset": {"source": "generated", "num_train": 480, "num_test": 1319},
        "arms": names,
        "seeds": list(range(num_seeds)),
        "training": {
            "epochs": 2,
            "prompts_per_step": 16,
            "rollouts_per_prompt": 8,
            "micro_batch_size": 64,
            "learning_rate": 2e-4,
            "max_response_tokens": 40,
        },
        "evaluation": {"noise_levels": LEVELS, "noise_seeds": [0], "max_response_tokens": 40, "batch_size": 250},
        "comparisons": claims,
        "report": {"title": "Large", "question": "How fast?"},
    }
    return Study.model_validate({"config": config, "arms": {name: Arm(description=name) for name in names}})


def write_evaluation(
    folder: Path, checkpoint: tuple[str, str, int, int], num_questions: int, draws: np.random.Generator
) -> EvaluationInput:
    """Write an evaluation with random answers and responses of about 150 characters."""
    model, arm, seed, step = checkpoint
    base = folder / arm / f"seed{seed}"
    files = (base / name for name in ("table.parquet", "receipt.json", "run.json"))
    source = EvaluationInput(*files, *checkpoint)
    number = num_questions * len(LEVELS)
    correct = draws.random(number) < np.repeat([0.7, 0.67, 0.6], num_questions)
    answers = [str(value) for value in draws.integers(0, 100, number)]
    table = pl.DataFrame(
        {
            "question_id": [f"q{index:05d}" for index in range(num_questions)] * len(LEVELS),
            "batch": np.tile(np.arange(num_questions) // 50, len(LEVELS)),
            "noise_level": np.repeat(LEVELS, num_questions),
            "noise_seed": np.zeros(number, dtype=np.int64),
            "sample": np.zeros(number, dtype=np.int64),
            "response": [f"{arm} {seed} {index} " + "so many words " * 9 + a for index, a in enumerate(answers)],
            **{f"answer_{scorer}": answers for scorer in SCORERS},
            **{f"correct_{scorer}": correct for scorer in SCORERS},
            "response_tokens": draws.integers(9, 40, number),
            "finish_reason": ["stop"] * number,
        }
    )
    write_table(source.table, table, EvaluationTable)
    empty = Receipt(operator_noise=None, expected_phases=(), rows=(), num_layers=1, num_norms=1)
    passes = tuple(EvaluationPass(noise_level=level, noise_seed=0, receipt=empty) for level in LEVELS)
    write_json(source.receipt, EvaluationReceipts(passes=passes, facts=facts_of(table)))
    record = RunRecord(
        stage="evaluate",
        identity={"model": model, "arm": arm, "seed": seed, "step": step},
        config={},
        code_digest="0",
        inputs_sha256={"test_problems": "0", "weights": f"{arm} {seed}"},
        versions={},
        device="cpu",
    )
    write_json(source.record, record)
    return source


def main() -> None:
    """Print the time and memory of the compare stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=int, default=50, help="number of arms")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per arm")
    parser.add_argument("--questions", type=int, default=1319, help="questions per evaluation")
    arguments = parse(parser, arms=3, seeds=2, questions=20)
    study = generated_study(arguments.arms, arguments.seeds)
    draws = np.random.default_rng(0)
    # The receipts are empty, so every level above 0 would be refused. The benchmark measures valid comparisons.
    EvaluationPass.problems = lambda self, tolerance=0.0: []  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        evaluations = [
            write_evaluation(folder, checkpoint, arguments.questions, draws)
            for checkpoint in StudyPlan(study).evaluations()
        ]
        start, start_cpu = time.perf_counter(), time.process_time()
        compare(study, evaluations, folder)
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        verdicts = pl.read_parquet(folder / "comparisons.parquet")["verdict"].value_counts(sort=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = len(evaluations) * len(LEVELS) * arguments.questions
    print(  # noqa: T201
        f"{len(evaluations)} evaluations, {rows:,} rows, {len(study.comparisons())} comparisons "
        f"({', '.join(f'{count} {verdict}' for verdict, count in verdicts.iter_rows())}): "
        f"{seconds:.1f} s, {cpu:.1f} s of processor time, peak memory {peak:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
