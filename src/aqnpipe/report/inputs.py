"""Inputs of the report: the content of all artifacts of a study that exist, read and validated."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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
from aqnpipe.artifacts.loss_studies import LossStudyFile
from aqnpipe.artifacts.parities import ParityFile
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.artifacts.runs import (
    Cost,
    CustomRewardMetrics,
    RunRecord,
    TrainingMetrics,
    has_digest,
    read_cost,
    record_problems,
)
from aqnpipe.config.plan import StudyPlan, sigmas_name
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.receipt import EvaluationReceipts, Receipt

Content = TypeVar("Content")
Json = TypeVar("Json", bound=BaseModel)

_NO_CLAIMS = ClaimsFile(alpha=0.05, power=0.8, family_size=0, families=(), claims=())
_COMPARED: Mapping[str, type[pa.DataFrameModel]] = {
    "comparisons": ComparisonTable,
    "accuracy": AccuracyTable,
    "robustness": RobustnessTable,
    "differences": DifferenceTable,
}
"""The tables of the compare stage, by their names."""


@dataclass(frozen=True)
class Run:
    """The content of one training run, whose record is at `path`. `cost` is None if its job left no measurement."""

    path: Path
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

    source: EvaluationFiles
    receipts: EvaluationReceipts
    record: RunRecord
    cost: Cost | None

    @property
    def path(self) -> Path:
        """The path of the record."""
        return self.source.record

    def responses(self) -> pl.DataFrame:
        """Every response to every question; DataError for a malformed file."""
        return read_table(self.source.table, EvaluationTable)


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one model on one machine; sigmas by strategy, the published rule first."""

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
    """The parity of one model with a machine, or with what a file was measured on, as it was read from `path`."""

    model: str
    machine: str
    path: Path
    parity: ParityFile


@dataclass(frozen=True)
class ReportData:
    """Every artifact of the study of `plan` that exists, read and validated; what does not exist is empty.

    `missing`: the files that do not exist. `published` is None where the study names no published figures; `machines`
    is empty where it evaluates on no further ones.
    """

    plan: StudyPlan

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

    @cached_property
    def last(self) -> pl.DataFrame:
        """The accuracies of the last step of every run."""
        return self.accuracy.filter(pl.col("step") == pl.col("step").max().over("model", "arm", "seed"))

    @property
    def models(self) -> list[str]:
        """The models that there is anything to show of."""
        return sorted(
            {*self.accuracy["model"], *(run.model for run in self.runs), *(one.model for one in self.diagnoses)}
        )

    def of_model(self, model: str) -> "ReportData":
        """Return the data with the accuracies, runs and diagnoses of one model alone."""
        tables = {name: getattr(self, name) for name in ("accuracy", "robustness", "differences")}
        return replace(
            self,
            **{name: table.filter(pl.col("model") == model) for name, table in tables.items()},
            runs=tuple(one for one in self.runs if one.model == model),
            diagnoses=tuple(one for one in self.diagnoses if one.model == model),
        )


def read_study(plan: StudyPlan, root: Path = Path(), compared: Path | None = None) -> ReportData:
    """Read and validate every artifact that exists of a study that runs in the folder `root`.

    compared: folder of comparisons, with those of loss studies and the check of published figures; None: the results.
    DataError names the first artifact that is malformed, does not match its record or the claims, or is from another
    job.
    """
    missing: list[Path] = []
    results, config = root / plan.results, plan.study.config
    compared = results if compared is None else compared

    def are_there(*paths: Path) -> bool:
        absent = [path for path in paths if not path.exists()]
        missing.extend(absent)
        return not absent

    def table(path: Path, schema: type[pa.DataFrameModel]) -> pl.DataFrame:
        return read_table(path, schema) if are_there(path) else table_of([], schema)

    def json(path: Path, model: type[Json]) -> Json | None:
        return read_json(path, model) if are_there(path) else None

    def run(model: str, arm: str, seed: int) -> Run | None:
        folder = results / "runs" / model / arm / f"seed{seed}"
        metrics, receipt, record = (folder / name for name in ("metrics.parquet", "receipt.json", "run.json"))
        if not are_there(metrics, receipt, record):
            return None
        return Run(
            path=record,
            model=model,
            arm=arm,
            seed=seed,
            record=_own_record(record, {"model": model, "arm": arm, "seed": seed}, metrics, receipt),
            # Validated below, those of all runs together.
            metrics=read_unchecked_table(metrics),
            receipt=read_json(receipt, Receipt),
            cost=read_cost(results / "benchmarks" / "train" / f"{model}_{arm}_seed{seed}.tsv"),
        )

    def evaluated(*checkpoint: str | int) -> Evaluated | None:
        files = evaluation_files(results, *checkpoint)  # type: ignore[arg-type]
        if not are_there(files.table, files.receipt, files.record):
            return None
        name = f"{files.model}_{files.arm}_seed{files.seed}_step{files.step}.tsv"
        return Evaluated(
            source=files,
            record=_own_record(files.record, files.identity),
            receipts=read_json(files.receipt, EvaluationReceipts),
            cost=read_cost(results / "benchmarks" / "evaluate" / name),
        )

    def diagnosis(model: str, machine: str) -> Diagnosis | None:
        folder = results / "srdd" / model / machine
        layers, verdict = folder / "layers.parquet", folder / "verdict.json"
        sigmas = {strategy: folder / sigmas_name(strategy) for strategy in plan.strategies(model, machine)}
        if not are_there(layers, verdict, *sigmas.values()):
            return None
        return Diagnosis(
            model=model,
            machine=machine,
            layers=read_table(layers, LayerTable),
            verdict=_own_verdict(verdict, model, machine),
            strategies={name: read_yaml(file, SigmaFile) for name, file in sigmas.items()},
        )

    def loss_study(path: str) -> LossStudyFile | None:
        again = compared / Path(path).relative_to(plan.results)
        return json(again if again.exists() else root / path, LossStudyFile)

    def parity(model: str, machine: str, path: str) -> MeasuredMachine | None:
        found = json(root / path, ParityFile)
        return None if found is None else MeasuredMachine(model, machine, root / path, found)

    runs = _found(run(*names) for names in plan.runs())
    for schema in (TrainingMetrics, CustomRewardMetrics):
        validate_tables({one.path: one.metrics for one in runs if _schema_of(one.record) is schema}, schema)
    evaluations = _found(evaluated(*checkpoint) for checkpoint in plan.evaluations())
    diagnoses = _found(diagnosis(*names) for names in plan.diagnoses())
    loss_studies = _found(map(loss_study, plan.loss_study_files("claims.json")))
    parities = _found(parity(*names) for names in plan.all_parities())
    claims = json(compared / "claims.json", ClaimsFile) or _NO_CLAIMS
    return ReportData(
        plan=plan,
        runs=runs,
        evaluations=evaluations,
        diagnoses=diagnoses,
        loss_studies=loss_studies,
        parities=parities,
        claims=claims,
        **_compared_tables(compared, claims, table),
        published=json(compared / "published.json", PublishedCheck) if config.statistics.published else None,
        test_problems=table(results / "data" / "test.parquet", ProblemTable),
        machines=table(results / "machines.parquet", MachineDifferenceTable)
        if config.evaluation.machines
        else pl.DataFrame(),
        missing=tuple(missing),
    )


def _found(read: Iterable[Content | None]) -> tuple[Content, ...]:
    return tuple(one for one in read if one is not None)


def _compared_tables(
    folder: Path, claims: ClaimsFile, read: Callable[[Path, type[pa.DataFrameModel]], pl.DataFrame]
) -> dict[str, pl.DataFrame]:
    """Return the tables of comparisons; DataError for one that was not written with the claims."""
    files, path = {name: folder / f"{name}.parquet" for name in _COMPARED}, folder / "claims.json"
    for file in files.values():
        if file.name in claims.tables_sha256 and not has_digest(file, claims.tables_sha256[file.name]):
            raise DataError(f"{file}: not what was written with {path} (SHA-256 differs); compare again")
    found = {name: read(files[name], schema) for name, schema in _COMPARED.items()}
    verdicts = dict(found["comparisons"].select("comparison_id", "verdict").iter_rows())
    for claim in claims.claims:
        if verdicts.get(claim.comparison_id, claim.verdict) != claim.verdict:
            raise DataError(
                f"{path}: {claim.comparison_id} is {claim.verdict}, comparisons.parquet says "
                f"{verdicts[claim.comparison_id]}; compare again"
            )
    return found


def _schema_of(record: RunRecord) -> type[TrainingMetrics]:
    training = record.config.get("training")
    return CustomRewardMetrics if isinstance(training, dict) and training.get("rewards") else TrainingMetrics


def _own_record(path: Path, identity: Mapping[str, str | int], *outputs: Path) -> RunRecord:
    """Return a record; DataError if it has another identity, or if an output does not match its digest in it."""
    record = read_json(path, RunRecord)
    written = {output.name: output for output in outputs if output.name in record.outputs_sha256}
    for problem in record_problems(record, identity=identity, outputs=written):
        raise DataError(f"{path}: {problem}")
    return record


def _own_verdict(path: Path, model: str, machine: str) -> Verdict:
    """Return a verdict; DataError if it is that of another model or machine."""
    verdict = read_json(path, Verdict)
    origin = verdict.origin
    if origin is not None and (origin.model, origin.machine) != (model, machine):
        raise DataError(
            f"{path}: this is the diagnosis of model {origin.model} on machine {origin.machine}, expected model "
            f"{model} on machine {machine}"
        )
    return verdict
