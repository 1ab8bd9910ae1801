"""Evaluations prepared for comparison: correctness per noise level, and every reason not to use an evaluation."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandera.polars as pa
import polars as pl
from statsmodels.stats.proportion import proportion_confint

from aqnpipe.artifacts.comparisons import RefusalKind
from aqnpipe.artifacts.evaluation_facts import EvaluationFacts
from aqnpipe.artifacts.evaluations import EvaluationFiles, EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, read_unchecked_table
from aqnpipe.artifacts.lineage import record_problems
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.evaluation import scorer_column
from aqnpipe.data.scoring import SCORERS
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.evaluation_receipt import EvaluationReceipts
from aqnpipe.statistics.clusters import Clusters

PASS_KEYS = ["question_id", "noise_level", "noise_seed"]
ROW_KEYS = [*PASS_KEYS, "sample"]
_DIGITS = 6
_IDENTITY_KEYS = frozenset({"model", "model_role", "arm", "arm_id", "seed", "step"})
_INPUTS_THAT_MAY_DIFFER = frozenset({"weights"})
# Not the number of its workers, on which no result depends.
_ENGINE = ("backend", "vllm", "enforce_eager")


@dataclass(frozen=True)
class EvaluationInput(EvaluationFiles):
    """The files of one evaluation, and the problems of its lineage.

    `lineage_problems`: why these files are not what the study requested, see `comparison.lineage`. `rollouts`: what
    drew the rollouts in training; None if nothing was trained.
    """

    lineage_problems: tuple[str, ...] = ()
    rollouts: str | None = None


@dataclass(frozen=True)
class LevelScores:
    """Correctness at one noise level: correct[noise seed, question], the share of right samples; question ids sorted.

    `same_responses_as`: a lower level at which every response is the same, in every noise seed; None: there is no such
    level. `clusters`: of the questions; None: each is its own.
    """

    question_ids: tuple[str, ...]
    noise_seeds: tuple[int, ...]
    num_samples: int
    correct: npt.NDArray[np.float64]
    same_responses_as: float | None
    clusters: Clusters | None = None


@dataclass(frozen=True)
class Problem:
    """A reason why no comparison may use an evaluation."""

    kind: RefusalKind
    text: str


@dataclass(frozen=True)
class LoadedEvaluation:
    """An evaluation in memory. `setting`: its settings and conditions. `weights`: digest of the evaluated weights."""

    source: EvaluationInput
    levels: Mapping[float, LevelScores]
    problems: tuple[Problem, ...]
    weights: str | None
    setting: Mapping[str, str]
    accuracy: pl.DataFrame

    @cached_property
    def accuracy_at(self) -> Mapping[float, Mapping[str, Any]]:
        """The rows of `accuracy` by noise level; every comparison of the run reads them, some hundred times in all."""
        return {row["noise_level"]: row for row in self.accuracy.iter_rows(named=True)}


def load_evaluations(
    sources: Iterable[EvaluationInput], scorer: str, alpha: float
) -> dict[tuple[str, str, int, int], LoadedEvaluation]:
    """Read evaluations by (model role, arm, seed, step); DataError where a file is missing or malformed."""
    return {
        (source.model, source.arm, source.seed, source.step): load_evaluation(source, scorer, alpha)
        for source in sources
    }


def load_evaluation(source: EvaluationInput, scorer: str, alpha: float) -> LoadedEvaluation:
    """Read one evaluation, its receipts and its record; DataError where a file is missing or malformed.

    `scorer` decides which responses are right: one of this package, or a function of the user's own.
    """
    scorer = scorer_column(scorer)
    rows, problems = _read_rows(source.table)
    receipts = read_json(source.receipt, EvaluationReceipts)
    record = read_json(source.record, RunRecord)
    levels = _levels(rows, scorer)
    found: list[tuple[RefusalKind, list[str]]] = [
        ("questions", problems + _question_problems(levels)),
        ("receipt", [f"receipt refused: {problem}" for problem in receipts.problems()]),
        ("receipt", _pass_problems(rows, receipts)),
        ("receipt", [f"evaluation refused: {problem}" for problem in receipts.facts.row_problems(rows)]),
        ("record", record_problems(record, identity=source.identity)),
        ("record", list(source.lineage_problems)),
    ]
    return LoadedEvaluation(
        source=source,
        levels=levels,
        problems=tuple(Problem(kind, f"{source.name}: {text}") for kind, texts in found for text in texts),
        weights=record.inputs_sha256.get("weights"),
        setting=_setting(record)
        | _facts_setting(receipts.facts)
        | ({} if source.rollouts is None else {OF_ROLLOUTS: source.rollouts}),
        accuracy=accuracy_rows(source, rows, scorer, alpha),
    )


def accuracy_rows(source: EvaluationInput, rows: pl.DataFrame, scorer: str, alpha: float) -> pl.DataFrame:
    """Return the rows of `artifacts.AccuracyTable` for one evaluation, one per noise level."""
    table = (
        rows.group_by("noise_level")
        .agg(
            pl.col("question_id").n_unique().cast(pl.Int64).alias("num_questions"),
            pl.col("noise_seed").n_unique().cast(pl.Int64).alias("num_noise_seeds"),
            pl.col("sample").n_unique().cast(pl.Int64).alias("num_samples"),
            pl.col(f"correct_{scorer}").mean().alias("accuracy"),
            *(pl.col(f"correct_{name}").mean().alias(f"accuracy_{name}") for name in SCORERS),
            (pl.col("finish_reason") == "length").mean().alias("truncated_fraction"),
            pl.col(f"answer_{scorer}").is_null().mean().alias("parse_failure_fraction"),
            *(pl.col(f"answer_{name}").is_null().mean().alias(f"parse_failure_{name}") for name in SCORERS),
        )
        .sort("noise_level")
    )
    effective = _effective_questions(rows, f"correct_{scorer}").to_numpy()
    low, high = proportion_confint(table["accuracy"].to_numpy() * effective, effective, alpha, method="wilson")
    return table.select(
        *(pl.lit(value).alias(name) for name, value in source.identity.items()),
        "noise_level",
        "num_questions",
        "num_noise_seeds",
        "num_samples",
        "accuracy",
        *(f"accuracy_{name}" for name in SCORERS),
        pl.Series("ci_low", np.clip(low, 0, 1)),
        pl.Series("ci_high", np.clip(high, 0, 1)),
        "truncated_fraction",
        "parse_failure_fraction",
        *(f"parse_failure_{name}" for name in SCORERS),
    ).with_columns(pl.col("seed", "step").cast(pl.Int64))


def _effective_questions(rows: pl.DataFrame, correct: str) -> pl.Series:
    """Return, per noise level, how many questions with one answer each would give an accuracy with the same error.

    Several answers to a question, of noise draws or samples, have a mean that varies less than one yes or no.
    """
    keys = ["noise_level", "question_id"]
    if "cluster" in rows.columns:
        return _effective_of_clusters(rows, correct)
    of_questions = rows.group_by(keys, maintain_order=True).agg(pl.col(correct).mean().alias("mean"), pl.len())
    mean, number, answers = pl.col("mean").mean(), pl.len(), pl.col("len").sum()
    # A mean of yes or no has the variance mean * (1 - mean); if no question varies, all answers count.
    as_one = (number * mean * (1 - mean) / pl.col("mean").var(ddof=0)).fill_nan(number)
    found = of_questions.group_by("noise_level", maintain_order=True).agg(
        pl.min_horizontal(as_one, answers).round(_DIGITS).alias("questions")
    )
    return found.sort("noise_level")["questions"]


def _effective_of_clusters(rows: pl.DataFrame, correct: str) -> pl.Series:
    """Return the same where questions are in clusters, from the variance between clusters."""
    ordered = rows.sort(ROW_KEYS).group_by("noise_level", "question_id", "cluster", maintain_order=True)
    found = []
    for _, part in ordered.agg(pl.col(correct).mean()).sort("noise_level", maintain_order=True).group_by(
        "noise_level", maintain_order=True
    ):  # fmt: skip
        means, clusters = part[correct].to_numpy(), Clusters.of(part["cluster"].to_list())
        variance = float(clusters.collapsed(means).var(ddof=1)) / clusters.number if clusters.number > 1 else 0.0
        of_answers = float(means.mean() * (1 - means.mean()))
        # Clusters that happen to vary less than single answers would are not worth more questions than there are.
        found.append(min(of_answers / variance if variance > 0 else len(means), len(means)))
    return pl.Series(found, dtype=pl.Float64).round(_DIGITS)


OF_ROLLOUTS = "training: rollouts"
"""Setting that the model before training does not have."""

OF_THE_TOKENIZER = "facts."
"""Prefix of settings that models with different tokenizers cannot have alike: token ids of prompts, end tokens."""


def setting_difference(first: LoadedEvaluation, second: LoadedEvaluation, *, of_tokenizers: bool = True) -> str | None:
    """Return the first difference between the settings of two evaluations, in words; None if there is none.

    `of_tokenizers`: count what follows from different tokenizers.
    """
    for key in sorted({*first.setting, *second.setting}):
        if key.startswith(OF_THE_TOKENIZER) and not of_tokenizers:
            continue
        if key == OF_ROLLOUTS and not (key in first.setting and key in second.setting):
            continue
        ours, theirs = first.setting.get(key, "absent"), second.setting.get(key, "absent")
        if ours != theirs:
            return f"{key} is {ours} for {first.source.name} and {theirs} for {second.source.name}"
    return None


def _read_rows(path: Path) -> tuple[pl.DataFrame, list[str]]:
    try:
        return read_table(path, EvaluationTable), []
    except DataError as error:
        cause = error.__cause__
        if not isinstance(cause, pa.errors.SchemaError) or cause.reason_code != pa.errors.SchemaErrorReason.DUPLICATES:
            raise
    rows = read_unchecked_table(path)
    unique = rows.unique(ROW_KEYS, keep="first", maintain_order=True)
    return unique, [f"{len(rows) - len(unique)} rows repeat a question within a pass"]


def _levels(rows: pl.DataFrame, scorer: str) -> dict[float, LevelScores]:
    """Split the rows by noise level.

    A level is left empty if its passes have different questions, or if its questions have different samples. The
    problems of the evaluation name such levels.
    """
    requested = (
        rows.sort(ROW_KEYS)
        .group_by(PASS_KEYS, maintain_order=True)
        .agg(
            pl.col("sample"),
            pl.col(f"correct_{scorer}").mean().alias("correct"),
            *([pl.col("cluster").first()] if "cluster" in rows.columns else []),
        )
        .sort(PASS_KEYS[::-1])
    )
    twins = _identical_levels(rows)
    levels = {}
    for (level,), part in requested.group_by("noise_level", maintain_order=True):
        passes = {seed: rows for (seed,), rows in part.group_by("noise_seed", maintain_order=True)}
        first = next(iter(passes.values()))
        whole = part["sample"].n_unique() == 1 and all(
            answers["question_id"].equals(first["question_id"]) for answers in passes.values()
        )
        shown = part if whole else part.clear()
        levels[float(level)] = LevelScores(
            question_ids=tuple(first["question_id"].to_list()) if whole else (),
            noise_seeds=tuple(int(seed) for seed in passes),
            num_samples=len(first["sample"][0]),
            correct=shown["correct"].to_numpy().reshape(len(passes), -1),
            same_responses_as=twins.get(float(level)),
            clusters=Clusters.of(first["cluster"].to_list()) if whole and "cluster" in first.columns else None,
        )
    return levels


def _identical_levels(rows: pl.DataFrame) -> dict[float, float]:
    """Return the levels at which every pass has the same responses as every pass of a lower level, with that level."""
    digests = (
        rows.group_by("noise_level", "noise_seed")
        .agg(pl.struct("question_id", "sample", "response").hash(seed=0).bitwise_xor().alias("digest"))
        .group_by("noise_level")
        .agg(pl.col("digest").unique())
        .sort("noise_level")
    )
    seen: dict[int, float] = {}
    twins: dict[float, float] = {}
    for level, values in digests.iter_rows():
        if len(values) == 1:
            if values[0] in seen:
                twins[float(level)] = seen[values[0]]
            seen.setdefault(values[0], float(level))
    return twins


def _question_problems(levels: Mapping[float, LevelScores]) -> list[str]:
    problems = [
        f"noise level {level:g}: passes hold different questions" for level in levels if not levels[level].question_ids
    ]
    if len({scores.question_ids for scores in levels.values()}) > 1 and not problems:
        problems.append("noise levels hold different questions")
    if any(scores.clusters is not None and scores.clusters.number < 2 for scores in levels.values()):
        problems.append("all questions are in one cluster, so there is nothing to compare over")
    return problems


def _pass_problems(rows: pl.DataFrame, receipts: EvaluationReceipts) -> list[str]:
    in_table = set(rows.select("noise_level", "noise_seed").unique().iter_rows())
    in_receipts = {(entry.noise_level, entry.noise_seed) for entry in receipts.passes}
    missing = [f"no receipt for level {level:g}, noise seed {seed}" for level, seed in sorted(in_table - in_receipts)]
    extra = [f"no rows for level {level:g}, noise seed {seed}" for level, seed in sorted(in_receipts - in_table)]
    return missing + extra


def _setting(record: RunRecord) -> dict[str, str]:
    setting = {"stage": record.stage, "code_digest": record.code_digest, "device": record.device}
    setting |= {f"versions.{name}": version for name, version in record.versions.items()}
    setting |= {f"generation.{name}": str(record.generation[name]) for name in _ENGINE if name in record.generation}
    setting |= {
        f"inputs.{name}": digest for name, digest in record.inputs_sha256.items() if name not in _INPUTS_THAT_MAY_DIFFER
    }
    config = {key: value for key, value in record.config.items() if key not in _IDENTITY_KEYS}
    return setting | _flat(config, "config")


def _facts_setting(facts: EvaluationFacts) -> dict[str, str]:
    """Return what two compared evaluations must have used alike."""
    prompts = hashlib.sha256(facts.prompts.encode()).hexdigest()
    alike = {"end_token": facts.end_token, "stop_text": facts.stop_text, "prompts as the model read them": prompts[:16]}
    return {f"{OF_THE_TOKENIZER}{name}": repr(value) for name, value in alike.items()}


def _flat(value: Any, prefix: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        return {name: text for key, part in value.items() for name, text in _flat(part, f"{prefix}.{key}").items()}
    return {prefix: repr(value)}
