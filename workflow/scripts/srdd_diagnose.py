"""Adapter: rule srdd_diagnose."""

from pathlib import Path

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.model import ModelConfig
from aqnpipe.config.noise import Machine
from aqnpipe.runtime.jobs import logged_device_job

with logged_device_job(Path(snakemake.log[0]), snakemake.params.device, snakemake.resources.get("devices", 0)) as say:
    from aqnpipe.diagnosis.stage import diagnose

    model = ModelConfig.model_validate(snakemake.params.model)
    diagnose(
        Path(snakemake.input.model).parent,
        Path(snakemake.input.problems),
        PromptFormat.model_validate(snakemake.params.prompt),
        Machine.model_validate(snakemake.params.machine),
        DiagnosisConfig.model_validate(snakemake.params.diagnosis),
        Path(snakemake.output.layers).parent,
        dtype=model.dtype,
        attention=model.attention,
        device=snakemake.params.device,
        names=(snakemake.wildcards.model, snakemake.wildcards.machine),
        say=say,
    )
