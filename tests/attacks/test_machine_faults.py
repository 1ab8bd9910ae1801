"""Faults of the machine at chosen moments of a whole study; the random ones are benchmarks/pipeline_faults.py.

Snakemake and its jobs run as they do for users, each in a process of its own, forked from one that has their imports
made. Afterwards a plain `snakemake` ends with the bytes of an undisturbed study.
"""

import os
import time

import pytest
from faulted_study import FaultedStudy, differences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(python, tmp_path_factory):
    """The bytes of an undisturbed study."""
    study = FaultedStudy(python, tmp_path_factory.mktemp("undisturbed") / "study")
    code, said = study.run()
    assert code == 0, said
    return study.bytes_of_results()


@pytest.fixture
def study(python, tmp_path):
    made = FaultedStudy(python, tmp_path / "study")
    yield made
    made.close()


def until_job(run, name, seconds=60):
    """Wait until a job of this rule runs; its process id."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid, job in run.jobs().items():
            if job == name:
                return pid
        assert run.process.poll() is None, run.said()
        time.sleep(0.01)
    raise AssertionError(f"no {name}: {run.said()}")


def finishes(study, expected):
    code, said = study.run()
    assert code == 0, said
    assert differences(study.bytes_of_results(), expected) == []


def test_kills_of_jobs_of_all_and_of_snakemake_alone(study, expected):
    run = study.start()
    until_job(run, "srdd_diagnose")
    run.kill_all()
    assert list((study.folder / ".snakemake" / "locks").iterdir()), "the locks that the next one has to put away"
    run = study.start()
    run.kill(until_job(run, "train"))
    assert run.wait() != 0
    assert "failed: train: " in run.said()
    run = study.start()
    until_job(run, "evaluate")
    run.kill_snakemake()
    while run.jobs():
        time.sleep(0.02)
    finishes(study, expected)


def test_two_at_once_and_a_clock_that_was_ahead(study, expected):
    began = time.time()
    first, second = study.start(), study.start()
    codes = [first.wait(), second.wait()]
    assert sorted(codes)[0] == 0
    for run, code in zip((first, second), codes, strict=True):
        # By the study's lock, or by Snakemake's own where the first had just taken it.
        assert code == 0 or "works on this study" in run.said() or "cannot be locked" in run.said()
    assert differences(study.bytes_of_results(), expected) == []
    # All that was written while the clock was a week ahead seems to be of the future.
    study.shift_times(7 * 86400, began)
    for name in ("claims.json", "report.html"):
        (study.results / name).unlink()
    finishes(study, expected)
    assert "Nothing to be done" in study.run("--dry-run")[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs the rights of root")
def test_a_full_and_a_read_only_disk(python, tmp_path, expected):
    study = FaultedStudy(python, tmp_path / "study", disk=True)
    try:
        study.disk("size=4m")
        code, said = study.run()
        assert code != 0
        assert "ERROR: no space left on device" in said
        study.disk("size=1g,ro")
        assert study.run()[0] != 0
        study.disk("rw")
        finishes(study, expected)
    finally:
        study.close()
