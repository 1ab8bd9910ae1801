"""Adapter: rule audit."""

from pathlib import Path

from aqnpipe.artifacts.files import write_json
from aqnpipe.job import logged_job
from aqnpipe.statistics.audit import audit_file

with logged_job(Path(snakemake.log[0])):
    write_json(Path(snakemake.output[0]), audit_file(Path(snakemake.input[0])))
