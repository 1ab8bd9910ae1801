"""Adapter: rule remove_weights."""

from pathlib import Path

from aqnpipe.comparison.retention import remove_weights
from aqnpipe.config.plan import plan_of
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])) as say:
    remove_weights(plan_of(snakemake.params.study), snakemake.params.keep, Path(snakemake.output[0]), say)
