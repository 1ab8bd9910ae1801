"""Snakemake jobs: the contents of their logs, and their end without a device or on a full disk."""

import errno
import os
import socket
import subprocess
import sys

import pytest

DEVICE_JOB = """
import sys
from pathlib import Path
from aqnpipe.runtime.jobs import logged_device_job
with logged_device_job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])) as say:
    print("computing")
    say("done")
"""
GIVEN = {"CUDA_VISIBLE_DEVICES": "2,5"}


def run_job(log, device, num_leases, environment):
    kept = {name: value for name, value in os.environ.items() if name not in (*GIVEN, "SLURM_JOB_ID")}
    return subprocess.run(
        [sys.executable, "-c", DEVICE_JOB, log, device, str(num_leases)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_log_says_where_and_on_what(tmp_path):
    log = tmp_path / "logs" / "job.log"
    done = run_job(log, "cpu", 0, {**GIVEN, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu01"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "done\n")
    assert log.read_text().splitlines() == [
        "node gpu01, Slurm job 7",
        "devices given: CUDA_VISIBLE_DEVICES=2,5",
        "device: cpu (a rehearsal: the devices given are not used)",
        "computing",
        "done",
    ]


def test_a_job_without_devices_uses_the_cpu(tmp_path):
    assert run_job(tmp_path / "job.log", "cpu", 0, {}).returncode == 0
    lines = (tmp_path / "job.log").read_text().splitlines()
    assert lines[:3] == [f"node {socket.gethostname()}", "devices given: none", "device: cpu"]


@pytest.mark.parametrize(
    ("device", "num_leases", "environment", "said"),
    [
        ("npu", 0, {}, "ERROR: device: requested npu, found none"),
        ("auto", 0, {"ASCEND_RT_VISIBLE_DEVICES": "0"}, "ERROR: device: auto found only the CPU, but"),
        ("cpu", 3, GIVEN, "ERROR: device leases: the profile gives 3 of this machine's devices to a job, found 2"),
    ],
)
def test_a_job_that_does_not_get_its_device_ends_in_one_line(tmp_path, device, num_leases, environment, said):
    done = run_job(tmp_path / "job.log", device, num_leases, environment)
    assert done.returncode == 2
    log = (tmp_path / "job.log").read_text()
    assert done.stderr == ""
    assert [line for line in log.splitlines() if line.startswith(said)]
    assert "Traceback" not in log
    assert "computing" not in log


STORAGE_JOB = """
import os, sys
from pathlib import Path
from aqnpipe.runtime.jobs import logged_job
with logged_job(Path(sys.argv[1])) as say:
    say("computing")
    if sys.argv[2] != "0":
        raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
"""


@pytest.mark.parametrize(
    ("log", "number", "said"),
    [
        ("/dev/full", 0, ["ERROR: no space left on device for the output of this job", "next: free space or"]),
        ("job.log", errno.ENOSPC, ["computing", "ERROR: no space left on device for", "next: free"]),
        ("job.log", errno.EROFS, ["computing", "ERROR: read-only file system for", "next: free"]),
        ("file/job.log", 0, ["ERROR: file/job.log: cannot be written (", "next: free space"]),
    ],
)
def test_a_disk_that_cannot_be_written_ends_a_job_in_clear_lines(tmp_path, log, number, said):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-c", STORAGE_JOB, log, str(number)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    log = tmp_path / log
    lines = [*done.stderr.splitlines(), *(log.read_text().splitlines() if log.is_file() else [])]
    assert "Traceback" not in lines
    assert len([line for line in lines if line.startswith("ERROR: ")]) == 1, "in the log, or else on the terminal"
    for expected in said:
        assert any(line.startswith(expected) for line in lines), done.stderr


ADVISED_JOB = """
import sys
from pathlib import Path
from aqnpipe.errors import DataError
from aqnpipe.runtime.jobs import logged_job
with logged_job(Path(sys.argv[1]), settings="dataset"):
    raise DataError(sys.argv[2])
"""


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("data set ./mine: no such folder", "next: change dataset in the study, or fix what the message names"),
        ("results/data/test.parquet: damaged", "next: fix a file of your own; remove a file under results"),
    ],
)
def test_the_advice_names_the_setting_unless_a_result_is_meant(tmp_path, message, advice):
    command = [sys.executable, "-c", ADVISED_JOB, "results/logs/job.log", message]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = (tmp_path / "results" / "logs" / "job.log").read_text().splitlines()
    assert lines[-2:][0] == f"ERROR: {message}"
    assert lines[-1].startswith(advice)
