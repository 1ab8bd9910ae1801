"""Adapter: rule evaluate."""

from pathlib import Path

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.runtime.jobs import logged_device_job

spec = EvaluationSpec.model_validate(snakemake.params.spec)
with logged_device_job(Path(snakemake.log[0]), spec.device, snakemake.resources.get("devices", 0)) as say:
    from aqnpipe.evaluation.stage import EvaluationOutputs, evaluate

    evaluate(
        spec,
        Path(snakemake.input.model).parent,
        Path(snakemake.input.test_problems),
        EvaluationOutputs(
            table=Path(snakemake.output.table),
            receipt=Path(snakemake.output.receipt),
            record=Path(snakemake.output.record),
        ),
        say,
        *map(Path, snakemake.input.train_problems),
        workers=int(snakemake.resources.get("workers", 1)),
    )
