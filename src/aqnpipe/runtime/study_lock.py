"""One Snakemake per study, and no lock that outlives it: the next Snakemake removes what a killed one left behind.

Snakemake's own locks are files, which stay when it is killed. The kernel's lock beside them does not: the process that
gets it knows that no other Snakemake of this machine works on the study.
"""

import itertools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from aqnpipe.artifacts.files import RESULT_FOLDERS
from aqnpipe.errors import RunLockedError, StorageError
from aqnpipe.runtime.file_lock import FileLock

SNAKEMAKE = Path(".snakemake")


def recover_study(results: str, snakemake: Path = SNAKEMAKE) -> str | None:
    """Remove stale locks and future file times that a killed process or a wrong clock left in a study.

    Returns one line naming the process that works on the study, if there is one; None otherwise. Snakemake's locks are
    removed if the process that made them ran on this machine and is dead; those of other studies or machines stay.
    Files dated in the future get the current time: Snakemake fails a job whose outputs are older than its inputs.
    Raises StorageError if something cannot be written.
    """
    with _open(results, snakemake) as lock:
        try:
            if not lock.acquire():
                return f"{results}: {lock.describe_holder()} works on this study"
            stale = [path for path in (snakemake / "locks").glob("*.lock") if _is_of(path, results)]
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
    """Hold the study's lock until this process ends, however it ends; RunLockedError naming the process that has it."""
    lock = _open(results, snakemake)
    if not lock.acquire():
        raise RunLockedError(f"{results}: {lock.describe_holder()} works on this study")
    lock.record_holder()
    # Never closed: the kernel frees it with the process.


def _reset_future_times(results: Path) -> None:
    now = time.time()
    inner = (
        Path(where, name)
        for folder in RESULT_FOLDERS
        for where, _, names in os.walk(results / folder)
        for name in names
    )
    for path in itertools.chain(results.glob("*"), inner):
        # A job that outlived its Snakemake may be at work there.
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime > now:
                os.utime(path, (now, now))


def _open(results: str, snakemake: Path) -> FileLock:
    path = snakemake / "aqnpipe" / f"{results.replace('/', '_')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def _is_of(lock: Path, results: str) -> bool:
    """Whether a lock file of Snakemake names files of the study."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    inner = [line.removeprefix(f"{results}/") for line in lines if line.startswith(f"{results}/")]
    return any("/" not in name or name.split("/")[0] in RESULT_FOLDERS for name in inner)
