"""One process per run: the lock of a scratch folder, and which scratch folders may be removed."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from aqnpipe.errors import RunLockedError
from aqnpipe.runtime.file_lock import remove_scratch, run_lock


def test_the_lock_is_exclusive_and_says_who_has_it(tmp_path):
    with (
        run_lock(tmp_path / "scratch"),
        pytest.raises(RunLockedError, match=rf"process {os.getpid()} on \S+ \(since 20\S+\)"),
        run_lock(tmp_path / "scratch"),
    ):
        pass
    with run_lock(tmp_path / "scratch"):
        pass


def test_a_dead_process_has_no_lock(tmp_path):
    code = (
        "import sys, os, pathlib\n"
        "from aqnpipe.runtime.file_lock import run_lock\n"
        "with run_lock(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == -9
    assert json.loads((tmp_path / "lock").read_text())["pid"] != os.getpid()
    with run_lock(tmp_path):
        pass


def test_a_lock_whose_file_was_removed_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    flock = fcntl.flock

    def removed_first(file, operation):
        (tmp_path / "lock").unlink()
        flock(file, operation)

    monkeypatch.setattr("aqnpipe.runtime.file_lock.fcntl.flock", removed_first)
    with pytest.raises(RunLockedError, match="start again"), run_lock(tmp_path):
        pass


def test_cleaning_spares_what_is_in_work_or_interrupted(tmp_path):
    for name, is_finished in (("busy", True), ("idle", True), ("interrupted", False)):
        workspace = tmp_path / "scratch" / name / "key"
        workspace.mkdir(parents=True)
        if is_finished:
            (workspace / "finished.json").touch()
    with run_lock(tmp_path / "scratch" / "busy"):
        remove_scratch(tmp_path / "scratch")
    assert {path.name for path in (tmp_path / "scratch").iterdir()} == {"busy", "interrupted"}
    remove_scratch(tmp_path / "scratch")
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["interrupted"]
