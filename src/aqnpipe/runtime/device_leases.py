"""Device leases on one machine without a scheduler: a device belongs to the job that holds the lock on its file.

The kernel frees a lock when the process that holds it ends, however it ends, so no lease outlives its job.
"""

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aqnpipe.device import DeviceKind
from aqnpipe.errors import DeviceError

LEASES = Path("/tmp/aqnpipe-device-leases")  # noqa: S108 - locks only, nothing is read from it
"""One folder per machine, for the jobs of all studies and users."""


@contextmanager
def lease_devices(
    folder: Path, kind: DeviceKind, ids: Sequence[str], count: int, seconds_between_tries: float
) -> Iterator[tuple[str, ...]]:
    """Hold `count` of the devices `ids` of a kind while the body runs; wait until so many are free.

    A job takes all that it needs or none, so that two jobs never wait for each other. DeviceError if the lock files
    cannot be opened.
    """
    held = _try_to_hold(folder, kind, ids, count)
    while held is None:
        time.sleep(seconds_between_tries)
        held = _try_to_hold(folder, kind, ids, count)
    try:
        yield tuple(held)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _try_to_hold(folder: Path, kind: DeviceKind, ids: Sequence[str], count: int) -> dict[str, int] | None:
    """Return the lock file descriptors of `count` free devices by id; None, holding nothing, if fewer are free."""
    held: dict[str, int] = {}
    for name in ids:
        if len(held) == count:
            break
        descriptor = _open(folder, f"{kind}-{name}.lock")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            held[name] = descriptor
    if len(held) == count:
        return held
    for descriptor in held.values():
        os.close(descriptor)
    return None


def _open(folder: Path, name: str) -> int:
    """Open a lock file, made if need be so that every user can lock it."""
    path = folder / name
    try:
        try:
            folder.mkdir()
            folder.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO | stat.S_ISVTX)
        except FileExistsError:
            pass
        try:
            # Without O_CREAT first: in a sticky folder the kernel refuses O_CREAT on another user's file.
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise DeviceError(f"{path}: cannot be opened as a lock file: {error.strerror}") from error
