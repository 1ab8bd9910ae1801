"""Adapter: rule generate_layer_sigmas."""

from pathlib import Path

from aqnpipe.config.diagnosis import SigmaRule
from aqnpipe.diagnosis.stage import generate_layer_sigmas
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])):
    generate_layer_sigmas(
        Path(snakemake.input.layers),
        Path(snakemake.input.verdict),
        SigmaRule.model_validate(snakemake.params.rule),
        Path(snakemake.output[0]),
        model=snakemake.wildcards.model,
        machine=snakemake.wildcards.machine,
        strategy=snakemake.wildcards.strategy,
        parity=Path(snakemake.input.parity[0]) if snakemake.input.get("parity") else None,
    )
