"""Adapter: rule prepare_model."""

from pathlib import Path

from aqnpipe.config.model import ModelConfig
from aqnpipe.models.loading import prepare_model
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0]), settings=f"models.{snakemake.wildcards.model}"):
    prepare_model(ModelConfig.model_validate(snakemake.params.model), Path(snakemake.output.record).parent)
