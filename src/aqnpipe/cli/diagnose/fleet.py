"""The report of a node: from the reports of its devices to a table, a file and a history."""

import os
import re
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.cli.diagnose.loading import ModelSource
from aqnpipe.cli.diagnose.options import Outputs
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.model import read_json_object
from aqnpipe.config.noise import Fault
from aqnpipe.errors import DataError, ModelError

if TYPE_CHECKING:
    from aqnpipe.artifacts.diagnoses import NodeReport
    from aqnpipe.cli.diagnose.worker import Order


def diagnose_node(
    source: ModelSource,
    devices: Sequence[str],
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[Fault, ...],
    outputs: Outputs,
) -> "NodeReport":
    """Diagnose `devices` in parallel, print what was found and write it where `outputs` asks for it."""
    from aqnpipe.artifacts.diagnoses import EXIT_CODES, NodeReport, worst
    from aqnpipe.artifacts.provenance import versions
    from aqnpipe.cli.diagnose.node import diagnose_devices
    from aqnpipe.cli.diagnose.show import show_node
    from aqnpipe.cli.terminal import console_of

    def orders(folder: Path) -> "list[Order]":
        return make_orders(folder, source, devices, method, config, faults)

    started, clock = datetime.now(UTC), time.monotonic()
    with console_of(stderr=True).status("starting") as status:
        reports = diagnose_devices(orders, outputs.logs, status.update)
    verdict = worst(report.verdict for report in reports)
    node = NodeReport(
        time=started,
        host=socket.gethostname(),
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        model=source.name,
        dtype=source.dtype,
        attention=source.attention,
        method=method,
        seed=config.seed,
        versions=versions(),
        seconds=round(time.monotonic() - clock, 2),
        devices=tuple(reports),
    )
    _write(node, outputs)
    show_node(node)
    return node


def read_report(path: Path) -> "NodeReport":
    """Return the report of a node in `path`, or the diagnosis of one device as such a report; DataError otherwise."""
    from aqnpipe.artifacts.diagnoses import DiagnosisFile, NodeReport
    from aqnpipe.artifacts.files import read_json
    from aqnpipe.diagnosis.node_comparison import node_of

    try:
        content = read_json_object(path)
    except ModelError as error:
        raise DataError(f"{error}, expected a file of `aqnpipe diagnose`") from error
    if "devices" in content:
        return read_json(path, NodeReport)
    return node_of(read_json(path, DiagnosisFile))


def make_orders(
    folder: Path,
    source: ModelSource,
    devices: Sequence[str],
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[Fault, ...],
) -> "list[Order]":
    """Return the orders of `devices`, whose reports are numbered files in `folder`."""
    from aqnpipe.cli.diagnose.worker import Order

    return [
        Order(
            device=device,
            model=source,
            method=method,
            config=config,
            faults=faults,
            report=folder / f"{number}.json",
            parent=os.getpid(),
        )
        for number, device in enumerate(devices)
    ]


def _write(node: "NodeReport", outputs: Outputs) -> None:
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.cli.diagnose.show import console_of

    targets = [] if outputs.json is None else [outputs.json]
    if outputs.history is not None:
        targets.append(_place_in_history(outputs.history, node))
    for target in targets:
        write_json(target, node)
        console_of(stderr=True).print(f"written: {target}", soft_wrap=True)


def _place_in_history(folder: Path, node: "NodeReport") -> Path:
    """Return a new path of the form HOST_20261122T183000Z.json; a number follows if there is one of this second."""
    host = re.sub(r"[^\w.-]", "-", node.host)
    name = f"{host}_{node.time:%Y%m%dT%H%M%SZ}"
    number, path = 1, folder / f"{name}.json"
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    return path
