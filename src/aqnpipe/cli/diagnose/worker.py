"""The process that diagnoses one device of a node: `python -m aqnpipe.cli.diagnose.worker ORDER.json`.

SIGINT ends the work between two layers: the weights are restored, and the report says that there is no verdict.
"""

import os
import signal
import sys
from pathlib import Path

from pydantic import Field

from aqnpipe.artifacts.diagnoses import DeviceReport
from aqnpipe.artifacts.files import write_json
from aqnpipe.cli.options import ModelSource, load, usable_device, word_problems
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.noise import Fault
from aqnpipe.errors import AqnpipeError

INTERRUPTED = "interrupted before the diagnosis was complete"
"""Reason for no verdict on a device."""


class Order(FrozenModel):
    """Work of one process: a device, a model and its diagnosis, into a file."""

    device: str
    model: ModelSource
    method: DiagnosisMethod
    config: DiagnosisConfig
    faults: tuple[Fault, ...]
    report: Path
    parent: int = Field(description="process that waits for the report; the work ends with it")


class StopRequestedError(Exception):
    """The work is to end before the diagnosis is complete."""


class Stop:
    """Request to end the work: on SIGINT or SIGTERM, or once the process that waits for it is gone."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, signum: int, frame: object) -> None:
        self.requested = True

    def check(self, line: str = "") -> None:
        """Raise StopRequestedError if the work is to end; `line` says what is being done."""
        if self.requested or os.getppid() != self._parent:
            self.requested = True
            raise StopRequestedError
        if line:
            print(line, flush=True)  # noqa: T201 - goes to the log file


def main() -> None:
    """Carry out the order in the file that the command line names; exit code 2 if it cannot be done."""
    order = Order.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stop = Stop(order.parent)
    try:
        _diagnose(order, stop)
    except AqnpipeError as error:
        print(f"ERROR: {error}", flush=True)  # noqa: T201 - goes to the log file
        sys.exit(error.exit_code)


def _diagnose(order: Order, stop: Stop) -> None:
    import torch

    from aqnpipe.artifacts.hardware import read_hardware, read_temperature
    from aqnpipe.diagnosis.api import diagnose
    from aqnpipe.diagnosis.node_comparison import node_of

    device = usable_device(order.device)
    torch.set_num_threads(order.config.threads)
    hardware = read_hardware(device)
    try:
        stop.check(f"loading {order.model.name} on {order.device} ({hardware.name})")
        file = diagnose(
            load(order.model, device, order.config.seed),
            method=order.method,
            prompt_ids=word_problems(order.model, order.config.num_prompts, device),
            faults=order.faults,
            name=order.model.name,
            weights=None if order.model.random_weights else order.model.folder,
            show_progress=stop.check,
            **order.config.model_dump(),
        )
    except StopRequestedError:
        stopped = DeviceReport(device=order.device, hardware=hardware, verdict="abstain", reason=INTERRUPTED)
        write_json(order.report, stopped)
        return
    print(f"{file.verdict}: {file.reason}", flush=True)  # noqa: T201 - goes to the log file
    (report,) = node_of(file).devices
    own = {"device": order.device, "hardware": hardware, "temperature_after_celsius": read_temperature(device)}
    write_json(order.report, report.model_copy(update=own))


if __name__ == "__main__":
    main()
