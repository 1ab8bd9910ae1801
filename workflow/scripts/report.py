"""Adapter: rule report."""

from pathlib import Path

from aqnpipe.config.plan import plan_of
from aqnpipe.job import logged_job
from aqnpipe.report.inputs import DiagnosisInput, EvaluationReceiptInput, ReportInputs, RunInput
from aqnpipe.report.stage import build_report

with logged_job(Path(snakemake.log[0])) as say:
    plan = plan_of(snakemake.params.study)
    files = snakemake.input
    runs = zip(plan.runs(), files.metrics, files.receipts, files.records, strict=True)
    evaluations = zip(plan.evaluations(), files.evaluation_receipts, strict=True)
    diagnoses = zip(plan.diagnoses(), files.layers, files.verdicts, files.sigmas, strict=True)
    build_report(
        plan.study,
        ReportInputs(
            accuracy=Path(files.accuracy),
            comparisons=Path(files.comparisons),
            claims=Path(files.claims),
            runs=tuple(
                RunInput(model, arm, seed, Path(metrics), Path(receipt), Path(record))
                for (model, arm, seed), metrics, receipt, record in runs
            ),
            evaluation_receipts=tuple(
                EvaluationReceiptInput(model, arm, seed, step, Path(receipt))
                for (model, arm, seed, step), receipt in evaluations
            ),
            diagnoses=tuple(
                DiagnosisInput(model, machine, Path(layers), Path(verdict), Path(sigmas))
                for (model, machine), layers, verdict, sigmas in diagnoses
            ),
        ),
        Path(snakemake.output[0]),
    )
    say(f"report: {snakemake.output[0]}")
