"""One training run on one worker or many: in this process, or by Ray Train with a process per device.

Ray Train's part is to place the workers, to connect them, and to end all when one fails; each of them does what a
single process does (`run_worker`) with its share of every batch. They share the run's workspace, so on several nodes it
has to be on a file system that all of them see.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torch import distributed

from aqnpipe.artifacts.files import read_json
from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import COLLECTIVES, DeviceKind, local_device_index, resolve_device
from aqnpipe.errors import AqnpipeError, WorkerError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.runtime.device_allocation import this_node
from aqnpipe.runtime.disk_errors import disk_errors
from aqnpipe.runtime.ray_cluster import RESOURCES, ray_cluster, send_output_to
from aqnpipe.training.ranks import gathered
from aqnpipe.training.run import TrainingInputs, run_label, run_worker
from aqnpipe.training.workspace import Workspace

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_A_DEATH_TO_SHOW = 5.0
"""A worker that lost a peer waits so long with its own error, so that the peer is named as the cause."""


@dataclass(frozen=True)
class _Share:
    """What every worker is handed."""

    spec: TrainingSpec
    inputs: TrainingInputs
    workspace: Workspace
    resume_from: Path | None

    @property
    def logs(self) -> Path:
        """Folder of the workers' output, one file each."""
        return self.workspace.folder / "logs"

    @property
    def said(self) -> Path:
        """File of the lines that the first worker has for the launching process."""
        return self.workspace.folder / "said.log"


def launch_workers(
    spec: TrainingSpec,
    inputs: TrainingInputs,
    workspace: Workspace,
    resume_from: Path | None,
    say: Callable[[str], None] = print,
) -> None:
    """Do what `run_worker` does, with as many workers as the spec asks for.

    Raises what `run_worker` raises, DeviceError if there are too few devices, and WorkerError if a worker died or fewer
    started than were requested.
    """
    if spec.training.num_workers == 1:
        run_worker(spec, inputs, workspace, resume_from, say)
        return
    device = resolve_device(spec.device)
    # Workers have a working directory of their own.
    share = _Share(
        spec,
        inputs.absolute(),
        replace(workspace, folder=workspace.folder.absolute()),
        resume_from.absolute() if resume_from else None,
    )
    for left_over in (share.logs, workspace.accounts):
        shutil.rmtree(left_over, ignore_errors=True)
    share.logs.mkdir()
    share.said.write_text("")
    with ray_cluster(device, spec.training.num_workers, "training.num_workers", share.logs), _relayed(share.said, say):
        _launch(share, device.kind)
    receipt = read_json(workspace.run / "receipt.json", Receipt)
    if receipt.num_workers != spec.training.num_workers:
        raise WorkerError(
            f"{run_label(spec)}: {receipt.num_workers} workers trained, {spec.training.num_workers} were requested"
        )


def _launch(share: _Share, kind: DeviceKind) -> None:
    """Run all workers to their end. Raises what ended the first of them that failed."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    devices = {} if kind == "cpu" else {RESOURCES[kind]: 1}
    trainer = TorchTrainer(
        _work,
        train_loop_config={"share": share},
        scaling_config=ScalingConfig(
            num_workers=share.spec.training.num_workers,
            use_gpu=kind == "cuda",
            resources_per_worker={"CPU": 1, **devices},
        ),
        torch_config=TorchConfig(backend=COLLECTIVES[kind]),
        run_config=RunConfig(
            name="ray_train",
            storage_path=str(share.workspace.folder),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),  # type: ignore[call-arg]
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        _raise_cause(error, share)
    finally:
        shutil.rmtree(share.workspace.folder / "ray_train", ignore_errors=True)


def _work(config: dict[str, _Share]) -> None:
    """Be one worker: check that all are there, then train."""
    share = config["share"]
    requested, started = share.spec.training.num_workers, distributed.get_world_size()
    rank = distributed.get_rank()
    send_output_to(share.logs / f"worker{rank}.log")
    if started != requested:
        raise WorkerError(f"{run_label(share.spec)}: {started} workers started, {requested} were requested")
    # accelerate takes the device of this number. Ray shows a worker all GPUs of its node, but of NPUs its own alone.
    os.environ["LOCAL_RANK"] = str(local_device_index(resolve_device(share.spec.device).kind))
    say = _line_writer(share.said, rank)
    say(f"{run_label(share.spec)}: {started} workers, on {', '.join(sorted(set(gathered(this_node()))))}")
    try:
        with disk_errors(f"{share.workspace.folder}; free some and start again, the last resume point is kept"):
            run_worker(share.spec, share.inputs, share.workspace, share.resume_from, say)
    except RuntimeError:
        time.sleep(_SECONDS_FOR_A_DEATH_TO_SHOW)
        raise


def _line_writer(path: Path, rank: int) -> Callable[[str], None]:
    def say(line: str) -> None:
        if rank == 0:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    return say


@contextmanager
def _relayed(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say every line that appears in the file at `path` while the body runs."""
    over = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8") as file:
            while True:
                last_look = over.wait(_SECONDS_BETWEEN_LOOKS)
                for line in file.read().splitlines():
                    say(line)
                if last_look:
                    return

    follower = threading.Thread(target=follow, name="worker messages", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()


def _raise_cause(error: Exception, share: _Share) -> NoReturn:
    """Raise what a user can act on: an error of ours that a worker raised, or who died; a bug keeps its traceback."""
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    failures = dict(sorted(error.worker_failures.items())) if isinstance(error, WorkerGroupError) else {}
    for failure in failures.values():
        if isinstance(failure, AqnpipeError):
            raise failure
    dead = [str(rank) for rank, failure in failures.items() if isinstance(failure, WorkerHealthCheckFailedError)]
    if dead:
        raise WorkerError(
            f"{run_label(share.spec)}: worker {', '.join(dead)} of {share.spec.training.num_workers} died (killed, or "
            "out of memory?), so all were ended; the same command goes on from the last resume point; logs: "
            f"{share.logs}"
        ) from error
    raise error
