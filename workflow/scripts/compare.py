"""Adapter: rule compare."""

from pathlib import Path

from aqnpipe.config.plan import plan_of
from aqnpipe.job import logged_job
from aqnpipe.statistics.stage import ComparisonOutputs, EvaluationInput, compare

with logged_job(Path(snakemake.log[0])):
    plan = plan_of(snakemake.params.study)
    files = zip(
        plan.evaluations(),
        snakemake.input.evaluations,
        snakemake.input.receipts,
        snakemake.input.records,
        strict=True,
    )
    compare(
        plan.study,
        [
            EvaluationInput(
                model=model,
                arm=arm,
                seed=seed,
                step=step,
                table=Path(table),
                receipt=Path(receipt),
                record=Path(record),
            )
            for (model, arm, seed, step), table, receipt, record in files
        ],
        ComparisonOutputs(
            accuracy=Path(snakemake.output.accuracy),
            comparisons=Path(snakemake.output.comparisons),
            claims=Path(snakemake.output.claims),
        ),
    )
