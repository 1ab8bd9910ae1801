"""Seconds, memory and processor time of a job, measured by itself."""

import subprocess
import sys
import time

import pytest

from aqnpipe.report.inputs import read_cost
from aqnpipe.runtime import jobs
from aqnpipe.runtime.jobs import costs_file, measured_costs

BUSY = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


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
