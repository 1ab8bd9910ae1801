"""The train stage: trains one arm with one seed and writes checkpoints, metrics, receipt and record."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from aqnpipe.artifacts.files import digests_of, read_json, write_json
from aqnpipe.artifacts.measured_errors import spec_with_figures
from aqnpipe.artifacts.provenance import code_digest, sha256_of_files, versions
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.artifacts.training_facts import TrainingFacts
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import read_model_config
from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import resolve_device
from aqnpipe.errors import ReceiptError, TrainingError
from aqnpipe.models.prepared import read_prepared_model
from aqnpipe.noise.schedule import with_custom_sigmas
from aqnpipe.training.reporting import prepare_reporting
from aqnpipe.training.resume import prepare_resume
from aqnpipe.training.rollout_backend import describe_rollouts
from aqnpipe.training.run import TrainingInputs, run_label, run_worker
from aqnpipe.training.workspace import Workspace, open_workspace, promote

Launch = Callable[[Workspace, Path | None], None]
"""Runs all workers of a run in a workspace, from a resume point or (None) from the start."""


def train(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    output_dir: Path,
    scratch: Path,
    say: Callable[[str], None] = print,
    launch: Launch | None = None,
) -> None:
    """Train `spec` and write `output_dir`: checkpoints/step<N>/, metrics.parquet, receipt.json, run.json.

    The run works in `scratch`, on the same file system, and continues there after an interruption, to the same bytes.
    `output_dir` appears only when the run is complete and its receipt has been checked. launch: runs the workers to
    their end; the default runs a single worker in this process. `runtime.training.run_training_job` adds the lock, stop
    signals and several workers. Raises ReceiptError if measured and requested noise differ, TrainingError if the
    numbers break down, and RunInterruptedError after a stop request.
    """
    spec = with_measurements(spec, inputs)
    record = _run_record(spec, inputs)
    prepare_reporting(
        spec.training.report_to, output_dir.with_name(f"{output_dir.name}.logs"), f"{spec.arm_id} seed {spec.seed}"
    )
    workspace = open_workspace(scratch, record)
    if not workspace.is_finished():
        # If this run fails, the output of an earlier run must not remain.
        shutil.rmtree(output_dir, ignore_errors=True)
        resume_from = prepare_resume(workspace, say)
        try:
            if launch is None:
                run_worker(spec, inputs, workspace, resume_from, say)
            else:
                launch(workspace, resume_from)
        except ReceiptError as error:
            # The resume points contain the wrong measurements, so the next start must not use them.
            workspace.discard()
            raise ReceiptError(f"{error} (run {run_label(spec)})") from error
        _finish(spec, record, workspace)
    promote(workspace, output_dir)


def with_measurements(spec: TrainingSpec, inputs: TrainingInputs) -> TrainingSpec:
    """Return the settings with the numbers of the arm's noise that a file or a function of the user's own contains.

    These are the sigmas of an own schedule, and the figures of a measured error, which must be of the model to be
    trained.
    """
    spec = with_custom_sigmas(spec)
    noise = spec.arm.operator_noise
    if noise is None or not isinstance(noise.error, MeasuredError):
        return spec
    weights = read_prepared_model(inputs.model).weights_sha256
    return spec_with_figures(spec, config=read_model_config(inputs.model), weights_sha256=weights)


def _finish(spec: TrainingSpec, record: RunRecord, workspace: Workspace) -> None:
    """Write the record of a run whose workers have ended; TrainingError if a declared checkpoint is missing."""
    outputs = digests_of(workspace.run)
    _refuse_incomplete(spec, outputs)
    found = {
        "outputs_sha256": outputs,
        "merge_losses": _merge_losses(spec, workspace),
        "training": read_json(workspace.facts, TrainingFacts),
    }
    write_json(workspace.run / "run.json", record.model_copy(update=found))
    workspace.finish()


def _refuse_incomplete(spec: TrainingSpec, outputs: Mapping[str, str]) -> None:
    """Raise TrainingError if a declared checkpoint was not written."""
    for step in spec.training.checkpoint_steps(spec.num_steps):
        if not any(name.startswith(f"checkpoints/step{step}/") and name.endswith(".safetensors") for name in outputs):
            raise TrainingError(f"{run_label(spec)}: the checkpoint after step {step} was not written")


def _merge_losses(spec: TrainingSpec, workspace: Workspace) -> dict[str, float]:
    """Return what merging the adapters of each checkpoint would lose; nothing for one without adapters or update."""
    names = [f"step{step}" for step in spec.training.checkpoint_steps(spec.num_steps)]
    losses = {name: read_prepared_model(workspace.run / "checkpoints" / name).merge_loss for name in names}
    return {name: loss for name, loss in losses.items() if loss is not None}


def _run_record(spec: TrainingSpec, inputs: TrainingInputs) -> RunRecord:
    files = {
        "train_problems": inputs.train_problems,
        "test_problems": inputs.test_problems,
        "model": inputs.model / "aqnpipe_model.json",
    }
    if inputs.sigmas is not None:
        files["sigmas"] = inputs.sigmas
    return RunRecord(
        stage="train",
        identity={"model": spec.model_role, "arm": spec.arm_id, "seed": spec.seed, "num_steps": spec.num_steps},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.training.stage"),
        inputs_sha256=sha256_of_files(files),
        versions=versions(),
        device=resolve_device(spec.device).label,
        generation=describe_rollouts(spec),
    )
