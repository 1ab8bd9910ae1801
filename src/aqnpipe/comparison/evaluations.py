"""Evaluations prepared for comparison: correctness per noise level, and every reason not to use an evaluation."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandera.polars as pa
import polars as pl
from statsmodels.stats.proportion import proportion_confint

from aqnpipe.artifacts.comparisons import AccuracyTable, RefusalKind
from aqnpipe.artifacts.evaluations import EvaluationFacts, EvaluationFiles, EvaluationTable
from aqnpipe.artifacts.files import numbered_together, read_json, read_table, read_unchecked_table, validate_tables
from aqnpipe.artifacts.runs import RunRecord, record_problems
from aqnpipe.config.analysis import TestedUnit
from aqnpipe.config.evaluation import scorer_column
from aqnpipe.config.study import CHECKPOINTS
from aqnpipe.data.scoring import SCORERS
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.receipt import EvaluationReceipts
from aqnpipe.statistics.clusters import Batches, Clusters

PASS_KEYS = ["question_id", "noise_level", "noise_seed"]
ROW_KEYS = [*PASS_KEYS, "sample"]
_DIGITS = 6
_FILE = "aqnpipe_table"
"""Column that numbers tables that are read together."""

_TOGETHER = 128
"""Tables read together: every query and every validation has a fixed cost, which is that of some thousand rows."""
_IDENTITY_KEYS = frozenset({"model", "model_role", "arm", "arm_id", "seed", "step"})
_INPUTS_THAT_MAY_DIFFER = frozenset({"weights", "tokenizer", "config", "settings"})
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
    level. `clusters`: of the questions; None: each is its own. `batches`: in which they were decoded; None: not known,
    or they are the clusters.
    """

    question_ids: tuple[str, ...]
    noise_seeds: tuple[int, ...]
    num_samples: int
    correct: npt.NDArray[np.float64]
    same_responses_as: float | None
    clusters: Clusters | None = None
    batches: Batches | None = None

    @cached_property
    def mean(self) -> float:
        """Mean over noise seeds and questions."""
        return float(self.correct.mean())


@dataclass(frozen=True)
class Refusal:
    """Why a comparison cannot be made, or why none may use an evaluation."""

    kind: RefusalKind
    reason: str


class RefusedError(Exception):
    """A comparison cannot be made; it gets the verdict `invalid`."""

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(kind, reason)


@dataclass(frozen=True)
class LoadedEvaluation:
    """An evaluation in memory. `setting`: its settings and conditions. `weights`: digest of the evaluated weights.

    Of a given checkpoint with that of its settings, under which the same weights may be another model.
    """

    source: EvaluationInput
    levels: Mapping[float, LevelScores]
    problems: tuple[Refusal, ...]
    weights: str | None
    setting: Mapping[str, str]
    accuracy: pl.DataFrame

    @cached_property
    def accuracy_at(self) -> Mapping[float, Mapping[str, Any]]:
        """The rows of `accuracy` by noise level; every comparison of the run reads them, some hundred times in all."""
        return {row["noise_level"]: row for row in self.accuracy.iter_rows(named=True)}


def load_evaluations(
    sources: Iterable[EvaluationInput], scorer: str, alpha: float, unit: TestedUnit = "question"
) -> dict[tuple[str, str, int, int], LoadedEvaluation]:
    """Read evaluations by (model role, arm, seed, step); DataError where a file is missing, malformed or not in units.

    `scorer` decides which responses are right: one of this package, or a function of the user's own. unit: batch makes
    the batches of questions their clusters.
    """
    listed = list(sources)
    parts = (listed[start : start + _TOGETHER] for start in range(0, len(listed), _TOGETHER))
    found = (evaluation for part in parts for evaluation in _load_together(part, scorer_column(scorer), alpha, unit))
    loaded = {(one.source.model, one.source.arm, one.source.seed, one.source.step): one for one in found}
    # Tables of other columns are read later; the order is that of the sources.
    keys = ((source.model, source.arm, source.seed, source.step) for source in listed)
    return {key: loaded[key] for key in keys}


def _load_together(
    sources: Sequence[EvaluationInput], scorer: str, alpha: float, unit: TestedUnit
) -> Iterator[LoadedEvaluation]:
    """Yield evaluations whose tables are validated and summed up together, in an eighth of the time."""
    tables = _read_tables([source.table for source in sources])
    if unit == "batch":
        read = zip(sources, tables, strict=True)
        tables = [(_with_batches_as_clusters(source.table, rows), problems) for source, (rows, problems) in read]
    schemas = [tuple(rows.schema.items()) for rows, _ in tables]
    for schema in dict.fromkeys(schemas):
        alike = [number for number, found in enumerate(schemas) if found == schema]
        part = [sources[number] for number in alike]
        together = numbered_together([tables[number][0] for number in alike], _FILE)
        levels, accuracies = _levels(together, scorer, len(part)), _accuracies(part, together, scorer, alpha)
        for place, number in enumerate(alike):
            yield _loaded(part[place], *tables[number], levels[place], accuracies[place])


def _loaded(
    source: EvaluationInput,
    rows: pl.DataFrame,
    problems: list[str],
    levels: Mapping[float, LevelScores],
    accuracy: pl.DataFrame,
) -> LoadedEvaluation:
    receipts = read_json(source.receipt, EvaluationReceipts)
    record = read_json(source.record, RunRecord)
    found: list[tuple[RefusalKind, list[str]]] = [
        ("questions", problems + _question_problems(levels)),
        ("receipt", [f"receipt invalid: {problem}" for problem in receipts.problems()]),
        ("receipt", _pass_problems(levels, receipts)),
        ("receipt", [f"evaluation invalid: {problem}" for problem in receipts.facts.row_problems(rows)]),
        ("record", record_problems(record, identity=source.identity)),
        ("record", list(source.lineage_problems)),
    ]
    return LoadedEvaluation(
        source=source,
        levels=levels,
        problems=tuple(Refusal(kind, f"{source.name}: {text}") for kind, texts in found for text in texts),
        weights=_weights(record),
        setting=_setting(record)
        | _facts_setting(receipts.facts)
        | ({} if source.rollouts is None else {OF_ROLLOUTS: source.rollouts}),
        accuracy=accuracy,
    )


def _weights(record: RunRecord) -> str | None:
    digest, is_given = record.inputs_sha256.get("weights"), record.identity["model"] == CHECKPOINTS
    return f"{digest} {record.inputs_sha256.get('settings')}" if is_given and digest is not None else digest


def _accuracies(
    sources: Sequence[EvaluationInput], rows: pl.DataFrame, scorer: str, alpha: float
) -> list[pl.DataFrame]:
    """Return the rows of `artifacts.AccuracyTable` of each evaluation, one per noise level."""
    keys = [_FILE, "noise_level"]
    table = (
        rows.group_by(keys)
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
        .sort(keys)
    )
    effective = _effective_questions(rows, f"correct_{scorer}").to_numpy()
    low, high = proportion_confint(table["accuracy"].to_numpy() * effective, effective, alpha, method="wilson")
    of_files = pl.DataFrame(
        [source.identity | {_FILE: number} for number, source in enumerate(sources)],
        schema_overrides={"seed": pl.Int64, "step": pl.Int64, _FILE: pl.UInt32},
    )
    columns = [name for name in AccuracyTable.to_schema().columns if name != "noise"]
    bounds = (pl.Series("ci_low", np.clip(low, 0, 1)), pl.Series("ci_high", np.clip(high, 0, 1)))
    found = of_files.join(table.with_columns(bounds), on=_FILE, maintain_order="right").select(_FILE, *columns)
    parts = found.partition_by(_FILE, as_dict=True, include_key=False, maintain_order=True)
    return [parts.get((number,), found.clear().drop(_FILE)) for number in range(len(sources))]


def _effective_questions(rows: pl.DataFrame, correct: str) -> pl.Series:
    """Return, per table and noise level, how many questions with one answer each would have an accuracy as exact.

    Several answers to a question, of noise draws or samples, have a mean that varies less than one yes or no.
    """
    keys = [name for name in (_FILE, "noise_level") if name in rows.columns]
    if "cluster" in rows.columns:
        return _effective_of_clusters(rows, correct, keys)
    of_questions = rows.group_by(*keys, "question_id").agg(pl.col(correct).mean().alias("mean"), pl.len())
    mean, number, answers = pl.col("mean").mean(), pl.len(), pl.col("len").sum()
    # A mean of yes or no has the variance mean * (1 - mean); if no question varies, all answers count.
    as_one = (number * mean * (1 - mean) / pl.col("mean").var(ddof=0)).fill_nan(number)
    found = of_questions.sort(*keys, "question_id").group_by(keys, maintain_order=True).agg(
        pl.min_horizontal(as_one, answers).round(_DIGITS).alias("questions")
    )  # fmt: skip
    return found["questions"]


def _effective_of_clusters(rows: pl.DataFrame, correct: str, keys: Sequence[str]) -> pl.Series:
    """Return the same where questions are in clusters, from the variance between clusters."""
    of_questions = rows.group_by(*keys, "question_id", "cluster").agg(pl.col(correct).mean(), pl.len())
    found = []
    for _, part in of_questions.sort(*keys, "question_id").group_by(keys, maintain_order=True):
        means, clusters = part[correct].to_numpy(), Clusters.of(part["cluster"].to_list())
        variance = float(clusters.collapsed(means).var(ddof=1)) / clusters.number if clusters.number > 1 else 0.0
        of_answers, most = float(means.mean() * (1 - means.mean())), int(part["len"].sum())
        # Clusters that happen to vary less than single answers would are not worth more than all answers.
        found.append(min(of_answers / variance if variance > 0 else most, most))
    return pl.Series(found, dtype=pl.Float64).round(_DIGITS)


OF_ROLLOUTS = "training: rollouts"
"""Setting that the model before training does not have."""

OF_THE_TOKENIZER = "facts."
"""Prefix of settings that models with different tokenizers cannot have alike: token ids of prompts, end tokens."""


def differing_settings(first: LoadedEvaluation, second: LoadedEvaluation) -> list[str]:
    """Return the keys of the settings in which two evaluations differ, sorted."""
    if first.setting == second.setting:
        return []
    keys = sorted({*first.setting, *second.setting})
    return [key for key in keys if first.setting.get(key) != second.setting.get(key)]


def setting_difference(first: LoadedEvaluation, second: LoadedEvaluation, *, of_tokenizers: bool = True) -> str | None:
    """Return the first difference between the settings of two evaluations, in words; None if there is none.

    `of_tokenizers`: count what follows from different tokenizers.
    """
    for key in differing_settings(first, second):
        if key.startswith(OF_THE_TOKENIZER) and not of_tokenizers:
            continue
        if key == OF_ROLLOUTS and not (key in first.setting and key in second.setting):
            continue
        ours, theirs = first.setting.get(key, "absent"), second.setting.get(key, "absent")
        return f"{key} is {ours} for {first.source.name} and {theirs} for {second.source.name}"
    return None


def _read_tables(paths: Sequence[Path]) -> list[tuple[pl.DataFrame, list[str]]]:
    """Return tables with their problems; DataError where one is malformed."""
    tables = [read_unchecked_table(path) for path in paths]
    try:
        validate_tables(dict(zip(paths, tables, strict=True)), EvaluationTable)
    except DataError:
        return [_read_rows(path) for path in paths]
    return [(table, []) for table in tables]


def _read_rows(path: Path) -> tuple[pl.DataFrame, list[str]]:
    try:
        return read_table(path, EvaluationTable), []
    except DataError as error:
        cause = error.__cause__
        if not isinstance(cause, pa.errors.SchemaError) or cause.reason_code != pa.errors.SchemaErrorReason.DUPLICATES:
            raise
    rows = read_unchecked_table(path)
    unique = rows.unique(ROW_KEYS, keep="first", maintain_order=True)
    return unique, [f"{len(rows) - len(unique)} rows repeat a question within an evaluation"]


def _with_batches_as_clusters(path: Path, rows: pl.DataFrame) -> pl.DataFrame:
    if "batch" not in rows.columns or rows["batch"].null_count() or "cluster" in rows.columns:
        raise DataError(
            f"{path}: statistics.unit is batch, expected questions without clusters whose batches are known: not of "
            "vLLM, of lm-evaluation-harness or of an earlier version"
        )
    return rows.rename({"batch": "cluster"}).cast({"cluster": pl.String})


def _levels(rows: pl.DataFrame, scorer: str, num_tables: int) -> list[dict[float, LevelScores]]:
    """Split the rows of each table by noise level.

    A level is left empty if its passes have different questions, or if its questions have different samples. The
    problems of the evaluation name such levels.
    """
    answers = (
        rows.group_by(_FILE, *PASS_KEYS)
        .agg(
            pl.len().alias("samples"),
            pl.col("sample").hash(seed=0).bitwise_xor().alias("sample_digest"),
            pl.col(f"correct_{scorer}").mean().alias("correct"),
            *(pl.col(name).first() for name in ("cluster", "batch") if name in rows.columns),
        )
        .sort(_FILE, "noise_level", "noise_seed", "question_id")
        .with_columns(pl.col("question_id").cast(pl.Categorical).to_physical().alias("code"))
    )
    twins = _identical_levels(rows)
    names: dict[bytes, tuple[str, ...]] = {}
    levels: list[dict[float, LevelScores]] = [{} for _ in range(num_tables)]
    for (file, level), part in answers.group_by(_FILE, "noise_level", maintain_order=True):
        levels[int(file)][float(level)] = _level_scores(part, names, twins.get((file, level)))
    return levels


def _level_scores(answers: pl.DataFrame, names: dict[bytes, tuple[str, ...]], twin: float | None) -> LevelScores:
    """Return the scores of a level from its answers, sorted by noise seed and question.

    names: ids of questions by their codes, so that levels of equal questions share them.
    """
    seeds, counts = np.unique(answers["noise_seed"].to_numpy(), return_counts=True)
    number, codes = int(counts[0]), answers["code"].to_numpy()
    samples, digests = answers["samples"].to_numpy(), answers["sample_digest"].to_numpy()
    whole = (counts == number).all() and (samples == samples[0]).all() and (digests == digests[0]).all()
    whole = bool(whole and (codes.reshape(-1, number) == codes[:number]).all())
    key = codes[:number].tobytes()
    if whole and key not in names:
        names[key] = tuple(answers["question_id"][:number].to_list())
    has_clusters = whole and "cluster" in answers.columns
    has_batches = whole and "batch" in answers.columns and answers["batch"].null_count() == 0
    return LevelScores(
        question_ids=names[key] if whole else (),
        noise_seeds=tuple(seeds.tolist()),
        num_samples=int(samples[0]),
        correct=(answers["correct"].to_numpy() if whole else np.empty(0)).reshape(len(seeds), -1),
        same_responses_as=twin,
        clusters=Clusters.of(answers["cluster"][:number].to_list()) if has_clusters else None,
        batches=_batches(answers["batch"][:number].to_numpy().tobytes()) if has_batches else None,
    )


@lru_cache(maxsize=64)
def _batches(numbers: bytes) -> Batches:
    """Return the batches of questions, which the levels and runs of a study share."""
    return Batches(np.frombuffer(numbers, dtype=np.int64))


def _identical_levels(rows: pl.DataFrame) -> dict[tuple[Any, Any], float]:
    """Return, by table and level, the lowest level with the same responses in all passes; itself is none."""
    digest, level = pl.col("digest"), pl.col("noise_level")
    twins = (
        rows.group_by(_FILE, "noise_level", "noise_seed")
        .agg(pl.struct("question_id", "sample", "response").hash(seed=0).bitwise_xor().alias("digest"))
        .group_by(_FILE, "noise_level")
        .agg(digest.first(), digest.n_unique().alias("num_digests"))
        .filter(pl.col("num_digests") == 1)
        .select(_FILE, level, level.min().over(_FILE, "digest").alias("twin"))
        .filter(pl.col("twin") < level)
    )
    return {(file, noise_level): twin for file, noise_level, twin in twins.iter_rows()}


def _question_problems(levels: Mapping[float, LevelScores]) -> list[str]:
    problems = [
        f"noise level {level:g}: questions differ by noise seed" for level in levels if not levels[level].question_ids
    ]
    if len({scores.question_ids for scores in levels.values()}) > 1 and not problems:
        problems.append("noise levels hold different questions")
    if any(scores.clusters is not None and scores.clusters.number < 2 for scores in levels.values()):
        problems.append("all questions are in one cluster, so there is nothing to compare over")
    return problems


def _pass_problems(levels: Mapping[float, LevelScores], receipts: EvaluationReceipts) -> list[str]:
    in_table = {(level, seed) for level, scores in levels.items() for seed in scores.noise_seeds}
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
