"""Digests of files, and what differs between two records of a job. What Snakemake plans by them: tests/workflow."""

import os
import time

import pytest

from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.errors import EXIT_USER_ERROR
from aqnpipe.runtime import job_records
from aqnpipe.runtime.job_records import FileDigests, JobRecord, JobRecords

RECORD = JobRecord(parameters="p", script="s", inputs={"a": "1", "b": "2"}, outputs={"c": "3"})


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, in order."""
    found = []
    monkeypatch.setattr(job_records, "sha256_of_file", lambda path: (found.append(path.name), sha256_of_file(path))[1])
    return found


@pytest.fixture
def settled(monkeypatch):
    """Files count as settled at once."""
    monkeypatch.setattr(job_records, "_NS_UNTIL_SETTLED", -(10**12))


def written(path, content):
    path.write_bytes(content)
    return str(path)


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_once_by_all_processes_until_it_changes(tmp_path, reads):
    path = written(tmp_path / "a", b"one")
    first = FileDigests(tmp_path / "cache.json")
    digest = first(path)
    first.save()
    later = FileDigests(tmp_path / "cache.json")
    assert first(path) == later(path) == digest
    assert reads == ["a"]
    written(tmp_path / "a", b"two")
    assert later(path) != digest
    assert reads == ["a", "a"]


@pytest.mark.usefixtures("settled")
def test_a_change_that_keeps_size_and_time_is_seen(tmp_path):
    path = written(tmp_path / "a", b"one")
    digests, at = FileDigests(tmp_path / "cache.json"), os.stat(path)
    before = digests(path)
    time.sleep(0.05)  # longer than a tick of the file system's clock
    written(tmp_path / "a", b"two")
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert digests(path) != before


def test_a_file_written_just_now_is_read_again(tmp_path, reads):
    """It may change once more in the same tick of the clock."""
    path = written(tmp_path / "a", b"one")
    digests = FileDigests(tmp_path / "cache.json")
    assert digests(path) == digests(path)
    assert reads == ["a", "a"]


def test_a_missing_file_has_no_digest_and_a_damaged_cache_is_none(tmp_path):
    written(tmp_path / "cache.json", b'{"a": [1, 2')
    digests = FileDigests(tmp_path / "cache.json")
    assert digests(str(tmp_path / "a")) is None
    digests.save()


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        ({}, []),
        ({"parameters": "q"}, ["parameters"]),
        ({"script": "t"}, ["script"]),
        ({"inputs": {"b": "2", "a": "1"}}, []),
        ({"inputs": {"a": "1", "b": "9"}}, ["input b"]),
        ({"inputs": {"a": "1"}}, ["input b"]),
        ({"inputs": {"a": "1", "b": "2", "d": "4"}}, ["input d"]),
        ({"outputs": {"c": None}}, ["output c"]),
    ],
)
def test_every_difference_between_records_is_named(change, differences):
    assert RECORD.differences(RECORD.model_copy(update=change)) == differences


class Locked(JobRecords):
    """Records of a study whose files another Snakemake has locked, or none."""

    def __init__(self, locks):
        self._results, self.kept, self.unlock = "results/a", locks, lambda: self.kept.clear()

    def all_inputfiles(self):
        return ["results/a/data"]

    all_outputfiles = all_inputfiles

    def _read_locks(self):
        return list(self.kept)

    def _write_locks(self, kind, files):
        self.kept += [(kind, file) for file in files]


def test_a_second_snakemake_ends_with_one_line_and_leaves_the_lock_of_the_first(capsys):
    first = [("output", "results/a/data")]
    with pytest.raises(SystemExit) as ended, Locked(first).lock():
        pass
    assert ended.value.code == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith("ERROR: results/a: another Snakemake works on this study; if it was killed")
    assert len(said.splitlines()) == 1
    assert first == [("output", "results/a/data")]


def test_without_another_snakemake_the_lock_is_held_and_freed():
    records = Locked([])
    with records.lock():
        assert records.locked
    assert not records.locked
