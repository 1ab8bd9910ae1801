"""File locks: one process per file, freed when it dies, with a record of the last holder."""

import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aqnpipe.errors import RunLockedError
from aqnpipe.runtime.locks import FileLock, remove_scratch, run_lock

HOLDER = """
import sys, time
from pathlib import Path
from aqnpipe.runtime.locks import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire()
lock.record_holder()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def holder(path):
    """Another process that holds the lock and has recorded itself."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_one_open_file_at_a_time_has_the_lock(path):
    with FileLock(path) as second:
        with FileLock(path) as first:
            assert first.acquire()
            assert first.acquire(), "the holder may ask again"
            assert not second.acquire()
        assert second.acquire(), "closing the file frees the lock"


def test_another_process_keeps_the_lock_until_it_is_killed(path, holder):
    with FileLock(path) as lock:
        assert not lock.acquire()
        holder.kill()
        holder.wait()
        assert lock.acquire()


def test_the_file_names_the_last_holder_even_after_its_death(path, holder):
    with FileLock(path) as lock:
        for is_alive in (True, False):
            found = lock.last_holder()
            assert (found.pid, found.host) == (holder.pid, socket.gethostname())
            assert abs((datetime.now(UTC) - datetime.fromisoformat(found.since)).total_seconds()) < 60
            assert lock.describe_holder() == f"process {holder.pid} on {socket.gethostname()} (since {found.since})"
            if is_alive:
                holder.kill()
                holder.wait()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": 1}', "\0" * 500])
def test_without_a_readable_record_the_holder_is_another_process(path, content):
    path.write_text(content)
    with FileLock(path) as lock:
        assert lock.last_holder() is None
        assert lock.describe_holder() == "another process"


def test_a_record_replaces_a_longer_one(path):
    path.write_text('{"pid": 1, "host": "' + "h" * 200 + '", "since": "2026-01-01"}')
    with FileLock(path) as lock:
        assert lock.last_holder().pid == 1
        assert lock.acquire()
        lock.record_holder()
        assert lock.last_holder().pid == os.getpid()


def test_a_lock_on_a_removed_or_replaced_file_is_not_current(path):
    with FileLock(path) as lock:
        assert lock.acquire()
        assert lock.is_current()
        path.unlink()
        assert not lock.is_current()
        with FileLock(path) as other:
            assert other.acquire(), "another file, although it has the same name"
            assert other.is_current()
            assert not lock.is_current()


def test_a_read_only_lock_excludes_others_and_leaves_the_file_alone(path):
    path.write_text("of somebody else")
    with FileLock(path, read_only=True) as lock, FileLock(path) as other:
        assert lock.acquire()
        assert not other.acquire()
        with pytest.raises(OSError, match="Bad file descriptor"):
            lock.record_holder()
    assert path.read_text() == "of somebody else"


def test_a_read_only_lock_creates_a_missing_file(path):
    with FileLock(path, read_only=True) as lock:
        assert lock.acquire()
    assert path.read_bytes() == b""


def test_a_link_is_not_followed(path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileLock(path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("read_only", [True, False])
def test_a_pipe_is_no_lock_and_is_not_waited_for(path, read_only):
    """It has no place for the name of a holder."""
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        FileLock(path, read_only=read_only)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_lock_a_file_in_a_sticky_folder_but_only_read_only():
    """As device leases do in /tmp."""
    nobody = 65534
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX)
        with FileLock(folder / "lock", read_only=True) as lock:
            assert (folder / "lock").stat().st_mode & stat.S_IROTH
            assert _as_user(nobody, folder / "lock") == {"read_only": "locked", "writing": "Permission denied"}
            assert lock.acquire()
            assert _as_user(nobody, folder / "lock") == {"read_only": "held", "writing": "Permission denied"}


def _as_user(user: int, path: Path) -> dict[str, str]:
    """Try to lock `path` both ways in a process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.seteuid(user)
        os.write(writing, f"{_try(path, True)}|{_try(path, False)}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answers:
        return dict(zip(("read_only", "writing"), answers.read().split("|"), strict=True))


def _try(path: Path, read_only: bool) -> str:
    try:
        with FileLock(path, read_only=read_only) as lock:
            return "locked" if lock.acquire() else "held"
    except OSError as error:
        return error.strerror


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
        "from aqnpipe.runtime.locks import run_lock\n"
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

    monkeypatch.setattr("aqnpipe.runtime.locks.fcntl.flock", removed_first)
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
