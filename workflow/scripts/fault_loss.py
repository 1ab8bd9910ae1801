"""Adapter: rule fault_loss."""

from pathlib import Path

from aqnpipe.config.run import FaultLossSpec
from aqnpipe.evaluation.fault_loss import FaultLossOutputs, fault_loss
from aqnpipe.job import logged_job

with logged_job(Path(snakemake.log[0])) as say:
    fault_loss(
        FaultLossSpec.model_validate(snakemake.params.spec),
        Path(snakemake.input.model).parent,
        Path(snakemake.input.test_problems),
        FaultLossOutputs(
            table=Path(snakemake.output.table),
            receipt=Path(snakemake.output.receipt),
            record=Path(snakemake.output.record),
        ),
        say,
    )
