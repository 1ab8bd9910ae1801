"""A diagnosis, the report of a node and the changes between two reports, as text of at most 80 columns."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqnpipe.artifacts.diagnoses import DiagnosisFile, LayerMetrics, LocatedFault
    from aqnpipe.artifacts.node_reports import DeviceReport, NodeReport, Rate
    from aqnpipe.diagnosis.node_comparison import Comparison

_SHOWN_SCANS = ("gain", "kurtosis", "instability")
_MOST_UNTESTED = 8
_STYLES = {"healthy": "bold green", "fault": "bold red", "abstain": "bold yellow", "error": "bold yellow"}


def console_of(*, stderr: bool) -> Console:
    """Return a console on standard output, or on standard error for progress."""
    return Console(stderr=stderr, soft_wrap=False, highlight=False)


def show_diagnosis(file: "DiagnosisFile") -> None:
    """Print verdict, faults and layers on standard output."""
    console = console_of(stderr=False)
    console.print(Text(file.verdict.upper(), _STYLES[file.verdict]), f"{file.model} on {file.device}, {file.dtype}")
    console.print(Text(file.reason))
    show_faults(console, file.faults)
    layers = _table("Layers", left=("layer", "faulty sites"), right=("probed", "deviation", *_SHOWN_SCANS))
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
    devices = _table("Devices", left=("device", "name", "verdict"), right=("runs", "faults", "°C", "s"))
    for device in report.devices:
        devices.add_row(*_device_cells(device))
    console.print(devices)
    for device in report.devices:
        _show_device(console, device)


def show_comparison(comparison: "Comparison") -> None:
    """Print the changes between two reports, one line each."""
    console = console_of(stderr=False)
    for line in comparison.lines:
        console.print(Text(line))
    console.print(Text(comparison.summary))


def show_faults(console: Console, faults: "Sequence[LocatedFault]") -> None:
    """Print a table of faults, if there are any."""
    if not faults:
        return
    table = _table("Faults", left=("layer", "site", "type"), right=("channels", "magnitude", "threshold"))
    for fault in faults:
        faulty = fault.num_faulty_channels
        channels = "?" if faulty is None else f"{faulty} of {fault.num_channels}"
        magnitude = "?" if fault.magnitude is None else f"{fault.magnitude:.3g}"
        table.add_row(_place(fault.layer), fault.site, fault.type, channels, magnitude, fault.threshold or "")
    console.print(table)


def _show_device(console: Console, device: "DeviceReport") -> None:
    if device.verdict != "healthy":
        console.print(Text(f"{device.device}: {device.reason}"))
    show_faults(console, device.faults)
    for site in device.repetition.sites if device.repetition else ():
        console.print(f"{device.device}: {_place(site.layer)} {site.site}: {_rate(site.rate)}")
    if device.repetition:
        console.print(f"{device.device}: faults elsewhere: {_rate(device.repetition.any_other_site)}")
    if device.repetition and device.repetition.interrupted:
        console.print(f"{device.device}: interrupted; the runs above were complete")
    if device.untested:
        more = len(device.untested) - _MOST_UNTESTED
        console.print(
            Text(f"{device.device}: not tested: {', '.join(device.untested[:_MOST_UNTESTED])}")
            + Text(f" and {more} more, in the JSON" if more > 0 else "")
        )
    if device.log is not None:
        console.print(Text(f"{device.device}: log {device.log}"), soft_wrap=True)


def _rate(rate: "Rate") -> str:
    bound = f"at most {rate.high:.2g}" if not rate.seen else f"{rate.low:.2g} to {rate.high:.2g}"
    return f"in {rate.seen} of {rate.runs} runs (95 %: {bound})"


def _place(layer: int | None) -> str:
    return "device" if layer is None else str(layer)


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


def _table(title: str, *, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _layer_cells(layer: "LayerMetrics") -> list[str]:
    if layer.largest_deviation is None:
        probed = ["", "", ""]
    else:
        probed = [", ".join(layer.faulty_sites), f"{layer.elements_probed:,}", f"{layer.largest_deviation:.2g}"]
    scans = layer.scans or {}
    return probed + [f"{value:.3g}" if isinstance(value := scans.get(key), float) else "" for key in _SHOWN_SCANS]
