"""The edge between Snakemake and the stages: log files, devices, progress on the terminal, and errors as one line."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from aqnpipe.device import RequestedDevice, resolve_device
from aqnpipe.errors import AqnpipeError, StorageError
from aqnpipe.runtime.device_allocation import allocated_devices, place_of_job
from aqnpipe.runtime.disk_errors import disk_errors

Say = Callable[[str], None]


@contextmanager
def logged_job(log: Path) -> Iterator[Say]:
    """Send everything that the body prints (C libraries too) to `log`; yield a function for lines on the terminal too.

    An AqnpipeError ends the process with its one line and its exit code (2 for most). Any other exception is a bug: its
    traceback goes to the log, which Snakemake names and shows.
    """
    terminal = os.dup(sys.stderr.fileno())
    with _opened(log) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())

        def say(line: str) -> None:
            os.write(terminal, f"{line}\n".encode())
            print(line, flush=True)  # noqa: T201 - goes to the log file

        try:
            with disk_errors("what this job writes"):
                print(place_of_job(), flush=True)  # noqa: T201
                yield say
        except AqnpipeError as error:
            for line in (f"ERROR: {error}", f"next: {error.advice}", f"log: {log}"):
                # The log may be on the disk that is full.
                with suppress(OSError):
                    say(line)
            sys.exit(error.exit_code)
        finally:
            with suppress(OSError):
                sys.stdout.flush()
            with suppress(OSError):
                sys.stderr.flush()


def _opened(log: Path) -> TextIO:
    """Open the log of a job; ends the process with one line where that cannot be done."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        failure = StorageError(f"{log}: cannot be written ({error.strerror})")
        sys.stderr.write(f"ERROR: {failure}\nnext: {failure.advice}\n")
        sys.exit(failure.exit_code)


@contextmanager
def logged_device_job(log: Path, requested: RequestedDevice, num_leases: int = 0) -> Iterator[Say]:
    """`logged_job` for a job that computes on a device: its log says what it was given and what it uses.

    num_leases: devices to lease from a machine without a scheduler. Stages import torch, and torch may look at the
    devices at once: import them in the body. A device that was requested and is not there ends the job.
    """
    with logged_job(log) as say, allocated_devices(requested, num_leases) as allocation:
        print(allocation)  # noqa: T201
        device = resolve_device(requested)
        unused = " (a rehearsal: the devices given are not used)" if device.kind == "cpu" and allocation.ids else ""
        print(f"device: {device.label}{unused}", flush=True)  # noqa: T201
        yield say
