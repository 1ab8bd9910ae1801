"""The Ray cluster that a launch runs on: one of its own on this machine, or the one that RAY_ADDRESS names.

A cluster of its own listens on the loopback interface alone, has no dashboard, reports nothing to anyone, and is gone
with all its processes when the launch ends, also when the launching process is killed (the kernel ends its children).
"""

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aqnpipe.device import DeviceKind

ADDRESS = "RAY_ADDRESS"
"""Set by a Slurm job that started Ray on its nodes (`auto`, or host and port of the head node)."""

RESOURCES: dict[DeviceKind, str] = {"cpu": "CPU", "cuda": "GPU", "npu": "NPU"}
"""What Ray calls a device of each kind."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Workers write to log files of their own.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
}
_LOOPBACK = {
    # By this name Ray keeps to the loopback interface, on any system.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_TOKEN = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the name of a variable
_USERS_OWN_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", _TOKEN)
_LONGEST_TEMPORARY_FOLDER = 40
"""Ray puts sockets below it, whose whole path may have 107 characters."""


@contextmanager
def ray_cluster(kind: DeviceKind, num_devices: int) -> Iterator[dict[str, float]]:
    """Connect to a Ray cluster while the body runs; yield its resources, by Ray's names.

    kind, num_devices: what a cluster of its own offers; nothing is asked of the one that RAY_ADDRESS names.
    """
    if os.environ.get(ADDRESS):
        with _environment(_QUIET), _connected(address=os.environ[ADDRESS]) as resources:
            yield resources
        return
    folder = _temporary_folder()
    try:
        with _environment({**_QUIET, **_LOOPBACK, **_own_access(folder)}):
            offered: dict[DeviceKind, dict[str, Any]] = {
                "cpu": {},
                "cuda": {"num_gpus": num_devices},
                "npu": {"resources": {"NPU": num_devices}},
            }
            arguments = {"num_cpus": num_devices, "include_dashboard": False, "_temp_dir": str(folder)}
            with _connected(**arguments, **offered[kind]) as found:
                yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _connected(**arguments: Any) -> Iterator[dict[str, float]]:
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
    try:
        if threading.current_thread() is threading.main_thread():
            # Ray has put a handler of its own in its place.
            signal.signal(signal.SIGTERM, handler)
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what the user has not set, for this process and the cluster that it starts."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _own_access(folder: Path) -> dict[str, str]:
    """Give the cluster an access token that nobody else has; Ray's default is a file in the user's home."""
    if any(name in os.environ for name in _USERS_OWN_ACCESS):
        return {}
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return {_TOKEN: str(path)}


def _temporary_folder() -> Path:
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= _LONGEST_TEMPORARY_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes it private
    return Path(tempfile.mkdtemp(prefix="aqn-", dir=parent))
