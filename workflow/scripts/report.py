"""Adapter: rule report."""

from pathlib import Path

from aqnpipe.config.plan import plan_of
from aqnpipe.report.inputs import read_study
from aqnpipe.report.stage import build_report
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])) as say:
    plan = plan_of(snakemake.params.study)
    build_report(plan.study, read_study(plan), Path(plan.results))
    say(f"report: {snakemake.output.html}")
