"""Locks on files, held by one process at a time; the kernel frees them when the process ends, even if it is killed.

One is the lock of a run's scratch folder. Another is that of a study: one Snakemake works on it at a time, and a killed
one leaves it free. Snakemake's own locks are files, which remain when it is killed. The kernel lock beside them is
freed then. If a process can acquire it, no other Snakemake on this machine works on the study, and the remaining files
are stale. A second kernel lock lies in the results, which a Snakemake in another folder may write to as well.

Kernel locks hold between machines where the file system passes them on: NFS unless it is mounted with `local_lock`,
Lustre if it is mounted with `flock`. Elsewhere they hold on one machine. Imports no torch, so Snakemake can use it.

The package `filelock` does not fit: it empties the file on every attempt and needs write access to it. Here the file
names its holder, and device leases lock files that belong to other users.
"""

import errno
import fcntl
import io
import itertools
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from aqnpipe.config.base import RESULT_FOLDERS
from aqnpipe.errors import RunLockedError, StorageError

_HOLDER_BYTES = 500


@dataclass(frozen=True)
class Holder:
    """The process that last acquired a lock."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        """Return the process in words, for messages."""
        return f"process {self.pid} on {self.host} (since {self.since})"


class FileLock(io.FileIO):
    """An open lock file. It is not locked until `acquire` returns True; closing it frees the lock.

    A missing file is created. With `read_only` the lock never writes to the file, so that it may belong to another
    user. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        super().__init__(_open(path, os.O_RDONLY, 0o644) if read_only else _open(path, os.O_RDWR, 0o666))

    def acquire(self) -> bool:
        """Try to acquire the lock without waiting; return False if another process holds it."""
        try:
            fcntl.flock(self.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_current(self) -> bool:
        """Return True if the path still names the open file: it may have been removed before it was locked."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fileno()))
        except FileNotFoundError:
            return False

    def record_holder(self) -> None:
        """Record this process in the file as the last holder."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), since)))
        # A single write covers the whole old record, so that a kill cannot leave a mix of both.
        os.pwrite(self.fileno(), text.encode().ljust(_HOLDER_BYTES), 0)

    def last_holder(self) -> Holder | None:
        """Return the process that last recorded itself in the file; None if there is no readable record."""
        with suppress(ValueError, TypeError):
            return Holder(**json.loads(os.pread(self.fileno(), _HOLDER_BYTES, 0)))
        return None

    def describe_holder(self) -> str:
        """Return the last holder in words; `another process` if there is no record."""
        return str(self.last_holder() or "another process")


def _open(path: Path, access: int, mode: int) -> int:
    # A pipe has no place where a holder could be recorded, and must not be waited for.
    flags = access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # First without O_CREAT: in a sticky folder the kernel refuses O_CREAT on another user's file.
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


@contextmanager
def run_lock(scratch: Path) -> Iterator[None]:
    """Hold the lock of a run's scratch folder while the body runs; RunLockedError names the process that holds it."""
    scratch.mkdir(parents=True, exist_ok=True)
    with FileLock(scratch / "lock") as lock:
        if not lock.acquire():
            raise RunLockedError(f"{scratch}: another process works on this run: {lock.describe_holder()}")
        if not lock.is_current():
            raise RunLockedError(f"{scratch}: another process has just finished this run; start again")
        lock.record_holder()
        yield


def remove_locked(scratch: Path) -> None:
    """Remove a scratch folder whose lock this process holds.

    NFS keeps a deleted file that is open, here the lock, under another name, so the folder itself may stay.
    """
    shutil.rmtree(scratch, ignore_errors=True)


def remove_scratch(scratches: Path) -> None:
    """Remove the scratch folder of every finished run under `scratches` that no process works on.

    Call this only after Snakemake has recorded that the runs are done: until then it may delete their outputs, and
    the scratch folder restores them. Interrupted runs keep their scratch folders.
    """
    for finished in scratches.glob("*/*/finished.json"):
        scratch = finished.parents[1]
        with suppress(RunLockedError), run_lock(scratch):
            remove_locked(scratch)
    with suppress(OSError):
        scratches.rmdir()


SNAKEMAKE = Path(".snakemake")


def recover_study(results: str, snakemake: Path = SNAKEMAKE) -> str | None:
    """Remove stale locks and correct future file times, left in a study by a killed process or a wrong clock.

    Returns one line that names the process working on the study, or None if there is none. Snakemake's locks are
    removed if the process that made them ran on this machine and is dead; locks of other studies or machines stay.
    Files dated in the future get the current time, because Snakemake fails a job whose outputs are older than its
    inputs. Raises StorageError if a file cannot be changed.
    """
    with _in_results(results) as other, _beside_snakemake(results, snakemake) as lock:
        try:
            for each in (other, lock):
                if not each.acquire():
                    return f"{results}: {each.describe_holder()} works on this study"
            files = (path for path in (snakemake / "locks").glob("*.lock") if path.is_file())
            stale = [path for path in files if _is_of(path, results)]
            holder = lock.last_holder()
            if stale and (holder is None or holder.host != socket.gethostname()):
                return None
            for path in stale:
                path.unlink(missing_ok=True)
            _reset_future_times(Path(results))
            lock.record_holder()
        except OSError as error:
            raise StorageError(f"{error.filename}: cannot be changed ({error.strerror})") from error
    return None


def hold_study(results: str, snakemake: Path = SNAKEMAKE) -> None:
    """Hold the study's lock until this process ends; RunLockedError names the process that already holds it."""
    hold_results(results)
    _hold(results, _beside_snakemake(results, snakemake))


def hold_results(results: str) -> None:
    """Hold the lock in the results alone; otherwise as `hold_study`."""
    _hold(results, _in_results(results))


def _hold(results: str, lock: FileLock) -> None:
    if not lock.acquire():
        raise RunLockedError(f"{results}: {lock.describe_holder()} works on this study")
    lock.record_holder()
    # A second descriptor of the open file, never closed: the kernel frees the lock when the process ends.
    os.dup(lock.fileno())


def _reset_future_times(results: Path) -> None:
    now = time.time()
    walked = itertools.chain.from_iterable(os.walk(results / folder) for folder in RESULT_FOLDERS)
    nested = (Path(where, name) for where, _, names in walked for name in names)
    for path in itertools.chain(results.glob("*"), nested):
        # A job that outlived its Snakemake may be renaming files there.
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime > now:
                os.utime(path, (now, now))


def _in_results(results: str) -> FileLock:
    return _opened(Path(results) / "logs" / "study.lock")


def _beside_snakemake(results: str, snakemake: Path) -> FileLock:
    return _opened(snakemake / "aqnpipe" / f"{quote(results, safe='')}.lock")


def _opened(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def _is_of(lock: Path, results: str) -> bool:
    """Return True if one of Snakemake's lock files names files of the study."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    names = [line.removeprefix(f"{results}/") for line in lines if line.startswith(f"{results}/")]
    return any("/" not in name or name.split("/")[0] in RESULT_FOLDERS for name in names)
