"""What the report is made of: paths of artifacts, and the same artifacts read and validated."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from aqnpipe.artifacts import (
    AccuracyTable,
    ClaimsFile,
    ComparisonTable,
    LayerTable,
    RunRecord,
    SigmaFile,
    TrainingMetrics,
    Verdict,
    read_json,
    read_table,
    read_yaml,
)
from aqnpipe.noise.evaluation_receipt import EvaluationReceipts
from aqnpipe.noise.receipt import Receipt


@dataclass(frozen=True)
class RunInput:
    """Files of one training run."""

    model: str
    arm: str
    seed: int
    metrics: Path
    receipt: Path
    record: Path


@dataclass(frozen=True)
class EvaluationReceiptInput:
    """The receipts of one evaluated checkpoint."""

    model: str
    arm: str
    seed: int
    step: int
    receipt: Path


@dataclass(frozen=True)
class DiagnosisInput:
    """Files of the diagnosis of one model on one machine."""

    model: str
    machine: str
    layers: Path
    verdict: Path
    sigmas: Path


@dataclass(frozen=True)
class ReportInputs:
    """Every artifact that the report shows."""

    accuracy: Path
    comparisons: Path
    claims: Path
    runs: tuple[RunInput, ...]
    evaluation_receipts: tuple[EvaluationReceiptInput, ...]
    diagnoses: tuple[DiagnosisInput, ...]


@dataclass(frozen=True)
class Run:
    """One training run, read."""

    model: str
    arm: str
    seed: int
    metrics: pl.DataFrame
    receipt: Receipt
    record: RunRecord


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """The receipts of one evaluated checkpoint, read."""

    model: str
    arm: str
    seed: int
    step: int
    receipts: EvaluationReceipts


@dataclass(frozen=True)
class Diagnosis:
    """One model on one machine, read."""

    model: str
    machine: str
    layers: pl.DataFrame
    verdict: Verdict
    sigmas: SigmaFile


@dataclass(frozen=True)
class ReportData:
    """Every artifact that the report shows, read and validated."""

    accuracy: pl.DataFrame
    comparisons: pl.DataFrame
    claims: ClaimsFile
    runs: tuple[Run, ...]
    evaluations: tuple[EvaluatedCheckpoint, ...]
    diagnoses: tuple[Diagnosis, ...]


def read_inputs(inputs: ReportInputs) -> ReportData:
    """Read and validate all artifacts; DataError names the first file that is missing or malformed."""
    return ReportData(
        accuracy=read_table(inputs.accuracy, AccuracyTable),
        comparisons=read_table(inputs.comparisons, ComparisonTable),
        claims=read_json(inputs.claims, ClaimsFile),
        runs=tuple(_read_run(run) for run in inputs.runs),
        evaluations=tuple(
            EvaluatedCheckpoint(one.model, one.arm, one.seed, one.step, read_json(one.receipt, EvaluationReceipts))
            for one in inputs.evaluation_receipts
        ),
        diagnoses=tuple(_read_diagnosis(one) for one in inputs.diagnoses),
    )


def _read_run(run: RunInput) -> Run:
    return Run(
        model=run.model,
        arm=run.arm,
        seed=run.seed,
        metrics=read_table(run.metrics, TrainingMetrics),
        receipt=read_json(run.receipt, Receipt),
        record=read_json(run.record, RunRecord),
    )


def _read_diagnosis(one: DiagnosisInput) -> Diagnosis:
    return Diagnosis(
        model=one.model,
        machine=one.machine,
        layers=read_table(one.layers, LayerTable),
        verdict=read_json(one.verdict, Verdict),
        sigmas=read_yaml(one.sigmas, SigmaFile),
    )
