"""Inputs of the report: the paths of all artifacts, and the content of those that exist, read and validated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import pandera.polars as pa
import polars as pl
from pydantic import BaseModel

from aqnpipe.artifacts.comparisons import (
    AccuracyTable,
    ClaimsFile,
    ComparisonTable,
    DifferenceTable,
    MachineDifferenceTable,
    RobustnessTable,
)
from aqnpipe.artifacts.diagnoses import LayerTable, SigmaFile, Verdict
from aqnpipe.artifacts.evaluations import EvaluationFiles, EvaluationTable, evaluation_files
from aqnpipe.artifacts.files import read_json, read_table, read_unchecked_table, read_yaml, table_of, validate_tables
from aqnpipe.artifacts.job_costs import Cost, read_cost
from aqnpipe.artifacts.loss_studies import LossStudyFile
from aqnpipe.artifacts.parities import ParityFile
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.artifacts.runs import CustomRewardMetrics, RunRecord, TrainingMetrics, has_digest, record_problems
from aqnpipe.config.plan import StudyPlan, sigmas_name
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.evaluation_receipt import EvaluationReceipts
from aqnpipe.noise.receipts.receipt import Receipt

Content = TypeVar("Content")
Json = TypeVar("Json", bound=BaseModel)

_NO_CLAIMS = ClaimsFile(alpha=0.05, power=0.8, family_size=0, families=(), claims=())


@dataclass(frozen=True)
class RunInput:
    """Files of one training run."""

    model: str
    arm: str
    seed: int
    metrics: Path
    receipt: Path
    record: Path
    benchmark: Path


@dataclass(frozen=True)
class EvaluatedInput(EvaluationFiles):
    """Files of one evaluated checkpoint, and the benchmark file with the cost of its job."""

    benchmark: Path


@dataclass(frozen=True)
class DiagnosisInput:
    """Files of the diagnosis of one model on one machine; sigmas by strategy, the published rule first."""

    model: str
    machine: str
    layers: Path
    verdict: Path
    strategies: Mapping[str, Path]


@dataclass(frozen=True)
class ReportInputs:
    """Paths of all artifacts that the report shows; the report lists those that do not exist.

    `parities`: of a model with a machine of the study, or with what a file was measured on: model, machine and file.
    `compared` is the folder of what the compare stage writes. `published` is None where the study names no published
    figures, `machines` where it evaluates on no further ones.
    """

    compared: Path
    published: Path | None
    test_problems: Path
    runs: tuple[RunInput, ...]
    evaluations: tuple[EvaluatedInput, ...]
    diagnoses: tuple[DiagnosisInput, ...]
    loss_studies: tuple[Path, ...] = ()
    parities: tuple[tuple[str, str, Path], ...] = ()
    machines: Path | None = None

    @property
    def claims(self) -> Path:
        """The claims of the study."""
        return self.compared / "claims.json"


@dataclass(frozen=True)
class Run:
    """The content of one training run. `cost` is None if its job left no measurement."""

    source: RunInput
    model: str
    arm: str
    seed: int
    metrics: pl.DataFrame
    receipt: Receipt
    record: RunRecord
    cost: Cost | None


@dataclass(frozen=True)
class Evaluated:
    """The receipts and the record of one evaluated checkpoint; its table is read only when it is needed."""

    source: EvaluatedInput
    receipts: EvaluationReceipts
    record: RunRecord
    cost: Cost | None

    def responses(self) -> pl.DataFrame:
        """Every response to every question; DataError for a malformed file."""
        return read_table(self.source.table, EvaluationTable)


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one model on one machine."""

    model: str
    machine: str
    layers: pl.DataFrame
    verdict: Verdict
    strategies: Mapping[str, SigmaFile]

    @property
    def device(self) -> str | None:
        """The device that it ran on, if the machine names one; None: that of the study, or not known."""
        return None if self.verdict.origin is None else self.verdict.origin.device

    @property
    def sigmas(self) -> SigmaFile:
        """The sigmas of the published rule."""
        return self.strategies["published"]


@dataclass(frozen=True)
class MeasuredMachine:
    """The parity of one model with a machine, as it was read from `path`."""

    model: str
    machine: str
    path: Path
    parity: ParityFile


@dataclass(frozen=True)
class ReportData:
    """Every artifact that exists, read and validated; tables and claims that do not exist are empty.

    `inputs`: the files of a complete study. `missing` are those that do not exist.
    """

    inputs: ReportInputs

    accuracy: pl.DataFrame
    comparisons: pl.DataFrame
    robustness: pl.DataFrame
    differences: pl.DataFrame
    claims: ClaimsFile
    published: PublishedCheck | None
    test_problems: pl.DataFrame
    runs: tuple[Run, ...]
    evaluations: tuple[Evaluated, ...]
    diagnoses: tuple[Diagnosis, ...]
    missing: tuple[Path, ...]
    loss_studies: tuple[LossStudyFile, ...] = ()
    parities: tuple[MeasuredMachine, ...] = ()
    machines: pl.DataFrame = field(default_factory=pl.DataFrame)


def inputs_of(plan: StudyPlan, root: Path = Path()) -> ReportInputs:
    """Return the paths of every artifact of a study, below `root` (the folder that the study runs in)."""
    results = root / plan.results

    def run_input(model: str, arm: str, seed: int) -> RunInput:
        folder = results / "runs" / model / arm / f"seed{seed}"
        return RunInput(
            model=model,
            arm=arm,
            seed=seed,
            metrics=folder / "metrics.parquet",
            receipt=folder / "receipt.json",
            record=folder / "run.json",
            benchmark=results / "benchmarks" / "train" / f"{model}_{arm}_seed{seed}.tsv",
        )

    def evaluated_input(model: str, arm: str, seed: int, step: int) -> EvaluatedInput:
        files = evaluation_files(results, model, arm, seed, step)
        name = f"{model}_{arm}_seed{seed}_step{step}.tsv"
        return EvaluatedInput(**vars(files), benchmark=results / "benchmarks" / "evaluate" / name)

    def diagnosis_input(model: str, machine: str) -> DiagnosisInput:
        folder = results / "srdd" / model / machine
        strategies: dict[str, Path] = {
            strategy: folder / sigmas_name(strategy) for strategy in plan.strategies(model, machine)
        }
        return DiagnosisInput(model, machine, folder / "layers.parquet", folder / "verdict.json", strategies)

    return ReportInputs(
        compared=results,
        published=results / "published.json" if plan.study.config.statistics.published else None,
        test_problems=results / "data" / "test.parquet",
        runs=tuple(run_input(*run) for run in plan.runs()),
        evaluations=tuple(evaluated_input(*checkpoint) for checkpoint in plan.evaluations()),
        diagnoses=tuple(diagnosis_input(*names) for names in plan.diagnoses()),
        loss_studies=tuple(root / path for path in plan.loss_study_files("claims.json")),
        parities=tuple((model, machine, root / path) for model, machine, path in plan.all_parities()),
        machines=results / "machines.parquet" if plan.study.config.evaluation.machines else None,
    )


def read_inputs(inputs: ReportInputs) -> ReportData:
    """Read and validate every artifact that exists.

    DataError names the first one that is malformed, does not match its record or the claims, or is from another job.
    """
    missing: list[Path] = []

    def read(paths: Sequence[Path], reader: Callable[[], Content]) -> Content | None:
        absent = [path for path in paths if not path.exists()]
        missing.extend(absent)
        return None if absent else reader()

    def table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
        found = read([path], lambda: read_table(path, schema))
        return table_of([], schema) if found is None else found

    def json(path: Path, model: type[Json]) -> Json | None:
        return read([path], lambda: read_json(path, model))

    runs = _found(read([one.metrics, one.receipt, one.record], partial(_read_run, one)) for one in inputs.runs)
    for schema in (TrainingMetrics, CustomRewardMetrics):
        metrics = {run.source.metrics: run.metrics for run in runs if _schema_of(run.record) is schema}
        validate_tables(metrics, schema)
    evaluations = _found(
        read([one.table, one.receipt, one.record], partial(_read_evaluated, one)) for one in inputs.evaluations
    )
    diagnoses = _found(
        read([one.layers, one.verdict, *one.strategies.values()], partial(_read_diagnosis, one))
        for one in inputs.diagnoses
    )
    loss_studies = _found(json(path, LossStudyFile) for path in inputs.loss_studies)
    parities = [(source, json(source[-1], ParityFile)) for source in inputs.parities]
    claims = json(inputs.claims, ClaimsFile) or _NO_CLAIMS
    schemas = {
        "comparisons": ComparisonTable,
        "accuracy": AccuracyTable,
        "robustness": RobustnessTable,
        "differences": DifferenceTable,
    }
    files = {name: inputs.compared / f"{name}.parquet" for name in schemas}
    for path in files.values():
        if path.name in claims.tables_sha256 and not has_digest(path, claims.tables_sha256[path.name]):
            raise DataError(f"{path}: not what was written with {inputs.claims} (SHA-256 differs); compare again")
    compared = {name: table(files[name], schema) for name, schema in schemas.items()}
    _refuse_other_verdicts(inputs.claims, claims, compared["comparisons"])
    return ReportData(
        inputs=inputs,
        **compared,
        claims=claims,
        published=json(inputs.published, PublishedCheck) if inputs.published else None,
        test_problems=table(inputs.test_problems, ProblemTable),
        runs=runs,
        evaluations=evaluations,
        diagnoses=diagnoses,
        missing=tuple(missing),
        loss_studies=loss_studies,
        parities=tuple(MeasuredMachine(*source, parity) for source, parity in parities if parity),
        machines=pl.DataFrame() if inputs.machines is None else table(inputs.machines, MachineDifferenceTable),
    )


def _found(read: Iterable[Content | None]) -> tuple[Content, ...]:
    return tuple(one for one in read if one is not None)


def _refuse_other_verdicts(path: Path, claims: ClaimsFile, compared: pl.DataFrame) -> None:
    """Raise DataError if a claim has another verdict than its row of the comparisons."""
    verdicts = dict(compared.select("comparison_id", "verdict").iter_rows())
    for claim in claims.claims:
        if verdicts.get(claim.comparison_id, claim.verdict) != claim.verdict:
            raise DataError(
                f"{path}: {claim.comparison_id} is {claim.verdict}, comparisons.parquet says "
                f"{verdicts[claim.comparison_id]}; compare again"
            )


def _schema_of(record: RunRecord) -> type[TrainingMetrics]:
    training = record.config.get("training")
    return CustomRewardMetrics if isinstance(training, dict) and training.get("rewards") else TrainingMetrics


def _read_run(run: RunInput) -> Run:
    """Read the files of a run without validating its metrics: `read_inputs` validates those of all runs together."""
    identity: dict[str, str | int] = {"model": run.model, "arm": run.arm, "seed": run.seed}
    return Run(
        source=run,
        model=run.model,
        arm=run.arm,
        seed=run.seed,
        record=_own_record(run.record, identity, run.metrics, run.receipt),
        metrics=read_unchecked_table(run.metrics),
        receipt=read_json(run.receipt, Receipt),
        cost=read_cost(run.benchmark),
    )


def _own_record(path: Path, identity: Mapping[str, str | int], *outputs: Path) -> RunRecord:
    """Return a record; DataError if it has another identity, or if an output does not match its digest in it."""
    record = read_json(path, RunRecord)
    written = {output.name: output for output in outputs if output.name in record.outputs_sha256}
    for problem in record_problems(record, identity=identity, outputs=written):
        raise DataError(f"{path}: {problem}")
    return record


def _read_evaluated(files: EvaluatedInput) -> Evaluated:
    return Evaluated(
        source=files,
        record=_own_record(files.record, files.identity),
        receipts=read_json(files.receipt, EvaluationReceipts),
        cost=read_cost(files.benchmark),
    )


def _read_diagnosis(files: DiagnosisInput) -> Diagnosis:
    verdict = read_json(files.verdict, Verdict)
    origin = verdict.origin
    if origin is not None and (origin.model, origin.machine) != (files.model, files.machine):
        raise DataError(
            f"{files.verdict}: this is the diagnosis of model {origin.model} on machine {origin.machine}, "
            f"expected model {files.model} on machine {files.machine}"
        )
    return Diagnosis(
        model=files.model,
        machine=files.machine,
        layers=read_table(files.layers, LayerTable),
        verdict=verdict,
        strategies={name: read_yaml(path, SigmaFile) for name, path in files.strategies.items()},
    )
