"""Adapter: rule measure_parity."""

from pathlib import Path

from aqnpipe.config.run import ParitySpec
from aqnpipe.runtime.jobs import logged_device_job

spec = ParitySpec.model_validate(snakemake.params.spec)
with logged_device_job(Path(snakemake.log[0]), spec.device, snakemake.resources.get("devices", 0)) as say:
    from aqnpipe.parity.stage import measure_parity

    measure_parity(
        spec, Path(snakemake.input.model).parent, Path(snakemake.input.problems), Path(snakemake.output[0]), say
    )
