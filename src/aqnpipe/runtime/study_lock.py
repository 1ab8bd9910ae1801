"""The lock of a study: one Snakemake works on it at a time, and a killed Snakemake leaves it free.

Snakemake's own locks are files, which remain when Snakemake is killed. The kernel lock beside them is freed then. If a
process can acquire it, no other Snakemake on this machine works on the study, and the remaining files are stale. A
second kernel lock lies in the results themselves, which a Snakemake in another folder may write to as well.

Kernel locks hold between machines where the file system passes them on: NFS unless it is mounted with `local_lock`,
Lustre if it is mounted with `flock`. Elsewhere they hold on one machine.
"""

import itertools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from aqnpipe.artifacts.files import RESULT_FOLDERS
from aqnpipe.errors import RunLockedError, StorageError
from aqnpipe.runtime.file_lock import FileLock

SNAKEMAKE = Path(".snakemake")


def recover_study(results: str, snakemake: Path = SNAKEMAKE) -> str | None:
    """Remove stale locks and correct future file times, left in a study by a killed process or a wrong clock.

    Returns one line that names the process working on the study, or None if there is none. Snakemake's locks are
    removed if the process that made them ran on this machine and is dead; locks of other studies or machines stay.
    Files dated in the future get the current time, because Snakemake fails a job whose outputs are older than its
    inputs. Raises StorageError if a file cannot be changed.
    """
    with _open(_in_results(results)) as other, _open(_beside_snakemake(results, snakemake)) as lock:
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


def _hold(results: str, path: Path) -> None:
    lock = _open(path)
    if not lock.acquire():
        raise RunLockedError(f"{results}: {lock.describe_holder()} works on this study")
    lock.record_holder()
    # Never closed: the kernel frees the lock when the process ends.


def _reset_future_times(results: Path) -> None:
    now = time.time()
    nested = (
        Path(where, name)
        for folder in RESULT_FOLDERS
        for where, _, names in os.walk(results / folder)
        for name in names
    )
    for path in itertools.chain(results.glob("*"), nested):
        # A job that outlived its Snakemake may be renaming files there.
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime > now:
                os.utime(path, (now, now))


def _in_results(results: str) -> Path:
    return Path(results) / "logs" / "study.lock"


def _beside_snakemake(results: str, snakemake: Path) -> Path:
    return snakemake / "aqnpipe" / f"{quote(results, safe='')}.lock"


def _open(path: Path) -> FileLock:
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
