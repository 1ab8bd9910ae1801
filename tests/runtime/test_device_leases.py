"""Device leases: jobs on one machine never share a device, and a lease ends with its job."""

import os
import signal
import subprocess
import sys
import time

import pytest

from aqnpipe.errors import DeviceError
from aqnpipe.runtime.device_allocation import lease_devices

# Takes leases repeatedly. While it holds a device it marks it with a folder; a folder cannot be created twice.
COMPETITOR = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.device_allocation import lease_devices
folder, count, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(rounds):
    with lease_devices(folder / "leases", "cuda", ["0", "1", "2"], count, 0.002) as taken:
        assert len(set(taken)) == count
        for name in taken:
            (folder / f"in-use-{name}").mkdir()
        time.sleep(0.003)
        for name in taken:
            (folder / f"in-use-{name}").rmdir()
"""
HOLDER = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.device_allocation import lease_devices
with lease_devices(Path(sys.argv[1]), "npu", ["4", "5"], 2, 0.01) as taken:
    print(*taken, flush=True)
    time.sleep(60)
"""


def test_jobs_that_compete_never_share_a_device(tmp_path):
    jobs = [
        subprocess.Popen([sys.executable, "-c", COMPETITOR, str(tmp_path), str(count), "25"])
        for count in (1, 1, 2, 2, 3, 1)
    ]
    assert [job.wait(timeout=60) for job in jobs] == [0] * len(jobs)
    assert sorted(path.name for path in (tmp_path / "leases").iterdir()) == [f"cuda-{i}.lock" for i in range(3)]


def test_a_killed_job_frees_its_devices(tmp_path):
    job = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline().split() == ["4", "5"]
    os.kill(job.pid, signal.SIGKILL)
    started = time.monotonic()
    with lease_devices(tmp_path, "npu", ["4", "5"], 2, 0.01) as taken:
        assert taken == ("4", "5")
    assert time.monotonic() - started < 10
    job.wait()


def test_held_devices_are_passed_over_and_kinds_do_not_mix(tmp_path):
    with lease_devices(tmp_path, "cuda", ["0", "1"], 1, 0.01) as first:
        with lease_devices(tmp_path, "cuda", ["0", "1"], 1, 0.01) as second:
            assert (first, second) == (("0",), ("1",))
        with lease_devices(tmp_path, "npu", ["0"], 1, 0.01) as other:
            assert other == ("0",)
    with lease_devices(tmp_path, "cuda", ["0", "1"], 2, 0.01) as both:
        assert both == ("0", "1")


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DeviceError, match=r"cuda-0\.lock: cannot be opened as a lock file"),
        lease_devices(tmp_path / "file", "cuda", ["0"], 1, 0.01),
    ):
        pass
