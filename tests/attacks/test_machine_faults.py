"""Faults of the machine at chosen moments of a whole study; the random ones are benchmarks/pipeline_faults.py.

Snakemake and its jobs run as they do for users, each in a process of its own, forked from one that has their imports
made. Afterwards a plain `snakemake` ends with the bytes of an undisturbed study.
"""

import os
import random
import time

import pytest
from faulted_study import FaultedStudy, differences
from pipeline_faults import Reference, one_byte

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


def test_two_at_once_and_a_clock_that_was_ahead_or_behind(study, expected):
    began = time.time()
    first, second = study.start(), study.start()
    codes = [first.wait(), second.wait()]
    assert sorted(codes)[0] == 0
    for run, code in zip((first, second), codes, strict=True):
        # By the study's lock, or by Snakemake's own where the first had just taken it.
        assert code == 0 or "works on this study" in run.said() or "another Snakemake works" in run.said()
    assert differences(study.bytes_of_results(), expected) == []
    # All that was written while the clock was a week ahead seems to be of the future, and then of the past.
    for week in (7 * 86400, -7 * 86400):
        study.shift_times(week, began)
        for name in ("claims.json", "report.html"):
            (study.results / name).unlink()
        finishes(study, expected)
        assert "Nothing to be done" in study.run("--dry-run")[1]


def test_one_changed_byte_of_every_artifact_is_found_and_made_again(study, expected):
    """It raises for one that `aqnpipe verify` does not name; of all at once, all are made again."""
    faults = one_byte(study, random.Random(0), Reference(expected, 0.0, 0, 0))
    assert len(faults) == sum(map(bool, expected.values())) > 40
    assert {"data", "eval", "models", "runs", "srdd"} < {place for _, place in faults}
    finishes(study, expected)


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
