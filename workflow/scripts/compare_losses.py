"""Adapter: rule compare_losses."""

from pathlib import Path

from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.loss_study.comparison import compare_losses
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])):
    compare_losses(
        StageFiles(Path(snakemake.input.table), Path(snakemake.input.receipt), Path(snakemake.input.record)),
        StatisticsConfig.model_validate(snakemake.params.settings),
        Path(snakemake.output[0]),
    )
