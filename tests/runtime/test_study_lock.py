"""The study's lock: the locks of a killed Snakemake are removed, those of a running one stay."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from aqnpipe.artifacts.files import remove_staged
from aqnpipe.config.base import RESULT_FOLDERS
from aqnpipe.errors import RunLockedError, StorageError
from aqnpipe.runtime.locks import hold_study, recover_study

HOLD = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.locks import hold_study
hold_study(sys.argv[1], Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Results are relative to the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def snakemake(tmp_path):
    """Return Snakemake's folder after kills in two studies, `results` and `results/smoke`."""
    locks = tmp_path / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (locks / "0.input.lock").write_text("config/published.yaml\nresults/data/train.parquet\n")
    (locks / "0.output.lock").write_text("results/report.html\nresults/summary.md\n")
    (locks / "1.output.lock").write_text("results/smoke/report.html\nresults/smoke/eval/base/E5/seed0/step1.parquet\n")
    return tmp_path / ".snakemake"


@pytest.fixture
def other():
    """Return a function that starts another process which holds a study."""
    started = []

    def start(results, snakemake):
        process = subprocess.Popen([sys.executable, "-c", HOLD, results, snakemake], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_every_folder_that_the_workflow_writes_results_to_is_known():
    rules = [path.read_text() for path in (Path(__file__).parents[2] / "workflow" / "rules").glob("*.smk")]
    written = {name for text in rules for name in re.findall(r"\{RESULTS\}/(\w+)/", text)}
    assert written - {"logs", "benchmarks", "scratch"} == set(RESULT_FOLDERS) - {"jobs"}


def locks(snakemake):
    return sorted(path.name for path in (snakemake / "locks").iterdir())


def record(snakemake, results, host):
    path = snakemake / "aqnpipe" / f"{quote(results, safe='')}.lock"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"pid": 1, "host": host, "since": "2026-01-01"}))
    return path


def test_a_killed_processs_locks_go_and_other_studies_stay(snakemake, other):
    process = other("results", snakemake)
    process.kill()
    process.wait()
    assert recover_study("results", snakemake) is None
    assert locks(snakemake) == ["1.output.lock"]
    record(snakemake, "results/smoke", socket.gethostname())
    assert recover_study("results/smoke", snakemake) is None
    assert locks(snakemake) == []


def test_a_living_processs_locks_stay_and_it_is_named(snakemake, other):
    process = other("results", snakemake)
    line = recover_study("results", snakemake)
    assert line.startswith(f"results: process {process.pid} on {socket.gethostname()} (since ")
    assert len(locks(snakemake)) == 3
    with pytest.raises(RunLockedError, match=f"process {process.pid} "):
        hold_study("results", snakemake)


def test_another_folder_with_the_same_results_is_locked_out_and_other_results_are_not(tmp_path, other):
    results = tmp_path / "shared" / "results"
    process = other(str(results), tmp_path / "a" / ".snakemake")
    line = recover_study(str(results), tmp_path / "b" / ".snakemake")
    assert line.startswith(f"{results}: process {process.pid} on ")
    with pytest.raises(RunLockedError, match=f"process {process.pid} "):
        hold_study(os.path.relpath(results), tmp_path / "b" / ".snakemake")
    for name in ("results/a", "results_a"):
        other(name, tmp_path / "a" / ".snakemake")


@pytest.mark.parametrize("host", ["elsewhere", None])
def test_locks_that_another_machine_may_have_made_stay(snakemake, host):
    path = record(snakemake, "results", host) if host else None
    before = path.read_text() if path else None
    assert recover_study("results", snakemake) is None
    assert len(locks(snakemake)) == 3
    assert path is None or path.read_text() == before, "a process that only looks must not become the last holder"


def test_a_study_without_locks_is_recorded_before_snakemake_locks_it(tmp_path):
    assert recover_study("results/x", tmp_path / ".snakemake") is None
    found = json.loads((tmp_path / ".snakemake" / "aqnpipe" / "results%2Fx.lock").read_text())
    assert (found["pid"], found["host"]) == (os.getpid(), socket.gethostname())


def test_a_damaged_record_is_taken_for_none(snakemake):
    record(snakemake, "results", "x").write_text("[")
    assert recover_study("results", snakemake) is None
    assert len(locks(snakemake)) == 3


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        recover_study("results", tmp_path / "file")
    with pytest.raises(StorageError, match=r"file/logs/study\.lock: cannot be written"):
        recover_study("file", tmp_path / ".snakemake")


def test_pipes_in_the_place_of_locks_are_not_waited_for(tmp_path, snakemake):
    os.mkfifo(snakemake / "locks" / "2.input.lock")
    assert recover_study("results", snakemake) is None
    (tmp_path / "results" / "logs" / "study.lock").unlink()
    os.mkfifo(tmp_path / "results" / "logs" / "study.lock")
    with pytest.raises(StorageError, match=r"study\.lock: cannot be written \(not a regular file\)"):
        hold_study("results", snakemake)


def test_what_killed_jobs_were_writing_is_removed_and_nothing_else(tmp_path):
    for name in (".report.html.abc.staged", "eval/base/E5/.step1.parquet.x.staged", "models/.base.y.staged"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "half").write_text("")
    for name in ("eval/base/E5/step1.parquet", "smoke/.report.html.z.staged/half", "runs/.notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    remove_staged(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["eval/base/E5/step1.parquet", "runs/.notes", "smoke/.report.html.z.staged/half"]


def test_results_from_the_future_get_the_time_of_now_and_others_keep_theirs(tmp_path):
    results = tmp_path / "results"
    now = time.time()
    times = {"claims.json": now + 3600, "eval/base/step1.parquet": now + 1e6, "data/test.parquet": now - 3600}
    for name, seconds in (times | {"smoke/claims.json": now + 3600}).items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text("x")
        os.utime(results / name, (seconds, seconds))
    recover_study(str(results), tmp_path / ".snakemake")
    for name in ("claims.json", "eval/base/step1.parquet"):
        assert now <= (results / name).stat().st_mtime <= time.time()
    for name, seconds in (("data/test.parquet", now - 3600), ("smoke/claims.json", now + 3600)):
        assert (results / name).stat().st_mtime == pytest.approx(seconds, abs=1)
