"""The train stage: one arm, one seed, from prepared model and problems to checkpoints, metrics and receipt."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from aqnpipe.artifacts.durable_files import digests_of
from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.provenance import code_digest, sha256_of_file, versions
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import resolve_device
from aqnpipe.errors import ReceiptError, TrainingError
from aqnpipe.runtime.disk_errors import clear_storage_errors
from aqnpipe.runtime.training_workers import run_workers
from aqnpipe.training.reporting import prepare_reporting
from aqnpipe.training.resume import prepare_resume
from aqnpipe.training.rollout_backend import describe_rollouts
from aqnpipe.training.run import TrainingInputs, run_label
from aqnpipe.training.workspace import Workspace, locked, open_workspace, promote, stopping_on_signals


def train(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    output_dir: Path,
    scratch: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Train `spec` and write `output_dir`: checkpoints/step<N>/, metrics.parquet, receipt.json, run.json.

    Works in `scratch`, on the same file system, and goes on there where an earlier process of the same run was stopped,
    to the same bytes. `output_dir` appears only when everything, the receipt included, is in order. Raises ReceiptError
    when measured and asked noise differ, TrainingError when the loss breaks, RunInterruptedError after one of
    `STOP_SIGNALS`, RunLockedError when another process works on the run, StorageError on a full disk.
    """
    record = _run_record(spec, inputs)
    prepare_reporting(
        spec.training.report_to, output_dir.with_name(f"{output_dir.name}.logs"), f"{spec.arm_id} seed {spec.seed}"
    )
    with locked(scratch), clear_storage_errors(f"{scratch}; free some and start again, the last resume point is kept"):
        workspace = open_workspace(scratch, record)
        if not workspace.is_finished():
            # What an earlier run left there must not stand beside a failed one.
            shutil.rmtree(output_dir, ignore_errors=True)
            _finish(spec, inputs, record, workspace, say)
        promote(workspace, output_dir)


def _finish(
    spec: TrainingSpec, inputs: TrainingInputs, record: RunRecord, workspace: Workspace, say: Callable[[str], None]
) -> None:
    resume_from = prepare_resume(workspace, say)
    try:
        with stopping_on_signals(workspace):
            run_workers(spec, inputs, workspace, resume_from, say)
    except ReceiptError as error:
        # Its resume points carry what was wrong; the next start is a new try.
        workspace.discard()
        raise ReceiptError(f"{error} (run {run_label(spec)})") from error
    outputs = digests_of(workspace.run)
    _refuse_incomplete(spec, outputs)
    write_json(workspace.run / "run.json", record.model_copy(update={"outputs_sha256": outputs}))
    workspace.finish()


def _refuse_incomplete(spec: TrainingSpec, outputs: Mapping[str, str]) -> None:
    """Raise TrainingError if a declared checkpoint was not written."""
    for step in spec.training.checkpoint_steps(spec.num_steps):
        if not any(name.startswith(f"checkpoints/step{step}/") and name.endswith(".safetensors") for name in outputs):
            raise TrainingError(f"{run_label(spec)}: the checkpoint after step {step} was not written")


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
        inputs_sha256={name: sha256_of_file(path) for name, path in files.items()},
        versions=versions(),
        device=resolve_device(spec.device).label,
        generation=describe_rollouts(spec),
    )
