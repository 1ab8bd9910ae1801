"""Adapter: rule evaluate."""

from pathlib import Path

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.runtime.jobs import logged_device_job

table = Path(snakemake.output.table)
spec = EvaluationSpec.model_validate(snakemake.params.spec)
leases, workers = snakemake.resources.get("devices", 0), int(snakemake.resources.get("workers", 1))
devices = workers * spec.generation.tensor_parallel
with logged_device_job(Path(snakemake.log[0]), spec.device, leases, devices, "evaluation or prompt") as say:
    from aqnpipe.artifacts.runs import StageFiles
    from aqnpipe.evaluation.stage import evaluate
    from aqnpipe.runtime.evaluation_workers import evaluation_runner

    evaluate(
        spec,
        Path(snakemake.input.model).parent,
        Path(snakemake.input.test_problems),
        StageFiles(
            table=table,
            receipt=Path(snakemake.output.receipt),
            record=Path(snakemake.output.record),
        ),
        say,
        *map(Path, snakemake.input.train_problems),
        open_runner=evaluation_runner(workers, table.with_suffix(".workers"), say),
    )
