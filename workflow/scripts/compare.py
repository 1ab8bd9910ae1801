"""Adapter: rule compare."""

from pathlib import Path

from aqnpipe.config.plan import plan_of
from aqnpipe.job import logged_job
from aqnpipe.statistics.stage import ComparisonOutputs, compare, existing_evaluations

with logged_job(Path(snakemake.log[0])):
    plan = plan_of(snakemake.params.study)
    compare(plan.study, existing_evaluations(plan), ComparisonOutputs.in_folder(Path(plan.results)))
