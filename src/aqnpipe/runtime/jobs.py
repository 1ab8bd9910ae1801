"""How a Snakemake job runs a stage: its log file, its devices, progress on the terminal, and errors as one line.

A job measures its time and memory itself. Snakemake's `benchmark:` follows the process that Snakemake starts, which is
another one for a job that starts warm.
"""

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil
from safetensors import SafetensorError

from aqnpipe.device import RequestedDevice, resolve_device
from aqnpipe.errors import EXIT_TRY_AGAIN, STOPPED, AqnpipeError, DataError, ModelError, StorageError
from aqnpipe.runtime.device_allocation import allocated_devices, place_of_job

Say = Callable[[str], None]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGURG)
"""Signals that a scheduler sends before it ends a training at its time limit.

Slurm sends the signal to every process of the job. With several workers it must be SIGURG, which processes ignore by
default: the other two end Ray's processes, and the workers could no longer write a resume point.
"""

_SECONDS_BETWEEN_SAMPLES = 5.0
_BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024
"""Of `ru_maxrss`."""

_MESSAGES = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "no space left on device",
    errno.EROFS: "read-only file system",
}
_FULL_DISK_MESSAGES = ("No space left on device", "Disk quota exceeded", "iostream error")
"""Messages of libraries that do not raise OSError on a full disk; the last one is all that torch.save reports."""


@contextmanager
def logged_job(
    log: Path, settings: str = "", ends_at: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Iterator[Say]:
    """Send all output of the body (of C libraries too) to `log`; yield a function that also prints on the terminal.

    An AqnpipeError ends the process with one line in the log and the error's exit code (usually 2). Any other exception
    is a bug: its traceback goes to the log. `cli.study_terminal` shows the errors of failed jobs from their logs.
    settings: keys of the study that decide what the job reads, for the advice on an error. ends_at: signals that end
    the job, and an interrupt too, with a line in its log.
    """
    terminal = os.dup(sys.stderr.fileno())
    with _opened(log) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())

        # A shell lets jobs in the background ignore interrupts.
        numbers = [number for number in (signal.SIGINT, *ends_at) if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _end_with_a_line) for number in numbers}

        def say(line: str) -> None:
            os.write(terminal, f"{line}\n".encode())
            print(line, flush=True)  # noqa: T201 - goes to the log file

        try:
            with disk_errors("the output of this job"), measured_costs(costs_file(log)):
                print(place_of_job(), flush=True)  # noqa: T201
                yield say
        except AqnpipeError as error:
            lines = f"ERROR: {error}\nnext: {_advice(error, settings, log)}"
            try:
                print(lines, flush=True)  # noqa: T201 - the terminal of the study shows it from the log, at its end
            except OSError:
                # The log may be on the full disk.
                os.write(terminal, f"{lines}\nlog: {log}\n".encode())
            sys.exit(error.exit_code)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()


def _end_with_a_line(number: int, frame: FrameType | None) -> None:
    """End the job as the signal does, but with the reason in its log."""
    with suppress(OSError):
        # Not by `print`, which the signal may have interrupted.
        os.write(sys.stdout.fileno(), f"ERROR: {STOPPED.format(signal=signal.Signals(number).name)}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(EXIT_TRY_AGAIN)  # by default SIGURG ends nothing


def _advice(error: AqnpipeError, settings: str, log: Path) -> str:
    """Return what the user can do: change settings, or remove a file of the results that the message names."""
    results = str(log).partition("/logs/")[0]
    if not settings or not isinstance(error, DataError | ModelError) or f"{results}/" in str(error):
        return error.advice
    return f"change {settings} in the study, or fix what the message names, then run the same command"


def _opened(log: Path) -> TextIO:
    """Open the log of a job; end the process with one line if that fails."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        failure = StorageError(f"{log}: cannot be written ({error.strerror})")
        sys.stderr.write(f"ERROR: {failure}\nnext: {failure.advice}\n")
        sys.exit(failure.exit_code)


@contextmanager
def logged_device_job(
    log: Path,
    requested: RequestedDevice,
    num_leases: int = 0,
    num_devices: int = 1,
    settings: str = "",
    ends_at: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
) -> Iterator[Say]:
    """Like `logged_job`, for a job that computes on a device; the log names the devices given and used.

    num_leases, num_devices: how many devices the profile lets the job lease, and how many it needs without a profile.
    Import the stage in the body, because stages import torch, which may query the devices at once. A missing device
    ends the job.
    """
    with logged_job(log, settings, ends_at) as say, allocated_devices(requested, num_leases, num_devices) as allocation:
        print(allocation)  # noqa: T201
        device = resolve_device(requested)
        unused = " (a rehearsal: the devices given are not used)" if device.kind == "cpu" and allocation.ids else ""
        print(f"device: {device.label}{unused}", flush=True)  # noqa: T201
        yield say


def costs_file(log: Path) -> Path:
    """Return the file of a job's costs, `benchmarks/RULE/NAME.tsv`, given its log `logs/RULE/NAME.log`."""
    results, _, name = str(log).rpartition("logs/")
    return Path(results, "benchmarks", name).with_suffix(".tsv")


@contextmanager
def measured_costs(path: Path) -> Iterator[None]:
    """Write seconds, peak memory in MB and processor seconds of the body to `path`, unless it raises.

    Memory is the largest sum over this process and its descendants, of samples, and at least this process's own peak.
    """
    start, stop, samples = time.monotonic(), threading.Event(), _Samples()
    sampler = threading.Thread(target=samples.take_until, args=(stop,), daemon=True)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()
    own, waited = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = max(own.ru_maxrss * _BYTES_PER_UNIT, samples.peak)
    # Descendants that others wait for, such as Ray's workers, are in no `rusage` of this process.
    descendants = max(waited.ru_utime + waited.ru_stime, sum(samples.seconds.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = f"{time.monotonic() - start:.2f}\t{peak / 1e6:.1f}\t{own.ru_utime + own.ru_stime + descendants:.2f}"
    path.write_text(f"s\tmax_rss\tcpu_time\n{rows}\n", encoding="utf-8")


@dataclass
class _Samples:
    """Samples of the memory of this process's tree in bytes, and of the processor seconds of its descendants by pid."""

    peak: int = 0
    seconds: dict[int, float] = field(default_factory=dict)

    def take_until(self, stop: threading.Event) -> None:
        """Take samples until `stop` is set."""
        this = psutil.Process(os.getpid())
        while not stop.wait(_SECONDS_BETWEEN_SAMPLES):
            total = this.memory_info().rss
            for process in this.children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_info().rss
                    self.seconds[process.pid] = sum(process.cpu_times()[:2])
            self.peak = max(self.peak, total)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an error of the body that a full or read-only disk caused into a StorageError of one line.

    what: the file or folder that was being written, for the message.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause: BaseException | None = error
        while cause is not None:
            if message := _message(cause):
                raise StorageError(f"{message} for {what}") from error
            cause = cause.__cause__ or cause.__context__
        raise


def _message(error: BaseException) -> str | None:
    """Return the message for an error that the disk caused; None for any other error."""
    if isinstance(error, OSError):
        return _MESSAGES.get(error.errno or 0)
    return _MESSAGES[errno.ENOSPC] if any(words in str(error) for words in _FULL_DISK_MESSAGES) else None
