"""Adapter: rule loss_study."""

from pathlib import Path

from aqnpipe.config.run import LossStudySpec
from aqnpipe.runtime.jobs import logged_device_job

spec = LossStudySpec.model_validate(snakemake.params.spec)
with logged_device_job(Path(snakemake.log[0]), spec.device, snakemake.resources.get("devices", 0)) as say:
    from aqnpipe.artifacts.runs import StageFiles
    from aqnpipe.loss_study.stage import loss_study

    loss_study(
        spec,
        Path(snakemake.input.model).parent,
        Path(snakemake.input.test_problems),
        StageFiles(
            table=Path(snakemake.output.table),
            receipt=Path(snakemake.output.receipt),
            record=Path(snakemake.output.record),
        ),
        say,
        *map(Path, snakemake.input.train_problems),
    )
