"""Adapter: rule audit."""

from pathlib import Path

from aqnpipe.artifacts.files import write_json
from aqnpipe.published.check import audit_file
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])):
    write_json(Path(snakemake.output[0]), audit_file(Path(snakemake.input[0])))
