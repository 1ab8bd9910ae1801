"""Device leases on a machine without a scheduler: a job owns a device while it holds the lock on the device's file."""

import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aqnpipe.errors import DeviceError
from aqnpipe.runtime.file_lock import FileLock

LEASES = Path("/tmp/aqnpipe-device-leases")  # noqa: S108 - only locks, nothing reads these files
"""One folder per machine, shared by the jobs of all studies and users."""


@contextmanager
def lease_devices(
    folder: Path, kind: str, ids: Sequence[str], count: int, seconds_between_tries: float
) -> Iterator[tuple[str, ...]]:
    """Hold `count` of the devices `ids` of a kind while the body runs; wait until that many are free; yield their ids.

    kind: start of the names of the locks: the kind of device, with what else tells these devices from others.
    A job takes all devices that it needs or none, so two jobs never wait for each other. Raises DeviceError if a lock
    file cannot be opened.
    """
    held = _try_to_hold(folder, kind, ids, count)
    while held is None:
        time.sleep(seconds_between_tries)
        held = _try_to_hold(folder, kind, ids, count)
    try:
        yield tuple(held)
    finally:
        for lock in held.values():
            lock.close()


def _try_to_hold(folder: Path, kind: str, ids: Sequence[str], count: int) -> dict[str, FileLock] | None:
    """Return the locks of `count` free devices by id; None, without holding any lock, if fewer are free."""
    held: dict[str, FileLock] = {}
    with ExitStack() as stack:
        for name in ids:
            if len(held) == count:
                break
            lock = stack.enter_context(_open(folder, f"{kind}-{name.replace('/', '_')}.lock"))
            if lock.acquire():
                held[name] = lock
        if len(held) < count:
            return None
        stack.pop_all()
    return held


def _open(folder: Path, name: str) -> FileLock:
    """Open a lock file; create it and its folder with permissions that let every user lock it."""
    path = folder / name
    try:
        try:
            folder.mkdir()
            folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX)
        except FileExistsError:
            pass
        return FileLock(path, read_only=True)
    except OSError as error:
        raise DeviceError(f"{path}: cannot be opened as a lock file: {error.strerror}") from error
