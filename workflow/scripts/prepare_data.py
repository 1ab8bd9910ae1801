"""Adapter: rule prepare_data."""

from pathlib import Path

from aqnpipe.data.stage import prepare_data
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0]), settings="dataset"):
    prepare_data(snakemake.params.dataset, snakemake.wildcards.split, Path(snakemake.output[0]))
