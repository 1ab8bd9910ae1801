"""Adapter: rule compare_machines."""

from pathlib import Path

from aqnpipe.comparison.machines import compare_machines
from aqnpipe.config.plan import plan_of
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])):
    compare_machines(plan_of(snakemake.params.study), Path(snakemake.output.table))
