"""Adapter: rule check_published."""

from pathlib import Path

from aqnpipe.artifacts.files import write_json
from aqnpipe.errors import ConfigError
from aqnpipe.published.check import check_published_file
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0]), settings="statistics.published"):
    if not snakemake.input:
        raise ConfigError("statistics.published: the study names no published figures, expected a file of them")
    write_json(Path(snakemake.output[0]), check_published_file(Path(snakemake.input[0])))
