"""Adapter: rule evaluate."""

from pathlib import Path

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.evaluation.stage import EvaluationOutputs, evaluate
from aqnpipe.job import logged_job

with logged_job(Path(snakemake.log[0])) as say:
    evaluate(
        EvaluationSpec.model_validate(snakemake.params.spec),
        Path(snakemake.input.model).parent,
        Path(snakemake.input.test_problems),
        EvaluationOutputs(
            table=Path(snakemake.output.table),
            receipt=Path(snakemake.output.receipt),
            record=Path(snakemake.output.record),
        ),
        say,
    )
