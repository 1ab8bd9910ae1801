"""A Ray cluster of our own on one machine is reached from nowhere else."""

import os

import psutil

from aqnpipe.device import resolve_device
from aqnpipe.runtime.ray_cluster import ray_cluster

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def test_ray_listens_on_the_loopback_interface_alone(tmp_path):
    with ray_cluster(resolve_device("cpu"), 1, "a test", tmp_path):
        family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        own = [one for one in psutil.net_connections("inet") if one.pid in family and not one.raddr]
        names = {psutil.Process(one.pid).name() for one in own}
    assert {"gcs_server", "raylet"} <= names, "these listen, so the others were seen too"
    assert [one for one in own if one.laddr.ip not in LOOPBACK] == []
