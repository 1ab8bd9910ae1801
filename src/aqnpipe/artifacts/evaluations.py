"""Files that the evaluate stage writes for each checkpoint, read by the comparison and the report."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pandera.polars as pa

from aqnpipe.artifacts.files import Table
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.base import evaluations_folder

_PRIMARY = "(verl_strict|boxed|letter|text|own|task)"
"""Scorers that have columns only where they are the primary one."""

_RUN_AND_STEP = re.compile(r"seed([0-9]{1,18})/step([0-9]{1,18})\.parquet")


@dataclass(frozen=True)
class EvaluationFiles(StageFiles):
    """The files of the evaluation of one checkpoint; step 0 is the pretrained model."""

    model: str
    arm: str
    seed: int
    step: int

    @property
    def identity(self) -> dict[str, str | int]:
        """The identity that the run record of this evaluation must have."""
        return {"model": self.model, "arm": self.arm, "seed": self.seed, "step": self.step}

    @property
    def name(self) -> str:
        """The name of the evaluation in messages."""
        return f"{self.model}/{self.arm} seed {self.seed} step {self.step}"


def evaluation_files(
    results: Path, model: str, arm: str, seed: int, step: int, machine: str | None = None
) -> EvaluationFiles:
    """Return the files of one evaluation in the results folder of its study; `machine` as in `evaluations_folder`."""
    folder = results / evaluations_folder(machine) / model / arm / f"seed{seed}"
    return EvaluationFiles(
        model=model,
        arm=arm,
        seed=seed,
        step=step,
        table=folder / f"step{step}.parquet",
        receipt=folder / f"step{step}.receipt.json",
        record=folder / f"step{step}.run.json",
    )


def last_evaluations(results: Path) -> tuple[EvaluationFiles, ...]:
    """Return the evaluation of the last step of every run that has one, in the order of the runs' folders."""
    latest: dict[Path, EvaluationFiles] = {}
    for table in sorted((results / evaluations_folder()).glob("*/*/seed*/step*.parquet")):
        if (place := _RUN_AND_STEP.fullmatch(f"{table.parent.name}/{table.name}")) is None:
            continue
        *_, model, arm = table.parts[:-2]
        found = evaluation_files(results, model, arm, int(place[1]), int(place[2]))
        if table.parent not in latest or latest[table.parent].step < found.step:
            latest[table.parent] = found
    return tuple(latest.values())


class EvaluationTable(Table, unique=("question_id", "noise_level", "noise_seed", "sample")):
    """results/eval/.../step<N>.parquet: a row per question, noise level, noise seed and sample.

    `cluster`: of the question, the unit of tests and intervals; absent where that is the question. `batch`: number of
    the batch of the question, the same in every pass and sample; null where an engine or lm-evaluation-harness makes
    its own batches; absent in tables of earlier versions.
    `noise_level` is a relative scale below 1, or the number of a named noise of the evaluation (1, 2, ...).
    `sample` numbers the responses to one question; it is 0 in greedy evaluations. `answer_<scorer>` is the answer that
    the scorer of `aqnpipe.data.scoring` extracted, null if it found none. Scorers besides the first four have columns
    only in evaluations of which they are the primary one; `own` is a scoring
    function of the user, `task` a task of lm-evaluation-harness.
    """

    question_id: str
    cluster: Optional[str]  # noqa: UP045 - pandera's form of a column that may be absent
    batch: Optional[int] = pa.Field(ge=0, nullable=True)  # noqa: UP045
    noise_level: float = pa.Field(ge=0)
    noise_seed: int = pa.Field(ge=0)
    sample: int = pa.Field(ge=0)
    response: str
    answer_strict: str = pa.Field(nullable=True)
    answer_last_number: str = pa.Field(nullable=True)
    answer_harness_strict: str = pa.Field(nullable=True)
    answer_harness_flexible: str = pa.Field(nullable=True)
    correct_strict: bool
    correct_last_number: bool
    correct_harness_strict: bool
    correct_harness_flexible: bool
    answer_primary: Optional[str] = pa.Field(alias=f"^answer_{_PRIMARY}$", regex=True, nullable=True)  # noqa: UP045
    correct_primary: Optional[bool] = pa.Field(alias=f"^correct_{_PRIMARY}$", regex=True)  # noqa: UP045
    response_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])
