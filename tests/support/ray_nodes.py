"""A Ray cluster of two nodes on this machine."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest


@contextmanager
def two_ray_nodes() -> Iterator[Any]:
    """Run a cluster of two nodes with one core each, like that of a Slurm job; RAY_ADDRESS names it."""
    folder = Path(tempfile.mkdtemp(prefix="aqn-", dir="/tmp"))
    (folder / "token").write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from ray._raylet import AuthenticationTokenLoader
        from ray.cluster_utils import Cluster

        AuthenticationTokenLoader.instance().reset_cache()
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def descendants(pid: int) -> dict[int, str]:
    """Return the commands of all processes below one, by process id."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = " ".join(process.cmdline())
    return found
