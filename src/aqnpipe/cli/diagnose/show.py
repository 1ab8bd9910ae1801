"""A diagnosis, the report of a node and the changes between two reports, as text of at most 80 columns."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from aqnpipe.cli.options import console_of, table_of
from aqnpipe.report.numbers import number_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqnpipe.artifacts.diagnoses import (
        DeviceReport,
        DiagnosisFile,
        LayerMetrics,
        LocatedFault,
        NodeReport,
        Rate,
        SiteRate,
    )
    from aqnpipe.artifacts.hardware import Hardware
    from aqnpipe.diagnosis.node_comparison import Comparison

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
        layers.add_row(str(layer.layer), *_layer_cells(layer))
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
        devices.add_row(*_device_cells(device))
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
        table.add_row(_place(fault), fault.site, fault.type, channels, magnitude, fault.threshold or "")
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
    if device.verdict != "healthy":
        kernels = "; ".join(kernel.in_words for kernel in device.kernels)
        card = f"{_identity(device.hardware)}: " if device.hardware else ""
        console.print(Text(f"{device.device}: {card}{kernels or device.reason}"))
    show_faults(console, device.faults)
    for site in device.repetition.sites if device.repetition else ():
        console.print(f"{device.device}: {_where(site)}: {_rate(site.rate)}")
    if device.repetition:
        elsewhere = "elsewhere" if device.repetition.sites else "at any site"
        console.print(f"{device.device}: faults {elsewhere}: {_rate(device.repetition.any_other_site)}")
    if device.repetition and device.repetition.interrupted:
        console.print(f"{device.device}: interrupted; the runs above were complete")
    if device.log is not None:
        console.print(Text(f"{device.device}: log {device.log}"), soft_wrap=True)


def _rate(rate: "Rate") -> str:
    bound = f"at most {rate.high:.2g}" if not rate.seen else f"{rate.low:.2g} to {rate.high:.2g}"
    return f"in {rate.seen} of {rate.runs} runs (95 %: {bound})"


def _place(fault: "LocatedFault") -> str:
    """Return the cell `layer` of a fault: the device if most layers share it, else nothing outside the layers."""
    return str(fault.layer) if fault.layer is not None else {"device": "device"}.get(fault.scope, "")


def _where(fault: "LocatedFault | SiteRate") -> str:
    if fault.layer is not None:
        return f"layer {fault.layer}, {fault.site}"
    return f"whole device, {fault.site}" if fault.scope == "device" else fault.site


def _device_cells(device: "DeviceReport") -> list[str]:
    celsius = device.temperature_after_celsius
    return [
        device.device,
        device.hardware.name if device.hardware else "?",
        device.verdict,
        str(len(device.repetition.runs)) if device.repetition else "",
        str(len(device.faults)),
        "" if celsius is None else f"{celsius:.0f}",
        f"{device.seconds:.0f}",
    ]


def _layer_cells(layer: "LayerMetrics") -> list[str]:
    if not layer.sites_probed:
        probed = ["", "", ""]
    else:
        largest = layer.largest_deviation
        deviation = "not finite" if largest is None else f"{largest:.2g}"
        probed = [", ".join(layer.faulty_sites), f"{layer.elements_probed:,}", deviation]
    scans = layer.scans or {}
    return probed + [f"{value:.3g}" if isinstance(value := scans.get(key), float) else "" for key in _SHOWN_SCANS]
