"""`aqnpipe diagnose`: diagnose a device or all devices of a node with any model, without a study.

A diagnosis, the report of a node and the changes between two reports are text of at most 80 columns.
"""

import itertools
import re
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from aqnpipe.cli.diagnose.worker import Order
from aqnpipe.cli.options import (
    check_folder,
    check_writable,
    console_of,
    find_model,
    given_options,
    load,
    parse_devices,
    table_of,
    usable_device,
    word_problems,
)
from aqnpipe.config.base import LARGEST_SEED, MOST_THREADS
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import AnyFault, CollectiveFault, format_fault, parse_fault_of_node
from aqnpipe.config.model import Attention, Dtype, read_json_object
from aqnpipe.errors import ConfigError, DataError, ModelError
from aqnpipe.report.numbers import number_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqnpipe.artifacts.diagnoses import DeviceReport, DiagnosisFile, LocatedFault, NodeReport, Rate, SiteRate
    from aqnpipe.artifacts.hardware import Hardware
    from aqnpipe.diagnosis.node_reports import Comparison


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


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
    faults = tuple(parse_fault_of_node(spec) for spec in fault or ())
    check_writable("--json", json)
    for option, folder in (("--history", history), ("--logs", logs), ("--reproducer", reproducer)):
        if folder is not None:
            check_folder(option, folder)
    on_node = bool(given & {"devices", "duration", "history", "logs"})
    if devices is not None:
        names = parse_devices("--devices", devices)
    else:
        names = parse_devices("--device", device) if on_node else (device,)
    _check_ranks(faults, names)
    seconds = None if duration is None else parse_duration(duration)
    if not on_node:
        usable_device(device)
    order = Order(
        device=names[0],
        model=find_model(model, dtype, attention, random_weights=random_weights),
        method=method,
        config=DiagnosisConfig(num_prompts=prompts, threads=threads, seed=seed),
        faults=faults,
        duration_seconds=seconds,
        reproducer=reproducer,
    )
    raise typer.Exit(diagnose_node(order, names, json, history, logs) if on_node else diagnose_here(order, json))


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


def _compare(paths: tuple[Path, Path], others: set[str]) -> NoReturn:
    """Print what changed between two files of `aqnpipe diagnose`; exit code as in `Comparison`."""
    if others:
        raise ConfigError(
            f"--compare: found {', '.join(sorted(others))} beside it, expected two files and nothing else"
        )
    from aqnpipe.diagnosis.node_reports import compare_nodes

    comparison = compare_nodes(*(read_report(path) for path in paths))
    show_comparison(comparison)
    raise typer.Exit(comparison.exit_code)


def diagnose_here(order: Order, json: Path | None) -> int:
    """Diagnose a device in this process, print what was found, write it to `json`, and return the exit code."""
    import torch

    from aqnpipe.artifacts.diagnoses import EXIT_CODES
    from aqnpipe.artifacts.files import write_json

    torch.set_num_threads(order.config.threads)
    device, console = torch.device(order.device), console_of(stderr=True)
    with console.status("loading") as status:
        model = load(order.model, device, order.config.seed)
        prompts = word_problems(order.model, order.config.num_prompts, device)
        file = order.diagnose(model, order.config, prompts, status.update)
    if json is not None:
        write_json(json, file)
        console.print(f"written: {json}")
    show_diagnosis(file)
    return EXIT_CODES[file.verdict]


def diagnose_node(
    order: Order, devices: Sequence[str], json: Path | None, history: Path | None, logs: Path | None
) -> int:
    """Diagnose `devices` in parallel, print what was found, write it to `json` and into `history`.

    Returns the exit code.
    """
    from aqnpipe.artifacts.diagnoses import EXIT_CODES, NodeReport, worst
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.artifacts.provenance import versions
    from aqnpipe.cli.diagnose.node import diagnose_devices

    started, clock, console = datetime.now(UTC), time.monotonic(), console_of(stderr=True)
    with console.status("starting") as status:
        reports, collectives = diagnose_devices(order, devices, logs, status.update)
    verdict = worst(filter(None, [*(report.verdict for report in reports), collectives.verdict]))
    node = NodeReport(
        time=started,
        host=socket.gethostname(),
        verdict=verdict,
        exit_code=EXIT_CODES[verdict],
        model=order.model.name,
        dtype=order.model.dtype,
        attention=order.model.attention,
        method=order.method,
        seed=order.config.seed,
        versions=versions(),
        seconds=round(time.monotonic() - clock, 2),
        devices=tuple(reports),
        collectives=collectives,
    )
    for target in (json, history and _place_in_history(history, node)):
        if target is not None:
            write_json(target, node)
            console.print(f"written: {target}", soft_wrap=True)
    show_node(node)
    return node.exit_code


def _place_in_history(folder: Path, node: "NodeReport") -> Path:
    """Return a new path of the form HOST_20261122T183000Z.json; a number follows if there is one of this second."""
    host = re.sub(r"[^\w.-]", "-", node.host)
    name = f"{host}_{node.time:%Y%m%dT%H%M%SZ}"
    further = (folder / f"{name}-{number}.json" for number in itertools.count(2))
    return next(path for path in itertools.chain([folder / f"{name}.json"], further) if not path.exists())


def read_report(path: Path) -> "NodeReport":
    """Return the report of a node in `path`, or the diagnosis of one device as such a report; DataError otherwise."""
    from aqnpipe.artifacts.diagnoses import DiagnosisFile, NodeReport
    from aqnpipe.artifacts.files import read_json
    from aqnpipe.diagnosis.node_reports import node_of

    try:
        content = read_json_object(path)
    except ModelError as error:
        raise DataError(f"{error}, expected a file of `aqnpipe diagnose`") from error
    return read_json(path, NodeReport) if "devices" in content else node_of(read_json(path, DiagnosisFile))


_SHOWN_SCANS = ("gain", "kurtosis", "instability")
_STYLES = {"healthy": "bold green", "fault": "bold red", "abstain": "bold yellow", "error": "bold yellow"}


def show_diagnosis(file: "DiagnosisFile") -> None:
    """Print verdict, faults and layers on standard output."""
    console = console_of(stderr=False)
    console.print(Text(file.verdict.upper(), _STYLES[file.verdict]), f"{file.model} on {file.device}, {file.dtype}")
    console.print(Text(file.reason))
    for line in next_steps(file):
        console.print(Text(line))
    show_faults(console, file.faults)
    layers = table_of("Layers", left=("layer", "faulty sites"), right=("probed", "deviation", *_SHOWN_SCANS))
    for layer in file.layers:
        probed, scans = ["", "", ""], layer.scans or {}
        if layer.sites_probed:
            deviation = "not finite" if layer.largest_deviation is None else f"{layer.largest_deviation:.2g}"
            probed = [", ".join(layer.faulty_sites), f"{layer.elements_probed:,}", deviation]
        shown = [f"{value:.3g}" if isinstance(value := scans.get(key), float) else "" for key in _SHOWN_SCANS]
        layers.add_row(str(layer.layer), *probed, *shown)
    console.print(layers)
    cost = f"cost: {file.forward_equivalents:.1f} whole-model forwards ({file.exact_forward_equivalents:.1f} exact, "
    console.print(Text(f"{cost}{file.statistical_forward_equivalents:.1f} statistical), {file.seconds:.1f} s"))


def show_node(report: "NodeReport") -> None:
    """Print a table of devices, then what is wrong with each and how often."""
    console = console_of(stderr=False)
    healthy = sum(device.verdict == "healthy" for device in report.devices)
    console.print(
        Text(report.verdict.upper(), _STYLES[report.verdict]),
        f"{report.host}: {healthy} of {len(report.devices)} devices healthy; {report.model}, {report.dtype}",
    )
    devices = table_of("Devices", left=("device", "name", "verdict"), right=("runs", "faults", "°C", "s"))
    for device in report.devices:
        celsius = device.temperature_after_celsius
        devices.add_row(
            device.device,
            device.hardware.name if device.hardware else "?",
            device.verdict,
            str(len(device.repetition.runs)) if device.repetition else "",
            str(len(device.faults)),
            "" if celsius is None else f"{celsius:.0f}",
            f"{device.seconds:.0f}",
        )
    console.print(devices)
    for device in report.devices:
        _show_device(console, device)
    for line in (*untested_lines(report.devices), *collective_lines(report)):
        console.print(Text(line))


def show_comparison(comparison: "Comparison") -> None:
    """Print the changes between two reports, one line each."""
    console = console_of(stderr=False)
    for line in comparison.lines:
        console.print(Text(line))
    console.print(Text(comparison.summary))


def next_steps(file: "DiagnosisFile") -> list[str]:
    """Return what to do about a fault: which card, what to report, and what was computed on it; nothing without one."""
    if file.verdict != "fault":
        return []
    if file.simulated_faults:
        return ["The fault is simulated; nothing follows for this device."]
    proof = "the files of --reproducer" if file.kernels else "the file of --json (no kernel is known)"
    return [
        f"Take this device out of service: {_identity(file.hardware)}.",
        f"Report to its vendor: these numbers, the line on the kernel above, and {proof}.",
        "Weights trained on it since its last healthy diagnosis are in doubt; training.verify stops such runs.",
    ]


def collective_lines(report: "NodeReport") -> list[str]:
    """Return what was found between the devices, and what to do about it; nothing for files of earlier versions."""
    found = report.collectives
    if found is None:
        return []
    if found.verdict is None:
        return [f"not tested: collectives between devices ({found.reason})"]
    lines = [f"collectives: {found.verdict}: {found.reason}", *(fault.in_words for fault in found.faults)]
    if found.simulated_faults:
        return [*lines, "The fault is simulated; nothing follows for this node."]
    if found.verdict == "fault":
        lines.append(
            "Train on one device of this node at a time. Where each is healthy, report these numbers, driver and links "
            "to the vendor. Weights trained over several since the last healthy diagnosis are in doubt."
        )
    return lines


def _identity(hardware: "Hardware") -> str:
    known = {"UUID": hardware.uuid, "serial number": hardware.serial, "slot": hardware.slot, "driver": hardware.driver}
    return ", ".join([hardware.name, *(f"{name} {value}" for name, value in known.items() if value)])


def show_faults(console: Console, faults: "Sequence[LocatedFault]") -> None:
    """Print a table of faults, if there are any."""
    if not faults:
        return
    table = table_of("Faults", left=("layer", "site", "type"), right=("channels", "magnitude", "threshold"))
    for fault in faults:
        faulty = fault.num_faulty_channels
        channels = "?" if faulty is None else f"{faulty} of {fault.num_channels}"
        magnitude = "?" if fault.magnitude is None else f"{fault.magnitude:.3g}"
        elsewhere = "device" if fault.scope == "device" else ""
        layer = elsewhere if fault.layer is None else str(fault.layer)
        table.add_row(layer, fault.site, fault.type, channels, magnitude, fault.threshold or "")
    console.print(table)
    for fault in faults:
        if lines := evidence_in_bits(fault):
            console.print(Text(f"{_where(fault)}: {'; '.join(lines)}"))


def evidence_in_bits(fault: "LocatedFault") -> list[str]:
    """Return what is known of a fault in terms of hardware: values in hex, flipped bits, rate, place in the tile."""
    lines = []
    if bits := fault.bits:
        flipped = ", ".join(f"{bit} ({count})" for bit, count in sorted(bits.flipped.items()))
        lines.append(f"expected {bits.expected}, observed {bits.observed}, XOR {bits.xor_mask}")
        lines.append(f"bits flipped in {bits.values} wrong values: {flipped}")
    if fault.rate_per_call is not None and fault.calls is not None:
        wrong = round(fault.rate_per_call * fault.calls)
        lines.append(f"wrong in {wrong} of {fault.calls} compared calls; not every probe shows every fault")
    if tile := fault.tile:
        lines.append(f"channels {number_ranges(tile.offsets)} modulo {tile.width}")
    if fault.layer is None and fault.layers:
        lines.append(f"seen in layers {number_ranges(fault.layers)}")
    return lines


def untested_lines(devices: "Sequence[DeviceReport]") -> list[str]:
    """Return the untested parts, one line per reason; a line that does not hold for every device names its device."""
    lines = {device.device: _untested_on(device) for device in devices}
    shared = [line for line in _untested_on(devices[0]) if all(line in own for own in lines.values())]
    others = [f"{name}: not tested: {line}" for name, own in lines.items() for line in own if line not in shared]
    return [f"not tested: {line}" for line in shared] + others


def _untested_on(device: "DeviceReport") -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for item in device.untested:
        layers = f" of layers {number_ranges(item.layers)}" if item.layers else ""
        by_reason.setdefault(item.reason, []).append(f"{item.part}{layers}")
    return [f"{', '.join(parts)} ({reason})" for reason, parts in by_reason.items()]


def _show_device(console: Console, device: "DeviceReport") -> None:
    found = device.repetition
    if device.verdict != "healthy":
        kernels = "; ".join(kernel.in_words for kernel in device.kernels)
        card = f"{_identity(device.hardware)}: " if device.hardware else ""
        console.print(Text(f"{device.device}: {card}{kernels or device.reason}"))
    show_faults(console, device.faults)
    if found:
        for site in found.sites:
            console.print(f"{device.device}: {_where(site)}: {_rate(site.rate)}")
        elsewhere = "elsewhere" if found.sites else "at any site"
        console.print(f"{device.device}: faults {elsewhere}: {_rate(found.any_other_site)}")
        if found.interrupted:
            console.print(f"{device.device}: interrupted; the runs above were complete")
    if device.log is not None:
        console.print(Text(f"{device.device}: log {device.log}"), soft_wrap=True)


def _rate(rate: "Rate") -> str:
    bound = f"at most {rate.high:.2g}" if not rate.seen else f"{rate.low:.2g} to {rate.high:.2g}"
    return f"in {rate.seen} of {rate.runs} runs (95 %: {bound})"


def _where(fault: "LocatedFault | SiteRate") -> str:
    if fault.layer is not None:
        return f"layer {fault.layer}, {fault.site}"
    return f"whole device, {fault.site}" if fault.scope == "device" else fault.site
