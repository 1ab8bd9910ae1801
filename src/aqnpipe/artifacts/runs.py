"""The metrics of a run, the record that every run, evaluation and loss study writes, removed weights, and costs.

Only this module compares the identity and the digests of a record with files. Of a checkpoint whose weights were
removed after its evaluation, configuration, tokenizer and record stay, and the record of the run keeps their digests.
"""

import csv
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandera.polars as pa
from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import Table, read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.training_facts import TrainingFacts
from aqnpipe.config.training import Keep
from aqnpipe.errors import DataError


@dataclass(frozen=True)
class StageFiles:
    """The files of an evaluation or a loss study: its table, the receipt of its noise, and the record of its job."""

    table: Path
    receipt: Path
    record: Path

    @property
    def exist(self) -> bool:
        """Return whether all three files exist."""
        return all(path.is_file() for path in (self.table, self.receipt, self.record))


class TrainingMetrics(Table, unique=("step",)):
    """metrics.parquet of a run: a row per optimiser step. It has no wall times, so it is reproducible byte for byte.

    `logp_difference_*` and `sampler_kl` compare the policy that generated the rollout with the policy being trained, on
    the sampled tokens, in the first step after the rollout. So do, for a mixture of experts, `router_agreement` (share
    of the choices of a token in a layer that are the same experts) and `tokens_routed_differently` (share of the tokens
    that have other experts in any layer), on all tokens that the sampler read; null if it noted no experts.
    `importance_ratio_mean` is null without importance sampling.
    """

    step: int = pa.Field(ge=1)
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
    logp_difference_mean: float = pa.Field(ge=0)
    logp_difference_max: float = pa.Field(ge=0)
    sampler_kl: float = pa.Field(ge=0)
    importance_ratio_mean: float = pa.Field(ge=0, nullable=True)
    router_agreement: float = pa.Field(ge=0, le=1, nullable=True)
    tokens_routed_differently: float = pa.Field(ge=0, le=1, nullable=True)
    sigma_requested: float = pa.Field(ge=0)
    sigma_measured: float = pa.Field(ge=0)
    validation_accuracy: float = pa.Field(nullable=True)


class CustomRewardMetrics(TrainingMetrics, unique=("step",)):
    """metrics.parquet of a run with `training.rewards`, whose sum may be any finite number."""

    reward_mean: float = pa.Field(ge=-sys.float_info.max, le=sys.float_info.max)


class RunRecord(Artifact):
    """run.json: what produced a training run, an evaluation or a loss study."""

    stage: str
    identity: dict[str, str | int]
    config: dict[str, object]
    code_digest: str
    inputs_sha256: dict[str, str]
    versions: dict[str, str]
    device: str
    outputs_sha256: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of the files written beside this record, by name"""
    generation: dict[str, str | int | bool] = Field(default_factory=dict)
    """generation backend of the evaluation or of the rollouts: name, version and how it executes"""
    training: TrainingFacts | None = None  # what a training run really used
    merge_losses: dict[str, float] = Field(default_factory=dict)
    """with adapters: the fraction of their update that rounding would lose if they were merged into weights of the
    model's dtype, by checkpoint"""


def record_problems(
    record: RunRecord,
    *,
    identity: Mapping[str, str | int] | None = None,
    outputs: Mapping[str, Path] | None = None,
    inputs: Mapping[str, Path] | None = None,
) -> list[str]:
    """Return the mismatches between `record` and the files on the disk; an empty list if there are none.

    `identity`: the identity that the record must have. `outputs` and `inputs`: files by the names that the record uses;
    a missing file is a mismatch.
    """
    problems = [
        f"the record says {key} {record.identity.get(key, 'nothing')}, expected {value}"
        for key, value in (identity or {}).items()
        if record.identity.get(key) != value
    ]
    problems += [
        f"{path.name} is not what the stage of the record wrote (SHA-256 differs): edited, or from another job"
        for name, path in (outputs or {}).items()
        if not has_digest(path, record.outputs_sha256.get(name))
    ]
    problems += [
        f"made from another {name} than the study has now ({path.name}, SHA-256 differs)"
        for name, path in (inputs or {}).items()
        if not has_digest(path, record.inputs_sha256.get(name))
    ]
    return problems


def has_digest(path: Path, digest: str | None) -> bool:
    """Return whether there is a file at `path` whose SHA-256 is `digest`."""
    return digest is not None and path.is_file() and sha256_of_file(path) == digest


def first_difference(found: object, expected: object, where: str = "") -> str | None:
    """Return the first key at which two configurations (plain data) differ, with both values; None if equal."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in sorted({*found, *expected}):
            place = f"{where}.{key}" if where else str(key)
            difference = first_difference(found.get(key), expected.get(key), place)
            if difference:
                return difference
        return None
    return None if found == expected else f"{where} {found!r}, the study requests {expected!r}"


REMOVED_WEIGHTS_FILE = "removed_weights.json"


class RemovedWeights(Artifact):
    """removed_weights.json in the folder of a checkpoint, written before its weights are removed.

    `files_sha256`: digests of the removed files, by name. `untrained`: whether every weight was still that of the model
    before training; comparisons need it where several checkpoints have equal weights.
    """

    keep: Keep
    files_sha256: dict[str, str]
    untrained: bool


class RetainedRun(Artifact):
    """weights.json of a run: the steps whose weights are kept or removed, and why all are kept if they are."""

    keep: Keep
    kept_steps: tuple[int, ...]
    removed_steps: tuple[int, ...]
    kept_because: str | None = None


def read_removed(checkpoint: Path) -> RemovedWeights | None:
    """Return the record of the removed weights of a checkpoint; None if none were removed. DataError if damaged."""
    path = checkpoint / REMOVED_WEIGHTS_FILE
    return read_json(path, RemovedWeights) if path.is_file() else None


def why_weights_are_gone(checkpoint: Path) -> str | None:
    """Return why a checkpoint has no weights and how to get them again; None if it has weights or never had any."""
    if any(checkpoint.glob("*.safetensors")):
        return None
    removed = read_removed(checkpoint)
    if removed is None:
        return None
    return (
        f"{checkpoint}: its weights were removed after their evaluation (keep: {removed.keep}); to get them again, "
        f"remove {checkpoint.parent.parent} and run the study, which trains this run again (with keep: all they stay)"
    )


@dataclass(frozen=True)
class Cost:
    """Cost of one job: wall seconds, processor seconds and peak resident memory in MB."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def read_cost(path: Path) -> Cost | None:
    """Read the file of `runtime.jobs.measured_costs`; None if there is no file. DataError if malformed."""
    if not path.exists():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        return Cost(*(float(rows[-1][column]) for column in ("s", "cpu_time", "max_rss")))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: expected columns s, cpu_time and max_rss with numbers") from error
