"""One Snakemake per study, and no lock that outlives it: what a killed one left behind is put away by the next.

Snakemake's own locks are files, which stay when it is killed. Beside them stands a lock of the kernel's, which does
not: whoever gets it knows that no other Snakemake of this machine works on the study.
"""

import fcntl
import itertools
import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from aqnpipe.errors import RunLockedError, StorageError

SNAKEMAKE = Path(".snakemake")
FOLDERS = ("data", "models", "srdd", "runs", "eval", "fault_loss")
"""What the results of a study have besides files; another study's results may be in a folder beside these."""

_RECORD_BYTES = 500


def mend_study(results: str, snakemake: Path = SNAKEMAKE) -> str | None:
    """Put right what a killed process or a wrong clock left of a study; if a process works on it, say so in one line.

    Snakemake's locks go if the process that made them was of this machine and is dead; those of other studies, or made
    by another machine, stay. Results from the future get the time of now: they were made while the clock was ahead, and
    Snakemake fails a job whose outputs are older than its inputs. Raises StorageError if something cannot be written.
    """
    descriptor = _open(results, snakemake)
    try:
        if not _locked(descriptor):
            return f"{results}: {_holder(descriptor)} works on this study"
        locks = [path for path in (snakemake / "locks").glob("*.lock") if _is_of(path, results)]
        if locks and _recorded(descriptor).get("host") != socket.gethostname():
            return None
        for path in locks:
            path.unlink(missing_ok=True)
        _settle_times(Path(results))
        _record(descriptor)
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot be changed ({error.strerror})") from error
    finally:
        os.close(descriptor)
    return None


def hold_study(results: str, snakemake: Path = SNAKEMAKE) -> None:
    """Hold the study's lock until this process ends, however it ends; RunLockedError naming the process that has it."""
    descriptor = _open(results, snakemake)
    if not _locked(descriptor):
        raise RunLockedError(f"{results}: {_holder(descriptor)} works on this study")
    _record(descriptor)


def _settle_times(results: Path) -> None:
    now = time.time()
    inner = (Path(where, name) for folder in FOLDERS for where, _, names in os.walk(results / folder) for name in names)
    for path in itertools.chain(results.glob("*"), inner):
        # A job that outlived its Snakemake may be at work there.
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_mtime > now:
                os.utime(path, (now, now))


def _open(results: str, snakemake: Path) -> int:
    path = snakemake / "aqnpipe" / f"{results.replace('/', '_')}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from error


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record(descriptor: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
    # One write over the whole of the old one, so that a kill does not leave half of it.
    os.pwrite(descriptor, text.encode().ljust(_RECORD_BYTES), 0)


def _recorded(descriptor: int) -> dict[str, str | int]:
    try:
        found = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _holder(descriptor: int) -> str:
    holder = _recorded(descriptor)
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} (since {holder.get('since')})"


def _is_of(lock: Path, results: str) -> bool:
    """Tell whether a lock file of Snakemake names files of the study."""
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    inner = [line.removeprefix(f"{results}/") for line in lines if line.startswith(f"{results}/")]
    return any("/" not in name or name.split("/")[0] in FOLDERS for name in inner)
