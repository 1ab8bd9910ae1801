"""A training run as a job: its lock, signals to stop, full disks and worker processes."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import RunLockedError
from aqnpipe.runtime.disk_errors import disk_errors
from aqnpipe.runtime.file_lock import FileLock
from aqnpipe.runtime.training_workers import launch_workers
from aqnpipe.training.run import TrainingInputs
from aqnpipe.training.stage import train
from aqnpipe.training.workspace import Workspace

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
"""What a scheduler sends before its time limit ends a job.

Slurm sends it to every process of the job. SIGURG is the one that all others ignore: either of the other two would end
Ray's processes, and several workers could not write a resume point any more.
"""


def run_training_job(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    output_dir: Path,
    scratch: Path,
    say: Callable[[str], None] = print,
) -> None:
    """Run `training.stage.train` with as many workers as the spec asks for, alone on its scratch folder.

    Raises what `train` raises, RunInterruptedError after one of `STOP_SIGNALS`, RunLockedError when another process
    works on the run, StorageError on a full disk, DeviceError and WorkerError as `launch_workers`.
    """

    def launch(workspace: Workspace, resume_from: Path | None) -> None:
        with stop_on_signals(workspace):
            launch_workers(spec, inputs, workspace, resume_from, say)

    with run_lock(scratch), disk_errors(f"{scratch}; free some and start again, the last resume point is kept"):
        train(spec, inputs, output_dir, scratch, say, launch)


def remove_scratch(scratches: Path) -> None:
    """Remove the scratch folder of every finished run under `scratches` that no process works in.

    To be called when Snakemake has recorded that its runs are done; interrupted runs keep what they need.
    """
    for finished in scratches.glob("*/*/finished.json"):
        scratch = finished.parents[1]
        with suppress(RunLockedError), run_lock(scratch):
            shutil.rmtree(scratch)
    with suppress(OSError):
        scratches.rmdir()


@contextmanager
def run_lock(scratch: Path) -> Iterator[None]:
    """Hold the lock of a run's scratch folder while the body runs; RunLockedError naming the process that has it."""
    scratch.mkdir(parents=True, exist_ok=True)
    with FileLock(scratch / "lock") as lock:
        if not lock.acquire():
            raise RunLockedError(f"{scratch}: another process works on this run ({lock.describe_holder()})")
        if not lock.is_current():
            raise RunLockedError(f"{scratch}: another process has just finished this run; start again")
        lock.record_holder()
        yield


@contextmanager
def stop_on_signals(workspace: Workspace) -> Iterator[None]:
    """Turn the first of `STOP_SIGNALS` into the workspace's stop file; a second one ends the process as usual.

    Only the main thread of a process can do this; in other threads nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def request_stop(number: int, frame: FrameType | None) -> None:
        workspace.stop_file.touch()
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in STOP_SIGNALS:
            signal.signal(number, request_stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
