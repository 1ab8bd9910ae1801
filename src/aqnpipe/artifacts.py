"""What the stages hand each other: table schemas, JSON models, and writes that never leave half a file."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import pandera.polars as pa
import polars as pl
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.errors import DataError

Model = TypeVar("Model", bound=BaseModel)


class Artifact(BaseModel):
    """Base of JSON artifacts: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ProblemTable(pa.DataFrameModel):
    """results/data/<split>.parquet: one question per row."""

    question_id: str = pa.Field(unique=True)
    question: str
    answer: str
    gold_answer: str

    class Config:
        """Columns as declared, in this order, nothing else."""

        strict = True


class LayerTable(pa.DataFrameModel):
    """results/srdd/<model>/<machine>/layers.parquet: one decoder layer per row, each layer run alone.

    instability: mean over prompts of std(out_i - out_0), absolute. gain: std(output change)/std(input noise).
    kurtosis: Fisher kurtosis of the flattened output. z columns are robust z-scores (null where undefined).
    changed_share: share of values that differ between repeats, among channels where any does (0 if none).
    zero_share: share of values that are exactly 0. values_at_maximum: values per call that are exactly as large as the
    largest (1 is healthy). role: source is a layer proven to clamp, sat_prop a layer downstream with lowered kurtosis.
    """

    layer: int = pa.Field(ge=0, unique=True)
    instability: float = pa.Field(ge=0)
    instability_jump_z: float = pa.Field(nullable=True)
    gain: float = pa.Field(ge=0)
    gain_z: float
    kurtosis: float
    log_kurtosis_drop_z: float = pa.Field(nullable=True)
    changed_share: float = pa.Field(ge=0, le=1)
    zero_share: float = pa.Field(ge=0, le=1)
    values_at_maximum: float = pa.Field(ge=1)
    role: str = pa.Field(isin=["healthy", "source", "sat_prop"])

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class Finding(Artifact):
    """One scan's opinion: which layer, and how far beyond its threshold.

    ambient, gain and kurtosis are the published scans; repeat, zeros and clamp count exact traces, which decide.
    """

    scan: Literal["ambient", "gain", "kurtosis", "repeat", "zeros", "clamp"]
    layer: int
    type: Literal["noise_or_spike", "noise", "spike", "dead_zone", "saturation"]
    z: float


class Verdict(Artifact):
    """results/srdd/<model>/<machine>/verdict.json: what the scans found.

    `verdict` is abstain when scans contradict each other or the model has too few layers for robust statistics.
    """

    verdict: Literal["healthy", "fault", "abstain"]
    reason: str
    layer: int | None
    type: str | None
    findings: tuple[Finding, ...]
    forward_equivalents: float = Field(ge=0, description="cost in whole-model forwards")
    num_layers: int
    simulated_fault: dict[str, object] | None = Field(description="the fault of the machine, for judging the verdict")


class AqnSection(Artifact):
    """The `aqn` part of sigmas.yaml (keys as published)."""

    enabled: bool
    layer_specific: bool
    base_sigma: float = Field(gt=0)
    layer_sigmas: dict[int, float]
    schedule: str
    high_priority_layers: list[int]


class SigmaFile(Artifact):
    """results/srdd/<model>/<machine>/sigmas.yaml: per-layer sigma, why, and from which diagnosis."""

    aqn: AqnSection
    reasons: dict[int, str]
    srdd_metadata: dict[str, int | float | str]


class TrainingMetrics(pa.DataFrameModel):
    """metrics.parquet of a run: one optimiser step per row. No wall times: the table is reproducible byte for byte."""

    step: int = pa.Field(ge=1, unique=True)
    epoch: float
    reward_mean: float = pa.Field(ge=0, le=1)
    reward_std: float
    kl: float = pa.Field(nullable=True)
    entropy: float
    loss: float
    grad_norm: float
    clip_fraction: float
    response_tokens_mean: float
    truncated_fraction: float = pa.Field(ge=0, le=1)
    sigma_asked: float = pa.Field(ge=0)
    sigma_measured: float = pa.Field(ge=0)
    validation_accuracy: float = pa.Field(nullable=True)

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class EvaluationTable(pa.DataFrameModel):
    """results/eval/.../step<N>.parquet: a row per question, noise level and noise seed."""

    question_id: str
    noise_level: float = pa.Field(ge=0, lt=1)
    noise_seed: int = pa.Field(ge=0)
    response: str
    answer_strict: str = pa.Field(nullable=True)
    answer_last_number: str = pa.Field(nullable=True)
    correct_strict: bool
    correct_last_number: bool
    response_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])

    class Config:
        """Columns as declared, one row per question and pass."""

        strict = True
        unique = ["question_id", "noise_level", "noise_seed"]  # noqa: RUF012 - pandera's own form


class AccuracyTable(pa.DataFrameModel):
    """results/accuracy.parquet: one checkpoint at one noise level per row; fractions, averaged over noise seeds.

    `ci_low` and `ci_high`: Wilson interval over the questions for the study's primary scorer, without the luck of
    training. `parse_failure_fraction`: responses in which the primary scorer found no answer.
    """

    model: str
    arm: str
    seed: int = pa.Field(ge=0)
    step: int = pa.Field(ge=0)
    noise_level: float = pa.Field(ge=0, lt=1)
    num_questions: int = pa.Field(ge=1)
    num_noise_seeds: int = pa.Field(ge=1)
    accuracy: float = pa.Field(ge=0, le=1)
    accuracy_strict: float = pa.Field(ge=0, le=1)
    accuracy_last_number: float = pa.Field(ge=0, le=1)
    ci_low: float = pa.Field(ge=0, le=1)
    ci_high: float = pa.Field(ge=0, le=1)
    truncated_fraction: float = pa.Field(ge=0, le=1)
    parse_failure_fraction: float = pa.Field(ge=0, le=1)

    class Config:
        """Columns as declared, one row per checkpoint and level."""

        strict = True
        unique = ["model", "arm", "seed", "step", "noise_level"]  # noqa: RUF012 - pandera's own form


class ComparisonTable(pa.DataFrameModel):
    """results/comparisons.parquet: one declared comparison per row; accuracies and differences as fractions.

    `p_holm` is adjusted over all valid comparisons of the study. The minimum detectable difference is at the study's
    power and the strictest level of the family (alpha divided by its size).
    """

    comparison_id: str = pa.Field(unique=True)
    kind: str = pa.Field(isin=["arms", "levels"])
    model: str
    treatment: str
    control: str
    treatment_level: float
    control_level: float
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    treatment_accuracy: float = pa.Field(nullable=True)
    control_accuracy: float = pa.Field(nullable=True)
    difference: float = pa.Field(nullable=True)
    ci_low: float = pa.Field(nullable=True)
    ci_high: float = pa.Field(nullable=True)
    standard_error: float = pa.Field(nullable=True)
    degrees_of_freedom: float = pa.Field(nullable=True)
    p_value: float = pa.Field(nullable=True)
    p_holm: float = pa.Field(nullable=True)
    minimum_detectable_difference: float = pa.Field(nullable=True)
    method: str
    verdict: str = pa.Field(isin=["supported", "refuted", "not_shown", "invalid"])

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class SeedComparison(Artifact):
    """The paired 2x2 table of one seed: question counts by (treatment correct, control correct).

    At noisy levels of the first noise seed alone, so that each question counts once.
    """

    seed: int
    noise_seed: int
    both_correct: int
    only_treatment: int
    only_control: int
    neither: int
    difference: float
    ci_low: float
    ci_high: float
    mcnemar_p: float


class Claim(Artifact):
    """One declared claim with its verdict; `sentence` is generated from the numbers, never typed."""

    comparison_id: str
    claim: str
    verdict: Literal["supported", "refuted", "not_shown", "invalid"]
    sentence: str
    seeds: tuple[SeedComparison, ...]
    invalid_reason: str | None = None


class ClaimsFile(Artifact):
    """results/claims.json."""

    alpha: float
    family_size: int
    claims: tuple[Claim, ...]


class RunRecord(Artifact):
    """run.json: what produced a training run or evaluation."""

    stage: str
    identity: dict[str, str | int]
    config: dict[str, object]
    code_digest: str
    inputs_sha256: dict[str, str]
    versions: dict[str, str]
    device: str


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it there on success, remove it on any exception.

    The body may create a file or a folder at the yielded path. An existing target is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    temporary = staging / target.name
    try:
        yield temporary
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write `text` to `target` atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as indented JSON, atomically."""
    write_text(target, model.model_dump_json(indent=2) + "\n")


def read_json(path: Path, model: type[Model]) -> Model:
    """Read and validate a JSON artifact; DataError naming the file and the first problem."""
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except ValidationError as error:
        raise DataError(f"{path}: {describe_validation_error(error)}") from error


def write_yaml(target: Path, model: BaseModel) -> None:
    """Write a pydantic model as YAML, atomically."""
    write_text(target, yaml.safe_dump(json.loads(model.model_dump_json()), sort_keys=False, allow_unicode=True))


def read_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML artifact; DataError naming the file and the first problem."""
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not valid YAML ({str(error).splitlines()[0]})") from error
    except ValidationError as error:
        raise DataError(f"{path}: {describe_validation_error(error)}") from error


def write_table(target: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> None:
    """Validate `table` against `schema` and write it as parquet, atomically."""
    validated = _validated(target, table, schema)
    with atomic_path(target) as temporary:
        validated.write_parquet(temporary, compression="zstd", statistics=True)


def read_table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    """Read a parquet artifact and validate it; DataError naming the file and the first problem."""
    try:
        table = pl.read_parquet(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except pl.exceptions.ComputeError as error:
        raise DataError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from error
    return _validated(path, table, schema)


def _validated(path: Path, table: pl.DataFrame, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
    try:
        return schema.validate(table)
    except pa.errors.SchemaError as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from error
