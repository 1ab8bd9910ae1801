"""Adapter: rule check_published."""

from pathlib import Path

from aqnpipe.artifacts.files import write_json
from aqnpipe.published.check import check_published_file
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0]), settings="statistics.published"):
    write_json(Path(snakemake.output[0]), check_published_file(Path(snakemake.input[0])))
