"""Adapter: rule train."""

from pathlib import Path

from aqnpipe.config.run import TrainingSpec
from aqnpipe.runtime.jobs import STOP_SIGNALS, logged_device_job

log = Path(snakemake.log[0])
spec = TrainingSpec.model_validate(snakemake.params.spec)
leases, workers = snakemake.resources.get("devices", 0), spec.training.num_workers
settings = f"training, prompt or arm {spec.arm_id}"
# Until the training can write a resume point, its stop signals end the job.
with logged_device_job(log, spec.device, leases, workers, settings, STOP_SIGNALS) as say:
    from aqnpipe.runtime.training import run_training_job
    from aqnpipe.training.run import TrainingInputs

    run_training_job(
        spec,
        TrainingInputs(
            model=Path(snakemake.input.model).parent,
            train_problems=Path(snakemake.input.train_problems),
            test_problems=Path(snakemake.input.test_problems),
            sigmas=Path(snakemake.input.sigmas[0]) if snakemake.input.get("sigmas") else None,
        ),
        output_dir=Path(snakemake.output.record).parent,
        scratch=log.parents[2] / "scratch" / log.stem,
        say=say,
    )
