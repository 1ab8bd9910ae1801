"""The lock of a run's scratch folder: one process trains a run at a time. Imports no torch, so Snakemake can use it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aqnpipe.errors import RunLockedError
from aqnpipe.runtime.file_lock import FileLock


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
