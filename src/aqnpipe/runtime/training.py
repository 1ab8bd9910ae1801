"""A training run as a job: its lock, stop signals, full disks, and its worker processes.

`run_training_job` wraps `training.stage.train`. It holds the lock of the run's scratch folder, turns a scheduler's
signal into a stop request, and reports a full disk in one line. `launch_workers` runs a single worker in this process,
or several in Ray Train processes, one per device. Ray Train places the workers, connects them, and ends all of them
when one fails. Each worker does what a single process does (`training.run.run_worker`) with its share of every batch.
All workers write to the run's workspace, so a run on several nodes needs a file system that they share.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch import distributed

from aqnpipe.artifacts.files import read_json
from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import COLLECTIVES, DeviceKind, local_device_index, resolve_device
from aqnpipe.errors import AqnpipeError, WorkerError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.runtime.device_allocation import this_node
from aqnpipe.runtime.jobs import STOP_SIGNALS, disk_errors
from aqnpipe.runtime.locks import run_lock
from aqnpipe.runtime.ray_cluster import RESOURCES, how_it_ended, ray_cluster, send_output_to
from aqnpipe.training.ranks import gathered
from aqnpipe.training.run import TrainingInputs, run_label, run_worker
from aqnpipe.training.stage import train, with_measurements
from aqnpipe.training.workspace import Workspace

_SECONDS_BETWEEN_READS = 0.5
_SECONDS_TO_DETECT_DEATH = 5.0
"""A worker that lost a peer holds back its own error for this long, so that Ray reports the dead peer as the cause."""


def run_training_job(
    spec: TrainingSpec, inputs: TrainingInputs, output_dir: Path, scratch: Path, say: Callable[[str], None] = print
) -> None:
    """Run `training.stage.train` with the number of workers in the spec, holding the lock of the scratch folder.

    Raises what `train` and `launch_workers` raise, RunInterruptedError after one of `STOP_SIGNALS`, RunLockedError if
    another process works on the run, and StorageError on a full or read-only disk.
    """
    spec = with_measurements(spec, inputs)

    def launch(workspace: Workspace, resume_from: Path | None) -> None:
        with stop_on_signals(workspace):
            launch_workers(spec, inputs, workspace, resume_from, say)

    with run_lock(scratch), _run_disk_errors(scratch):
        train(spec, inputs, output_dir, scratch, say, launch)


@contextmanager
def stop_on_signals(workspace: Workspace) -> Iterator[None]:
    """Create the workspace's stop file at the first of `STOP_SIGNALS`; a second signal has its usual effect.

    Python handles signals in the main thread only. In another thread this does nothing.
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


def _run_disk_errors(folder: Path) -> AbstractContextManager[None]:
    return disk_errors(f"{folder}; free some and start again, the last resume point is kept")


@dataclass(frozen=True)
class _WorkerSetup:
    """The arguments of every worker."""

    spec: TrainingSpec
    inputs: TrainingInputs
    workspace: Workspace
    resume_from: Path | None

    @property
    def logs(self) -> Path:
        """Folder of the workers' output, one file per worker."""
        return self.workspace.folder / "logs"

    @property
    def messages(self) -> Path:
        """File of the lines that the first worker sends to the launching process."""
        return self.workspace.folder / "messages.log"


def launch_workers(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    workspace: Workspace,
    resume_from: Path | None,
    say: Callable[[str], None] = print,
) -> None:
    """Run `run_worker` to its end, in this process or in the number of Ray Train processes that the spec requests.

    Raises what `run_worker` raises, DeviceError if there are too few devices, and WorkerError if a worker died or fewer
    workers started than were requested.
    """
    if spec.training.num_workers == 1:
        run_worker(spec, inputs, workspace, resume_from, say)
        return
    device = resolve_device(spec.device)
    # Ray starts each worker in another working directory.
    setup = _WorkerSetup(
        spec,
        inputs.absolute(),
        replace(workspace, folder=workspace.folder.absolute()),
        resume_from.absolute() if resume_from else None,
    )
    shutil.rmtree(setup.logs, ignore_errors=True)
    setup.logs.mkdir()
    setup.messages.write_text("")
    with (
        ray_cluster(device, spec.training.num_workers, "training.num_workers", setup.logs),
        _relayed_lines(setup.messages, say),
    ):
        _run_ray_train(setup, device.kind)
    receipt = read_json(workspace.run / "receipt.json", Receipt)
    if receipt.num_workers != spec.training.num_workers:
        raise WorkerError(
            f"{run_label(spec)}: {receipt.num_workers} workers trained, {spec.training.num_workers} were requested"
        )


def _run_ray_train(setup: _WorkerSetup, kind: DeviceKind) -> None:
    """Run all workers to their end. Raises the error of the first worker that failed."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    devices = {} if kind == "cpu" else {RESOURCES[kind]: 1}
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config={"setup": setup},
        scaling_config=ScalingConfig(
            num_workers=setup.spec.training.num_workers,
            use_gpu=kind == "cuda",
            resources_per_worker={"CPU": 1, **devices},
        ),
        torch_config=TorchConfig(backend=COLLECTIVES[kind]),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(setup.workspace.folder),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        _raise_cause(error, setup)
    finally:
        shutil.rmtree(setup.workspace.folder / "ray_train", ignore_errors=True)


def _ray_worker(config: dict[str, _WorkerSetup]) -> None:
    """Check that all workers have started, then train as one of them."""
    setup = config["setup"]
    requested, started = setup.spec.training.num_workers, distributed.get_world_size()
    rank = distributed.get_rank()
    send_output_to(setup.logs / f"worker{rank}.log")
    if started != requested:
        raise WorkerError(f"{run_label(setup.spec)}: {started} workers started, {requested} were requested")
    # accelerate uses the device of this index. Ray shows a worker all GPUs of its node, but only the worker's own NPU.
    os.environ["LOCAL_RANK"] = str(local_device_index(resolve_device(setup.spec.device).kind))

    def say(line: str) -> None:
        if rank == 0:
            with setup.messages.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    say(f"{run_label(setup.spec)}: {started} workers, on {', '.join(sorted(set(gathered(this_node()))))}")
    try:
        # Converted here: Ray wraps an error of a worker, and the launching process would not recognise a full disk.
        with _run_disk_errors(setup.workspace.folder):
            run_worker(setup.spec, setup.inputs, setup.workspace, setup.resume_from, say)
    except RuntimeError:
        time.sleep(_SECONDS_TO_DETECT_DEATH)
        raise


@contextmanager
def _relayed_lines(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Pass every line that appears in the file at `path` to `say` while the body runs."""
    body_ended = threading.Event()

    def follow() -> None:
        is_last_read = False
        with path.open(encoding="utf-8") as file:
            while not is_last_read:
                is_last_read = body_ended.wait(_SECONDS_BETWEEN_READS)
                for line in file.read().splitlines():
                    say(line)

    follower = threading.Thread(target=follow, name="worker messages", daemon=True)
    follower.start()
    try:
        yield
    finally:
        body_ended.set()
        follower.join()


def _raise_cause(error: Exception, setup: _WorkerSetup) -> NoReturn:
    """Raise the AqnpipeError of a worker, or a WorkerError naming the dead workers; a bug keeps its traceback."""
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    failures = dict(sorted(error.worker_failures.items())) if isinstance(error, WorkerGroupError) else {}
    for failure in failures.values():
        if isinstance(failure, AqnpipeError):
            raise failure
    dead = {rank: each for rank, each in failures.items() if isinstance(each, WorkerHealthCheckFailedError)}
    if dead:
        ends = sorted({how_it_ended(each.health_check_failure) for each in dead.values()})
        raise WorkerError(
            f"{run_label(setup.spec)}: worker {', '.join(map(str, dead))} of {setup.spec.training.num_workers} "
            f"{' or '.join(ends)}, so all were ended; the same command continues from the last resume point; logs: "
            f"{setup.logs}"
        ) from error
    raise error
