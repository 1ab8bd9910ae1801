"""A Ray cluster of our own on one machine is reached from nowhere else."""

import os

import psutil
import pytest

from aqnpipe.device import resolve_device
from aqnpipe.runtime.ray_cluster import ray_cluster

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.mark.slow
def test_ray_listens_on_the_loopback_interface_alone(tmp_path):
    import ray  # noqa: F401 - as a user's code may do before; Ray reads its environment variables then

    with ray_cluster(resolve_device("cpu"), 1, "a test", tmp_path):
        family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        own = [socket for socket in psutil.net_connections("inet") if socket.pid in family and not socket.raddr]
        names = {psutil.Process(socket.pid).name() for socket in own}
    assert {"gcs_server", "raylet"} <= names, "these listen, so the others were seen too"
    assert [socket for socket in own if socket.laddr.ip not in LOOPBACK] == []
