"""The Ray cluster that the workers of a job run on: a private one, or an existing one that the user names.

A private cluster runs on this machine or on the nodes of the Slurm job. It has no dashboard, sends no usage statistics,
and admits only processes with its token. On a single machine it listens only on the loopback interface. All its
processes end when the launch ends, even when the launching process is killed: the kernel ends the children of a killed
process, and Slurm ends the steps of a finished job.
"""

import json
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aqnpipe.device import Device, DeviceKind
from aqnpipe.errors import DeviceError, WorkerError, first_line
from aqnpipe.runtime.device_allocation import environment_of_node, nodes_of_job, this_node

ADDRESS = "RAY_ADDRESS"
"""Environment variable that names an existing cluster: `auto`, or host and port of its head node."""

RESOURCES: dict[DeviceKind, str] = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
"""Ray's resource name for devices of each kind."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Each worker writes its own log file.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
}
_LOOPBACK = {
    # Despite its name this variable keeps Ray on the loopback interface on every system.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_TOKEN = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the name of a variable
_ACCESS_OF_THE_USER = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", _TOKEN)
_SECONDS_TO_JOIN = 180
_SECONDS_BETWEEN_CHECKS = 0.5
_LONGEST_TEMPORARY_FOLDER = 40
"""Ray creates sockets in this folder, and the path of a socket has at most 107 characters."""


@contextmanager
def ray_cluster(
    device: Device, num_workers: int, requested_by: str, shared: Path, devices_each: int = 1
) -> Iterator[None]:
    """Connect to a Ray cluster with `devices_each` devices for each worker while the body runs.

    If RAY_ADDRESS names a cluster, it is used as it is. Otherwise a private cluster is started on the nodes of this
    process's Slurm job, or on this machine. requested_by: name of the setting for `num_workers`, for messages. shared:
    a folder on a file system that all nodes share, for the token and the nodes' logs. Raises DeviceError if there are
    too few devices, WorkerError if Ray does not start on a node.
    """
    with ExitStack() as stack:
        if os.environ.get(ADDRESS):
            stack.enter_context(_environment(_QUIET))
            resources = stack.enter_context(_connected(address=os.environ[ADDRESS]))
        else:
            nodes = nodes_of_job()
            here = len(os.sched_getaffinity(0)) if device.kind == "cpu" else device.count
            where = "on this machine" if len(nodes) < 2 else f"on {len(nodes)} nodes"
            _check_devices(requested_by, num_workers, devices_each, device.kind, here * max(1, len(nodes)), where)
            per_node = math.ceil(num_workers / max(1, len(nodes))) * devices_each
            resources = stack.enter_context(_private_cluster(device.kind, per_node, nodes, shared))
        found = int(resources.get(RESOURCES[device.kind], 0))
        _check_devices(requested_by, num_workers, devices_each, device.kind, found, "in the Ray cluster")
        yield


def send_output_to(path: Path) -> None:
    """Send all further output of this process (of C libraries too) to the file at `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def how_it_ended(error: BaseException) -> str:
    """Return the end of an actor as the predicate of a sentence; `error` is what Ray raises for it.

    Ray ends processes on a node whose memory is nearly full, which otherwise looks like a kill from outside.
    """
    from ray.exceptions import OutOfMemoryError

    if isinstance(error, OutOfMemoryError):
        return "was ended by Ray, because the memory of its node was nearly full"
    if "receives a SIGTERM" in str(error):
        return "was stopped by SIGTERM"
    return "died (crashed, or ended by a signal: if by SIGKILL, memory is one possible cause)"


def _check_devices(
    requested_by: str, num_workers: int, devices_each: int, kind: DeviceKind, found: int, where: str
) -> None:
    if found < num_workers * devices_each:
        what = "CPU cores" if kind == "cpu" else f"{kind} devices"
        needed = "one" if devices_each == 1 else f"{devices_each} (generation.tensor_parallel)"
        raise DeviceError(f"{requested_by} is {num_workers}, found {found} {what} {where}; every worker needs {needed}")


@contextmanager
def _private_cluster(
    kind: DeviceKind, devices_per_node: int, nodes: tuple[str, ...], shared: Path
) -> Iterator[dict[str, float]]:
    """Start a private cluster with that many devices on each node; yield its resources by Ray's names."""
    alone = len(nodes) < 2
    devices: dict[DeviceKind, dict[str, Any]] = {
        "cpu": {},
        "cuda": {"num_gpus": devices_per_node},
        "npu": {"resources": {"NPU": devices_per_node}},
    }
    offered = {"num_cpus": devices_per_node, **devices[kind]}
    with ExitStack() as stack:
        usual = tempfile.gettempdir()
        parent = usual if len(usual) <= _LONGEST_TEMPORARY_FOLDER else "/tmp"  # noqa: S108 - a private folder in it
        folder = stack.enter_context(TemporaryDirectory(prefix="aqn-", dir=parent, ignore_cleanup_errors=True))
        access = stack.enter_context(_private_access(shared))
        stack.enter_context(_environment({**_QUIET, **(_LOOPBACK if alone else {}), **access}))
        others = stack.enter_context(_RayNodes(shared))
        address = {"_node_ip_address": "127.0.0.1"} if alone else {}
        if alone:
            stack.enter_context(_loopback_alone())
        resources = stack.enter_context(_connected(**offered, **address, include_dashboard=False, _temp_dir=folder))
        if not alone:
            others.start([node for node in nodes if node != this_node()], offered, folder)
            resources = others.wait_until_joined()
        yield resources


@contextmanager
def _loopback_alone() -> Iterator[None]:
    """Keep Ray on the loopback interface where it was imported before, for instance by a user's scorer.

    Ray reads the variable of `_LOOPBACK` when it is imported, and listens on all interfaces if it did not see it then.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


class _RayNodes:
    """Ray on the other nodes of a Slurm job, in one job step per node; the context ends the steps."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "_RayNodes":
        return self

    def __exit__(self, *error: object) -> None:
        for step in self._steps.values():
            step.terminate()
        for step in self._steps.values():
            step.wait()

    def start(self, nodes: list[str], offered: Mapping[str, Any], folder: str) -> None:
        """Start Ray on `nodes` and join them to the cluster of this process; each node offers `offered`.

        folder: Ray's temporary folder, which has the same name on every node. Each job step removes it on its node.
        """
        import ray

        address = ray.get_runtime_context().gcs_address
        flags = {"num_cpus": "--num-cpus", "num_gpus": "--num-gpus", "resources": "--resources"}
        arguments = [
            f"{flags[name]}={json.dumps(value) if isinstance(value, dict) else value}"
            for name, value in offered.items()
        ]
        ray_command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
        # Variables of this job step would restrict another step.
        kept = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTER_NAME")
        of_step = ("SLURM_", "SRUN_", "CUDA_VISIBLE_DEVICES")
        environment = {
            name: value for name, value in os.environ.items() if name in kept or not name.startswith(of_step)
        }
        script = 'trap : TERM; folder=$1; shift; "$@"; rm -rf "$folder"'
        for node in nodes:
            step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
            with (self._logs / f"ray_{node}.log").open("wb") as log:
                self._steps[node] = subprocess.Popen(  # noqa: S603 - node names come from Slurm
                    [*step, "sh", "-c", script, "sh", folder, *ray_command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**environment, **environment_of_node(node)},
                )

    def wait_until_joined(self) -> dict[str, float]:
        """Wait until every node has joined the cluster; return its resources."""
        import ray

        deadline = time.monotonic() + _SECONDS_TO_JOIN
        while sum(node["Alive"] for node in ray.nodes()) < 1 + len(self._steps):
            for node, step in self._steps.items():
                late = time.monotonic() > deadline
                if step.poll() is not None or late:
                    why = f"not in the cluster after {_SECONDS_TO_JOIN} s" if late else f"ended with {step.returncode}"
                    raise WorkerError(f"Ray on node {node}: {why}; log: {self._logs / f'ray_{node}.log'}")
            time.sleep(_SECONDS_BETWEEN_CHECKS)
        found: dict[str, float] = ray.cluster_resources()
        return found


@contextmanager
def _connected(**arguments: Any) -> Iterator[dict[str, float]]:
    import ray
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    # Ray caches the first token of a process, which may belong to an earlier cluster.
    AuthenticationTokenLoader.instance().reset_cache()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _start_ray(arguments)
        if threading.current_thread() is threading.main_thread():
            # ray.init replaces the handler.
            signal.signal(signal.SIGTERM, handler)
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _start_ray(arguments: Mapping[str, Any]) -> None:
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    except Exception as error:
        # Ray raises these, and even a bare Exception, when one of its processes does not start in time.
        if type(error) is not Exception and not isinstance(error, RuntimeError | OSError):
            raise
        reason = first_line(error)
        raise WorkerError(
            f"Ray did not start on node {this_node()}: {reason[:300]} (the machine may be overloaded; "
            f"{ADDRESS}, if it is set, must name a running cluster); the same command tries again"
        ) from error


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables that the user has not set, for this process and the cluster that it starts."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _private_access(shared: Path) -> Iterator[dict[str, str]]:
    """Create an access token for this cluster only; Ray's default token is a file in the user's home."""
    if any(name in os.environ for name in _ACCESS_OF_THE_USER):
        yield {}
        return
    path = shared / "ray_token"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    try:
        yield {_TOKEN: str(path)}
    finally:
        path.unlink(missing_ok=True)
