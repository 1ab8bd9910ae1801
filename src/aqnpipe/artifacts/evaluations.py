"""Files that the evaluate stage writes for each checkpoint, read by the comparison and the report, and their facts.

Facts are what the passes of an evaluation really used, as observed while the model computed. The evaluate stage
compares them with the study before it writes anything; the comparison judges them again.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Optional

import pandera.polars as pa
import polars as pl
from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import Table
from aqnpipe.artifacts.provenance import short_digest
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


_DIGITS = 8
"""Hexadecimal digits of the digest of a row: for one row in four thousand million, a change goes unseen."""

_OF_A_ROW = ("question_id", "sample", "response", "response_tokens", "finish_reason")


class PassFacts(Artifact):
    """Facts about what one pass over the questions used.

    first_logits: digest of the first logits of each batch, in order. rows: `row_digests` of the responses, without
    separator.
    """

    noise_level: float = Field(ge=0)
    noise_seed: int = Field(ge=0)
    first_logits: tuple[str, ...]
    rows: str
    rows_again: int = Field(ge=0)  # rows computed again in one forward, without noise
    largest_difference: float = Field(ge=0)  # of a logit computed again; 1 is what rounding may cause

    @property
    def name(self) -> str:
        """The evaluation in messages."""
        return f"evaluation at level {self.noise_level:g}, noise seed {self.noise_seed}"

    def row_problems(self, rows: pl.DataFrame) -> Iterator[str]:
        """Yield what is wrong with the rows of this pass, if they are not the responses that the facts are about."""
        digests = row_digests(rows)
        if "".join(digests) == self.rows:
            return
        stored = [self.rows[start : start + _DIGITS] for start in range(0, len(self.rows), _DIGITS)]
        where = [number for number, pair in enumerate(zip(digests, stored, strict=False)) if pair[0] != pair[1]]
        if len(digests) != len(stored) or not where:
            yield f"{self.name}: {len(digests)} responses in the table, {len(stored)} were given"
        else:
            yield (
                f"{self.name}: {len(where)} responses in the table are not those that the model gave to their "
                f"questions, first {rows.sort('sample', 'question_id')['question_id'][where[0]]}"
            )


class EvaluationFacts(Artifact):
    """Facts about what an evaluation used.

    `prompts`: digest of the prompt that the model read for each question, 16 digits each. `shards`: workers of vLLM
    that shared every layer; each engine has so many. `unchecked`: what this backend does not let the pipeline observe,
    in words; empty for transformers.
    """

    end_token: int
    stop_text: str | None
    prompts: str
    passes: tuple[PassFacts, ...]
    shards: int = Field(default=1, ge=1)
    unchecked: tuple[str, ...] = ()

    def shard_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Return a number of shards that an evaluation with these settings, `EvaluationSpec` as plain data, has not."""
        requested = config.get("generation", {}).get("tensor_parallel", 1)
        used = f"used shards {self.shards}, the study requests {requested}"
        return [used] if self.shards != requested else []

    def row_problems(self, rows: pl.DataFrame) -> Iterator[str]:
        """Yield the passes whose rows in the table are not the responses that the facts are about."""
        for facts in self.passes:
            yield from facts.row_problems(rows.filter(noise_level=facts.noise_level, noise_seed=facts.noise_seed))

    def problems(self) -> Iterator[str]:
        """Yield passes that share their noise: two that differ in noise have other logits in every batch."""
        for first, second in combinations(self.passes, 2):
            same = sum(one == other for one, other in zip(first.first_logits, second.first_logits, strict=False))
            if not same:
                continue
            if first.noise_level == second.noise_level:
                yield (
                    f"noise level {first.noise_level:g}: noise seeds {first.noise_seed} and {second.noise_seed} gave "
                    f"the same noise in {same} of {len(first.first_logits)} batches, one noise seed was used twice"
                )
            else:
                yield (
                    f"noise levels {first.noise_level:g} and {second.noise_level:g} gave the same logits in {same} of "
                    f"{len(first.first_logits)} batches: one of the evaluations did not run under its noise"
                )


def row_digests(rows: pl.DataFrame) -> list[str]:
    """Return a digest of each row of one pass: question, sample, response and its length and end.

    Sorted by sample and question.
    """
    return [row_digest(*row) for row in rows.select(_OF_A_ROW).sort("sample", "question_id").iter_rows()]


def row_digest(question_id: str, sample: int, response: str, num_tokens: int, finish_reason: str) -> str:
    """Return the digest of one response to one question."""
    return short_digest((question_id, sample, response, num_tokens, finish_reason), _DIGITS // 2)
