"""`aqnpipe diagnose`: diagnose a device or all devices of a node with any model, without a study."""

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from aqnpipe.cli.options import (
    ModelSource,
    check_folder,
    check_writable,
    console_of,
    find_model,
    given_options,
    load,
    parse_devices,
    usable_device,
    word_problems,
)
from aqnpipe.config.base import LARGEST_SEED, MOST_THREADS
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import AnyFault, CollectiveFault, format_fault, parse_fault_of_node
from aqnpipe.config.model import Attention, Dtype, read_json_object
from aqnpipe.config.noise import Fault
from aqnpipe.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    import torch

    from aqnpipe.artifacts.diagnoses import DiagnosisFile, NodeReport, Outcome
    from aqnpipe.cli.diagnose.worker import Order

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Outputs:
    """Where reports, logs and reproducers go. No folder is made that does not exist."""

    json: Path | None
    history: Path | None
    logs: Path | None
    reproducer: Path | None

    def check(self) -> None:
        """Raise StorageError unless everything can be written."""
        check_writable("--json", self.json)
        for option, folder in (
            ("--history", self.history),
            ("--logs", self.logs),
            ("--reproducer", self.reproducer),
        ):
            if folder is not None:
                check_folder(option, folder)


def diagnose(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="model: a folder, a hub id, or `tiny`")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="simulate a fault: comma-separated key=value pairs, keys type, layer, magnitude, sparsity, site; "
            "with --devices, a site such as all_reduce and a rank in place of the layer"
        ),
    ] = None,
    method: Annotated[
        DiagnosisMethod, typer.Option(help="exact probes, or also the published statistical scans, which do not decide")
    ] = "all",
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, npu, ...")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    json: Annotated[
        Path | None, typer.Option(help="write the verdict and the metrics of every layer, or of every device, here")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts for the scans")] = 5,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="use random weights for the shape in the config.json of the folder")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads, of every device")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="seed of probes, scan noise and random weights")
    ] = 0,
    devices: Annotated[
        str | None,
        typer.Option(
            help="`all` (every GPU or NPU), or a list such as cuda:0,cuda:1 or cpu,cpu: a process each, in parallel"
        ),
    ] = None,
    duration: Annotated[str | None, typer.Option(help="repeat with new seeds and shapes for 30s, 15m or 2h")] = None,
    history: Annotated[Path | None, typer.Option(help="existing folder: add the report under host and time")] = None,
    logs: Annotated[Path | None, typer.Option(help="existing folder for the log of every device")] = None,
    reproducer: Annotated[
        Path | None,
        typer.Option(help="existing folder: if a kernel errs, write a script there that shows it without aqnpipe"),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="two files of earlier diagnoses: what changed?")
    ] = None,
) -> None:
    """Diagnose this machine: find faulty layers, sites and channels. Exit code 0: healthy, 3: fault, 4: no verdict.

    The weights of one layer at a time are replaced by known ones and then restored. A model with random weights and the
    real shape tests a device as well as a trained model.

    Of several devices the worst decides: a fault (3), then an error (2), then no verdict (4).
    """
    given = set(given_options(context))
    if compare is not None:
        _compare(compare, given - {"compare"})
    if model is None:
        raise ConfigError("diagnose: MODEL is missing, expected a folder, a hub id or `tiny`")
    if {"device", "devices"} <= given:
        raise ConfigError("diagnose: found --device and --devices, expected one of the two")
    config = DiagnosisConfig(num_prompts=prompts, threads=threads, seed=seed)
    faults = tuple(parse_fault_of_node(spec) for spec in fault or ())
    outputs = Outputs(json=json, history=history, logs=logs, reproducer=reproducer)
    outputs.check()
    if given & {"devices", "duration", "history", "logs"}:
        names = parse_devices("--devices", devices) if devices is not None else parse_devices("--device", device)
        _check_ranks(faults, names)
        seconds = None if duration is None else parse_duration(duration)
        source = find_model(model, dtype, attention, random_weights=random_weights)
        _leave(diagnose_node(source, names, seconds, method, config, faults, outputs).verdict)
    _check_ranks(faults, (device,))
    target = usable_device(device)
    source = find_model(model, dtype, attention, random_weights=random_weights)
    inside = tuple(found for found in faults if isinstance(found, Fault))
    _leave(diagnose_here(source, target, method, config, inside, outputs).verdict)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 30s, 15m, 2h or 1d; ConfigError if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise ConfigError(f"--duration {text!r}: expected a number and a unit, as in 30s, 15m or 2h")
    return seconds


def _check_ranks(faults: Sequence[AnyFault], devices: Sequence[str]) -> None:
    """Raise ConfigError if a simulated fault of a collective is on a rank that there is not."""
    ranks = len(devices) if len({device.partition(":")[0] for device in devices}) == 1 else 0
    for fault in (fault for fault in faults if isinstance(fault, CollectiveFault)):
        if fault.rank >= ranks or ranks < 2:
            raise ConfigError(
                f"fault {format_fault(fault)!r}: found {', '.join(devices)}, expected --devices with at least "
                f"{max(2, fault.rank + 1)} of one type"
            )


def _leave(verdict: "Outcome") -> NoReturn:
    from aqnpipe.artifacts.diagnoses import EXIT_CODES

    raise typer.Exit(EXIT_CODES[verdict])


def _compare(paths: tuple[Path, Path], others: set[str]) -> NoReturn:
    """Print what changed between two files of `aqnpipe diagnose`; exit code as in `Comparison`."""
    if others:
        raise ConfigError(
            f"--compare: found {', '.join(sorted(others))} beside it, expected two files and nothing else"
        )
    from aqnpipe.cli.diagnose.show import show_comparison
    from aqnpipe.diagnosis.node_comparison import compare_nodes

    comparison = compare_nodes(*(read_report(path) for path in paths))
    show_comparison(comparison)
    raise typer.Exit(comparison.exit_code)


def diagnose_here(
    source: ModelSource,
    device: "torch.device",
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[Fault, ...],
    outputs: Outputs,
) -> "DiagnosisFile":
    """Diagnose `device`, print what was found and write it where `outputs` asks for it."""
    import torch

    from aqnpipe.artifacts.files import write_json
    from aqnpipe.cli.diagnose.show import show_diagnosis
    from aqnpipe.diagnosis.api import diagnose

    torch.set_num_threads(config.threads)
    console = console_of(stderr=True)
    with console.status("loading") as status:
        file = diagnose(
            load(source, device, config.seed),
            method=method,
            prompt_ids=word_problems(source, config.num_prompts, device),
            faults=faults,
            name=source.name,
            weights=None if source.random_weights else source.folder,
            reproducer=outputs.reproducer,
            show_progress=status.update,
            **config.model_dump(),
        )
    if outputs.json is not None:
        write_json(outputs.json, file)
        console.print(f"written: {outputs.json}")
    show_diagnosis(file)
    return file


def diagnose_node(
    source: ModelSource,
    devices: Sequence[str],
    duration_seconds: float | None,
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[AnyFault, ...],
    outputs: Outputs,
) -> "NodeReport":
    """Diagnose `devices` in parallel, print what was found and write it where `outputs` asks for it."""
    from aqnpipe.artifacts.diagnoses import EXIT_CODES, NodeReport, worst
    from aqnpipe.artifacts.provenance import versions
    from aqnpipe.cli.diagnose.node import diagnose_devices
    from aqnpipe.cli.diagnose.show import show_node

    def orders(folder: Path) -> "list[Order]":
        return make_orders(folder, source, devices, duration_seconds, method, config, faults, outputs.reproducer)

    started, clock = datetime.now(UTC), time.monotonic()
    with console_of(stderr=True).status("starting") as status:
        reports, collectives = diagnose_devices(orders, outputs.logs, status.update)
    outcomes = [report.verdict for report in reports]
    verdict = worst(outcomes if collectives.verdict is None else [*outcomes, collectives.verdict])
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
        collectives=collectives,
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
    duration_seconds: float | None,
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[AnyFault, ...],
    reproducer: Path | None = None,
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
            duration_seconds=duration_seconds,
            report=folder / f"{number}.json",
            reproducer=None if reproducer is None else reproducer / f"{number}.{device.replace(':', '-')}",
            parent=os.getpid(),
        )
        for number, device in enumerate(devices)
    ]


def _write(node: "NodeReport", outputs: Outputs) -> None:
    from aqnpipe.artifacts.files import write_json

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
