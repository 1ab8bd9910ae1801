"""Several devices at once: one process per device, each with its own log, and one report of all of them.

Then, if there are at least two of one type, one process per device again, for the collectives between them.

A process of its own per device keeps a crash of one (an illegal address, an exhausted memory) from ending the others.
Processes are new ones, not forks, because neither CUDA nor CANN survives a fork.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from aqnpipe.artifacts.diagnoses import Collectives, DeviceReport, Outcome
from aqnpipe.artifacts.files import read_json
from aqnpipe.cli.diagnose.worker import Order
from aqnpipe.diagnosis.node_reports import INTERRUPTED, of_all_ranks

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_WITHOUT_PROGRESS = 300.0
"""A rank says before every call what it begins. Calls take less than a second, the start minutes on a busy machine."""

_MODULE = "aqnpipe.cli.diagnose.worker"


class Worker:
    """The process of one device, with its order, report and log."""

    def __init__(self, order: Order, logs: Path) -> None:
        self.order = order
        self.log = logs / f"{order.report.stem}.{order.device.replace(':', '-')}.log"
        path = order.report.with_suffix(".order.json")
        path.write_text(order.model_dump_json(), encoding="utf-8")
        with self.log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the parent alone, which passes it on once.
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
                [sys.executable, "-m", _MODULE, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """Return the exit code, below 0 after a signal; None if the process has not ended yet."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask the process to report what it has found and to end."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._process.kill()
        self._process.wait()

    def report(self, *, interrupted: bool) -> DeviceReport:
        """Return what the process reported. A process that failed is an error, unless it had found a fault before."""
        code = self._process.wait()
        found = read_json(self.order.report, DeviceReport) if self.order.report.is_file() else None
        ended = interrupted and code < 0
        if found is None:
            verdict: Outcome = "abstain" if ended else "error"
            reason = INTERRUPTED if ended else self.last_words()
            return DeviceReport(device=self.order.device, hardware=None, verdict=verdict, reason=reason)
        if ended and found.repetition:
            return found.model_copy(update={"repetition": found.repetition.model_copy(update={"interrupted": True})})
        if ended or code == 0:
            return found
        verdict = "fault" if found.verdict == "fault" else "error"
        return found.model_copy(update={"verdict": verdict, "reason": f"{found.reason}; then: {self.last_words()}"})

    def last_line(self) -> str:
        """Return the last line of the log."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "no output")

    def last_words(self) -> str:
        """Return how the process ended, and its last line."""
        code, last = self._process.wait(), self.last_line()
        if last.startswith("ERROR: "):
            return last.removeprefix("ERROR: ")
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {ended}: {last}"


def diagnose_devices(
    order: Order, devices: Sequence[str], logs: Path | None, show_progress: Callable[[str], None]
) -> tuple[list[DeviceReport], Collectives]:
    """Carry out the order on all devices at the same time, then compare the collectives between them.

    logs: folder of the logs, `N.DEVICE.log`. Without one they are kept, in a temporary folder, only if a device could
    not be diagnosed. SIGINT or SIGTERM ends the work with what was found so far; a second one ends it at once.
    """
    folder = Path(tempfile.mkdtemp(prefix="aqnpipe-diagnose-"))
    ordered = [_of_device(order, number, device, folder) for number, device in enumerate(devices)]
    keep = logs is not None
    try:
        with _started(ordered, logs or folder) as (workers, interrupted):
            while running := sum(worker.code is None for worker in workers):
                show_progress(f"{running} of {len(workers)} devices at work")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            reports = [worker.report(interrupted=bool(interrupted)) for worker in workers]
        reason = "interrupted" if interrupted else _why_not_compared(devices, reports)
        if reason:
            collectives = Collectives(verdict=None, reason=reason)
        else:
            show_progress(f"collectives between {len(devices)} devices")
            collectives = _compare_ranks(ordered, logs or folder)
        keep = keep or any(report.verdict == "error" or "; then: " in report.reason for report in reports)
        keep = keep or collectives.verdict == "error"
        return [
            report.model_copy(update={"log": str(worker.log) if keep else None})
            for report, worker in zip(reports, workers, strict=True)
        ], collectives
    finally:
        if logs is not None or not keep:
            shutil.rmtree(folder)


def _of_device(order: Order, number: int, device: str, folder: Path) -> Order:
    """Return the order of one of the devices, with a numbered report in `folder`."""
    reproducer = order.reproducer and order.reproducer / f"{number}.{device.replace(':', '-')}"
    return order.model_copy(update={"device": device, "report": folder / f"{number}.json", "reproducer": reproducer})


@contextmanager
def _started(orders: Sequence[Order], logs: Path) -> Iterator[tuple[list[Worker], list[int]]]:
    """Start a process per order; yield them and the signals that came. In the end none of them runs.

    The first SIGINT or SIGTERM of the body is passed on to the processes as a SIGINT; a second one ends them at once.
    """
    workers: list[Worker] = []
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        restore()
        for worker in workers:
            worker.interrupt()

    try:
        for number in before:
            signal.signal(number, pass_on)
        for order in orders:
            workers.append(Worker(order, logs))
        if came:  # before the last ones were started
            for worker in workers:
                worker.interrupt()
        yield workers, came
    finally:
        restore()
        for worker in workers:
            worker.kill()


def _why_not_compared(devices: Sequence[str], reports: Sequence[DeviceReport]) -> str | None:
    """Return why there is nothing to compare between the devices; None if there is."""
    if len(devices) == 1:
        return "one device"
    if len({device.partition(":")[0] for device in devices}) > 1:
        return "devices of different types"
    failed = [report.device for report in reports if report.verdict == "error"]
    return f"{', '.join(failed)} could not be diagnosed" if failed else None


def _compare_ranks(orders: Sequence[Order], logs: Path) -> Collectives:
    """Run a process per device again, as ranks of one group, and return what they found."""
    ranks = [
        order.model_copy(
            update={"rank": rank, "num_ranks": len(orders), "report": order.report.with_stem(f"rank{rank}")}
        )
        for rank, order in enumerate(orders)
    ]
    with _started(ranks, logs) as (workers, signals):
        problem = _wait_for_ranks(workers, signals)
    if signals:
        return Collectives(verdict=None, reason="interrupted")
    if problem:
        return Collectives(verdict="error", reason=problem)
    return of_all_ranks([read_json(order.report, Collectives) for order in ranks])


def _wait_for_ranks(workers: Sequence[Worker], signals: Sequence[int]) -> str | None:
    """Wait for the ranks to end; return why they cannot, if one has failed or none goes on. Stop at a signal."""
    written, since = [0], time.monotonic()
    while not signals and None in (codes := [worker.code for worker in workers]) and not any(codes):
        now = [worker.log.stat().st_size for worker in workers]
        written, since = now, since if now == written else time.monotonic()
        if time.monotonic() - since > _SECONDS_WITHOUT_PROGRESS:
            places = ", ".join(f"rank {worker.order.rank} in {worker.last_line()}" for worker in workers)
            return f"no rank went on for {_SECONDS_WITHOUT_PROGRESS:.0f} s: {places}"
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    # A rank that a signal ended comes first: the others failed because they missed it.
    failed = sorted((worker for worker in workers if worker.code), key=lambda worker: worker.code or 0)
    return f"rank {failed[0].order.rank}: {failed[0].last_words()}" if failed else None
