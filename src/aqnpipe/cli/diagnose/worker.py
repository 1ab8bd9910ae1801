"""The process of a device of a node, alone or as a rank: `python -m aqnpipe.cli.diagnose.worker ORDER.json`.

The report is written after every run, so that a process that dies leaves what it found. SIGINT ends the work between
two layers: the weights are restored and completed runs are reported.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from aqnpipe.cli.options import ModelSource, load, usable_device, word_problems
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import AnyFault, CollectiveFault
from aqnpipe.config.noise import Fault
from aqnpipe.device import COLLECTIVES
from aqnpipe.errors import AqnpipeError, DeviceError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from aqnpipe.artifacts.diagnoses import DiagnosisFile
    from aqnpipe.diagnosis.node_reports import RunsOfDevice

_SECONDS_BETWEEN_TEMPERATURES = 30.0


class Order(FrozenModel):
    """Work of one process: a device, a model and its diagnosis, once or for a duration, into a file."""

    device: str
    model: ModelSource
    method: DiagnosisMethod
    config: DiagnosisConfig
    faults: tuple[AnyFault, ...] = ()
    duration_seconds: float | None = Field(default=None, gt=0)
    reproducer: Path | None = None
    report: Path = Path()
    parent: int = Field(default_factory=os.getpid, description="waits for the report; the work ends with it")
    rank: int = 0
    num_ranks: int = Field(default=0, description="0: diagnose the device; else be one of so many processes")

    def diagnose(
        self,
        model: "nn.Module",
        config: DiagnosisConfig,
        prompt_ids: "list[Tensor] | None",
        show_progress: Callable[[str], None],
    ) -> "DiagnosisFile":
        """Return a diagnosis of the loaded model, with the simulated faults inside of the device."""
        from aqnpipe.diagnosis.api import diagnose

        return diagnose(
            model,
            method=self.method,
            prompt_ids=prompt_ids,
            faults=[fault for fault in self.faults if isinstance(fault, Fault)],
            name=self.model.name,
            weights=None if self.model.random_weights else self.model.folder,
            reproducer=self.reproducer,
            show_progress=show_progress,
            **config.model_dump(),
        )


class StopRequestedError(Exception):
    """The work is to end before the run in progress is complete."""


class Stop:
    """Request to end the work: on SIGINT or SIGTERM, or once the process that waits for it is gone."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, signum: int, frame: object) -> None:
        self._requested = True

    def check(self, line: str = "") -> None:
        """Raise StopRequestedError if the work is to end; `line` says what is being done."""
        if self._requested or os.getppid() != self._parent:
            self._requested = True
            raise StopRequestedError
        if line:
            print(line, flush=True)  # noqa: T201 - goes to the log file


def main() -> None:
    """Carry out the order in the file that the command line names; exit code 2 if it cannot be done."""
    import torch

    order = Order.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stop = Stop(order.parent)
    try:
        device = usable_device(order.device)
        torch.set_num_threads(order.config.threads)
        _compare_ranks(order, device, stop) if order.num_ranks else _diagnose(order, device, stop)
    except AqnpipeError as error:
        print(f"ERROR: {error}", flush=True)  # noqa: T201 - goes to the log file
        sys.exit(error.exit_code)


def _diagnose(order: Order, device: "torch.device", stop: Stop) -> None:
    """Diagnose once, or until the duration is over; write the report after every run."""
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.artifacts.hardware import read_hardware
    from aqnpipe.diagnosis.node_reports import RunsOfDevice

    runs = RunsOfDevice(order.device, read_hardware(device), repeated=order.duration_seconds is not None)
    try:
        stop.check(f"loading {order.model.name} on {order.device} ({runs.hardware.name})")
        model = load(order.model, device, order.config.seed)
        end = time.monotonic() + (order.duration_seconds or 0.0)
        while not runs.count or time.monotonic() < end:
            stop.check(f"run {runs.count + 1}")
            _run(order, model, runs, stop)
            write_json(order.report, runs.report())
    except StopRequestedError:
        write_json(order.report, runs.report(interrupted=True))


def _run(order: Order, model: "nn.Module", runs: "RunsOfDevice", stop: Stop) -> None:
    from aqnpipe.diagnosis.api import random_prompts
    from aqnpipe.diagnosis.node_reports import config_of_run, prompt_tokens_of_run, record_of

    config, length = config_of_run(order.config, runs.count), prompt_tokens_of_run(runs.count)
    device = next(model.parameters()).device
    text = None if runs.count else word_problems(order.model, config.num_prompts, device)
    file = order.diagnose(model, config, text or random_prompts(model, config, length), stop.check)
    print(f"{file.verdict}: {file.reason}", flush=True)  # noqa: T201 - goes to the log file
    celsius = _celsius(device, int(time.monotonic() / _SECONDS_BETWEEN_TEMPERATURES))
    runs.add(file, record_of(file, config, 0 if text else length, celsius))


@lru_cache(maxsize=1)
def _celsius(device: "torch.device", interval: int) -> float | None:
    """Return the temperature of a device, read once in every interval: vendors' tools are slow. None if not known."""
    from aqnpipe.artifacts.hardware import read_temperature

    return read_temperature(device)


def _compare_ranks(order: Order, device: "torch.device", stop: Stop) -> None:
    """Compare all collectives between this process and the others; report what was wrong on this rank."""
    import torch
    from torch import distributed

    from aqnpipe.artifacts.diagnoses import Collectives
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.diagnosis.collectives import compare_collectives

    backend = next(name for kind, name in COLLECTIVES.items() if kind == device.type)
    if not distributed.is_backend_available(backend):
        write_json(order.report, Collectives(verdict=None, reason=f"torch has no {backend} here"))
        return
    faults = [fault for fault in order.faults if isinstance(fault, CollectiveFault)]
    dtype: torch.dtype = getattr(torch, order.model.dtype)
    try:
        stop.check("the meeting of all ranks")
        store = distributed.FileStore(str(order.report.parent / "meeting"), order.num_ranks)
        distributed.init_process_group(backend, store=store, rank=order.rank, world_size=order.num_ranks)
        report = compare_collectives(device, dtype, order.config.seed, faults, stop.check)
        # One that closes its connections early would end the last call of a slower one.
        store.set(f"done {order.rank}", "")
        store.wait([f"done {rank}" for rank in range(order.num_ranks)], timedelta(hours=1))
        distributed.destroy_process_group()
    except RuntimeError as error:
        raise DeviceError(f"{order.device}: {first_line(error)}") from error
    except StopRequestedError:
        return
    write_json(order.report, report)


if __name__ == "__main__":
    main()
