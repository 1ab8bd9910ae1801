"""Snakemake jobs: the contents of their logs, and their end without a device or on a full disk."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from safetensors import SafetensorError

from aqnpipe.artifacts.runs import read_cost
from aqnpipe.cli.study_terminal import error_in_log
from aqnpipe.errors import StorageError
from aqnpipe.runtime import jobs
from aqnpipe.runtime.jobs import costs_file, disk_errors, measured_costs

DEVICE_JOB = """
import sys
from pathlib import Path
from aqnpipe.runtime.jobs import logged_device_job
with logged_device_job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])) as say:
    print("computing")
    say("done")
"""
GIVEN = {"CUDA_VISIBLE_DEVICES": "2,5"}

BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


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


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGTERM", -signal.SIGTERM), ("SIGINT", -signal.SIGINT), ("SIGUSR1", -signal.SIGUSR1), ("SIGURG", 75)],
)
def test_a_job_that_is_stopped_says_so_and_what_to_do_and_ends_by_the_signal(name, code, tmp_path):
    log = tmp_path / "job.log"
    # In an import, as in the first seconds of a job.
    (tmp_path / "libraries.py").write_text(f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    training = DEVICE_JOB.replace("int(sys.argv[3]))", "int(sys.argv[3]), ends_at=STOP_SIGNALS)")
    stopped = f"from aqnpipe.runtime.jobs import STOP_SIGNALS\n{training}    import libraries\n"
    done = run_interruptible(stopped, log, tmp_path)
    assert (done.returncode, done.stderr) == (code, "done\n")
    assert log.read_text().splitlines()[-2:] == [
        f"ERROR: stopped by {name} before it was done",
        "next: run the same command, which continues",
    ]
    assert error_in_log(log) == [f"stopped by {name} before it was done", "next: run the same command, which continues"]


def test_a_job_that_writes_no_resume_point_uses_the_time_until_the_limit(tmp_path):
    warned = f"{DEVICE_JOB}    import os, signal\n    os.kill(os.getpid(), signal.SIGURG)\n"
    assert run_interruptible(warned, tmp_path / "job.log", tmp_path).returncode == 0


def test_a_job_in_the_background_of_a_shell_ignores_interrupts(tmp_path):
    ignored = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    ignoring = f"{ignored}{DEVICE_JOB}    os.kill(os.getpid(), signal.SIGINT)\n"
    assert run_interruptible(ignoring, tmp_path / "job.log", tmp_path).returncode == 0


def run_interruptible(source, log, folder):
    """Run a job that a shell did not start in the background."""
    source = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{source}"
    return subprocess.run(
        [sys.executable, "-c", source, log, "cpu", "0"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_behind_a_job_the_signal_is_as_before(tmp_path):
    ignored = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    behind = f"{ignored}{DEVICE_JOB}assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN\n"
    assert subprocess.run([sys.executable, "-c", behind, tmp_path / "job.log", "cpu", "0"], check=False).returncode == 0


def test_a_job_without_devices_uses_the_cpu(tmp_path):
    assert run_job(tmp_path / "job.log", "cpu", 0, {}).returncode == 0
    lines = (tmp_path / "job.log").read_text().splitlines()
    assert lines[:3] == [f"node {socket.gethostname()}", "devices given: none", "device: cpu"]


@pytest.mark.parametrize(
    ("device", "num_leases", "environment", "said"),
    [
        ("npu", 0, {}, "ERROR: device: requested npu, found none"),
        ("auto", 0, {"ASCEND_RT_VISIBLE_DEVICES": "0"}, "ERROR: device: auto found only the CPU, but"),
        ("cpu", 3, GIVEN, "ERROR: devices: the profile gives 3 of this machine's devices to a job, found 2"),
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


def test_a_full_disk_is_recognised_by_what_each_library_reports():
    """torch.save raises a second error while it handles the first, and only the first one is about the disk."""

    def torch_save():
        try:
            raise RuntimeError("basic_ios::clear: iostream error")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 172800 vs 172688")

    def polars():
        raise OSError(errno.ENOSPC, "No space left on device")

    def safetensors():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for writer in (torch_save, polars, safetensors):
        with (
            pytest.raises(StorageError, match=r"^no space left on device for the checkpoint$"),
            disk_errors("the checkpoint"),
        ):
            writer()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.EACCES, "Permission denied")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error.args[-1])), disk_errors("x"):
        raise error


def test_the_file_lies_beside_the_logs(tmp_path):
    log = tmp_path / "results" / "logs" / "train" / "base_E5_seed0.log"
    assert costs_file(log) == tmp_path / "results" / "benchmarks" / "train" / "base_E5_seed0.tsv"


def test_time_memory_and_work_of_a_body(tmp_path):
    path = tmp_path / "benchmarks" / "job.tsv"
    with measured_costs(path):
        block = bytearray(64_000_000)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(0.2)
    found = read_cost(path)
    assert 0.2 <= found.seconds < 60
    assert found.peak_mb > 64


def test_the_work_of_other_processes_counts(tmp_path, monkeypatch):
    """Of one that is waited for, and of one that still runs at the end, as the workers of Ray do."""
    monkeypatch.setattr(jobs, "_SECONDS_BETWEEN_SAMPLES", 0.1)
    before = read_after(tmp_path / "none.tsv")
    with measured_costs(tmp_path / "waited.tsv"):
        subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert read_cost(tmp_path / "waited.tsv").cpu_seconds - before.cpu_seconds >= 0.5
    with measured_costs(tmp_path / "running.tsv"):
        other = subprocess.Popen([sys.executable, "-c", BUSY + "\nprint()\ninput()"], stdin=-1, stdout=-1)
        other.stdout.readline()
        time.sleep(0.5)
    other.communicate(b"\n")
    assert read_cost(tmp_path / "running.tsv").cpu_seconds - before.cpu_seconds >= 0.5


def read_after(path):
    with measured_costs(path):
        pass
    return read_cost(path)


def test_a_body_that_fails_leaves_no_costs(tmp_path):
    with pytest.raises(ValueError, match="failed"), measured_costs(tmp_path / "job.tsv"):
        raise ValueError("failed")
    assert not (tmp_path / "job.tsv").exists()
