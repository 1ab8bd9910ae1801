"""Adapter: rule srdd_diagnose."""

from pathlib import Path

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.model import ModelConfig
from aqnpipe.config.noise import Machine
from aqnpipe.runtime.jobs import logged_device_job, logged_job

log, model_dir = Path(snakemake.log[0]), Path(snakemake.input.model).parent
machine = Machine.model_validate(snakemake.params.machine)
output, names = Path(snakemake.output.layers).parent, (snakemake.wildcards.model, snakemake.wildcards.machine)

if machine.diagnosed_in is not None:
    with logged_job(log, f"machines.{names[1]}.diagnosed_in") as say:
        from aqnpipe.diagnosis.stage import import_diagnosis

        import_diagnosis(Path(snakemake.input.elsewhere[0]).parent, model_dir, output, names=names, say=say)
else:
    with logged_device_job(log, snakemake.params.device, snakemake.resources.get("devices", 0)) as say:
        from aqnpipe.diagnosis.stage import diagnose

        model = ModelConfig.model_validate(snakemake.params.model)
        diagnose(
            model_dir,
            Path(snakemake.input.problems),
            PromptFormat.model_validate(snakemake.params.prompt),
            machine,
            DiagnosisConfig.model_validate(snakemake.params.diagnosis),
            output,
            dtype=model.dtype,
            attention=model.attention,
            device=snakemake.params.device,
            names=names,
            say=say,
        )
