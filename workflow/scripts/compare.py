"""Adapter: rule compare."""

from pathlib import Path

from aqnpipe.comparison.look_states import read_looks
from aqnpipe.comparison.stage import compare, existing_evaluations
from aqnpipe.config.plan import plan_of
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])):
    plan = plan_of(snakemake.params.study)
    looks = read_looks(plan.results, len(snakemake.input.looks))
    results = Path(plan.results)
    compare(plan.study, existing_evaluations(plan), results, looks, results / "data" / "test.parquet")
