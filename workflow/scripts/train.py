"""Adapter: rule train."""

from pathlib import Path

from aqnpipe.config.run import TrainingSpec
from aqnpipe.job import logged_job
from aqnpipe.training.stage import TrainingInputs, train

with logged_job(Path(snakemake.log[0])) as say:
    train(
        TrainingSpec.model_validate(snakemake.params.spec),
        TrainingInputs(
            model=Path(snakemake.input.model).parent,
            train_problems=Path(snakemake.input.train_problems),
            test_problems=Path(snakemake.input.test_problems),
            sigmas=Path(snakemake.input.sigmas[0]) if snakemake.input.get("sigmas") else None,
        ),
        Path(snakemake.output.record).parent,
        say,
    )
