"""Adapter: rule evaluate_run."""

from pathlib import Path

from aqnpipe.config.run import EvaluationSpec
from aqnpipe.runtime.jobs import logged_device_job

log, run = Path(snakemake.log[0]), Path(snakemake.input.trained).parent
specs = [EvaluationSpec.model_validate(spec) for spec in snakemake.params.specs]
leases, workers = snakemake.resources.get("devices", 0), int(snakemake.resources.get("workers", 1))
devices = workers * specs[0].generation.tensor_parallel
with logged_device_job(log, specs[0].device, leases, devices, "evaluation or prompt") as say:
    from aqnpipe.artifacts.runs import StageFiles
    from aqnpipe.runtime.evaluation_workers import EvaluatedCheckpoint, evaluate_run

    files = zip(snakemake.output.tables, snakemake.output.receipts, snakemake.output.records, strict=True)
    evaluate_run(
        [
            EvaluatedCheckpoint(spec, run / "checkpoints" / f"step{spec.step}", StageFiles(*map(Path, paths)))
            for spec, paths in zip(specs, files, strict=True)
        ],
        Path(snakemake.input.test_problems),
        log.parents[2] / "scratch" / f"evaluate_{log.stem}",
        workers,
        say,
        *map(Path, snakemake.input.train_problems),
    )
