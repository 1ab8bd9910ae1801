"""Several devices at once: one process per device, each with its own log, and one report of all of them.

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
from types import FrameType

from aqnpipe.artifacts.diagnoses import DeviceReport, Outcome
from aqnpipe.artifacts.files import read_json
from aqnpipe.cli.diagnose.worker import Order
from aqnpipe.diagnosis.device_runs import INTERRUPTED

_SECONDS_BETWEEN_LOOKS = 0.1
_MODULE = "aqnpipe.cli.diagnose.worker"


class Worker:
    """The process of one device, with its order, report and log in `folder`."""

    def __init__(self, order: Order, log: Path) -> None:
        self.order = order
        self.log = log
        path = order.report.with_suffix(".order.json")
        path.write_text(order.model_dump_json(), encoding="utf-8")
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches the parent alone, which passes it on once.
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
                [sys.executable, "-m", _MODULE, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Ask the process to report what it has found and to end."""
        if self.running:
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self.running:
            self._process.kill()
        self._process.wait()

    def report(self, *, interrupted: bool) -> DeviceReport:
        """Return what the process reported. A process that failed is an error, unless it had found a fault before."""
        code = self._process.wait()
        found = read_json(self.order.report, DeviceReport) if self.order.report.is_file() else None
        if interrupted and code < 0:
            return _as_interrupted(found) if found else self._without_report("abstain", INTERRUPTED)
        if code == 0 and found is not None:
            return found
        reason = self._last_words(code)
        if found is None:
            return self._without_report("error", reason)
        verdict: Outcome = "fault" if found.verdict == "fault" else "error"
        return found.model_copy(update={"verdict": verdict, "reason": f"{found.reason}; then: {reason}"})

    def _without_report(self, verdict: Outcome, reason: str) -> DeviceReport:
        return DeviceReport(device=self.order.device, hardware=None, verdict=verdict, reason=reason)

    def _last_words(self, code: int) -> str:
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "no output")
        if last.startswith("ERROR: "):
            return last.removeprefix("ERROR: ")
        ended = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {ended}: {last}"


def diagnose_devices(
    orders: Callable[[Path], Sequence[Order]], logs: Path | None, show_progress: Callable[[str], None]
) -> list[DeviceReport]:
    """Carry out the orders, which `orders` returns for a folder of reports, at the same time; return their reports.

    logs: folder of the logs, `N.DEVICE.log`. Without one they are kept, in a temporary folder, only if a device could
    not be diagnosed. SIGINT or SIGTERM ends the work with what was found so far; a second one ends it at once.
    """
    folder = Path(tempfile.mkdtemp(prefix="aqnpipe-diagnose-"))
    workers: list[Worker] = []
    keep = logs is not None
    try:
        with _passed_on(workers) as interrupted:
            for number, order in enumerate(orders(folder)):
                name = f"{number}.{order.device.replace(':', '-')}.log"
                workers.append(Worker(order, (logs or folder) / name))
            if interrupted:  # before the last ones were started
                for worker in workers:
                    worker.interrupt()
            while running := sum(worker.running for worker in workers):
                show_progress(f"{running} of {len(workers)} devices at work")
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        reports = [worker.report(interrupted=bool(interrupted)) for worker in workers]
        keep = keep or any(report.verdict == "error" or "; then: " in report.reason for report in reports)
        return [
            report.model_copy(update={"log": str(worker.log) if keep else None})
            for report, worker in zip(reports, workers, strict=True)
        ]
    finally:
        for worker in workers:
            worker.kill()
        if logs is not None or not keep:
            shutil.rmtree(folder)


@contextmanager
def _passed_on(workers: Sequence[Worker]) -> Iterator[list[int]]:
    """Pass the first SIGINT or SIGTERM of the body on to the workers as a SIGINT; yield the signals that came."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        _restore()
        for worker in workers:
            worker.interrupt()

    def _restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, pass_on)
    try:
        yield came
    finally:
        _restore()


def _as_interrupted(report: DeviceReport) -> DeviceReport:
    runs = report.repetition.model_copy(update={"interrupted": True}) if report.repetition else None
    return report.model_copy(update={"repetition": runs})
