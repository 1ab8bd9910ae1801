"""Changes between two reports of a node: devices, verdicts, faults, versions and untested parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aqnpipe.artifacts.diagnoses import (
    EXIT_CODES,
    Collectives,
    DeviceReport,
    DiagnosisFile,
    LocatedFault,
    NodeReport,
)

_SETTINGS = ("host", "model", "dtype", "attention", "method", "seed")
_DECIDED = ("healthy", "fault")
_PARTS = ("name", "uuid", "serial", "driver", "toolkit")


@dataclass(frozen=True)
class Comparison:
    """Changes in words. The exit code is 3 for a new fault, 4 if less was tested than before, else 0."""

    lines: tuple[str, ...]
    new_faults: int
    less_tested: int

    @property
    def exit_code(self) -> int:
        """The exit code of `aqnpipe diagnose --compare`."""
        if self.new_faults:
            return EXIT_CODES["fault"]
        return EXIT_CODES["abstain"] if self.less_tested else EXIT_CODES["healthy"]

    @property
    def summary(self) -> str:
        """The last line: whether anything got worse."""
        if self.new_faults:
            return f"{self.new_faults} new {'fault' if self.new_faults == 1 else 'faults'}"
        return "no new fault" + (", but less was tested than before" if self.less_tested else "")


def node_of(file: DiagnosisFile) -> NodeReport:
    """Return the diagnosis of one device as the report of a node with this device alone."""
    device = DeviceReport(
        device=file.device,
        hardware=file.hardware,
        verdict=file.verdict,
        reason=file.reason,
        faults=file.faults,
        kernels=file.kernels,
        untested=file.untested,
        forward_equivalents=file.forward_equivalents,
        seconds=file.seconds,
    )
    shared = {name: getattr(file, name) for name in ("time", "verdict", "versions", "seconds", *_SETTINGS)}
    return NodeReport.model_validate({**shared, "exit_code": EXIT_CODES[file.verdict], "devices": (device,)})


def of_all_ranks(reports: Sequence[Collectives]) -> Collectives:
    """Return the report on the collectives of a node from those of its ranks."""
    first = reports[0]
    if first.verdict is None:
        return first
    faults = tuple(fault for report in reports for fault in report.faults)
    names = ", ".join(dict.fromkeys(fault.collective for fault in faults))
    update = {
        "verdict": "fault" if faults else "healthy",
        "reason": f"{first.calls} calls on each of {len(reports)} ranks compared, wrong: {names or 'none'}",
        "faults": faults,
        "simulated_faults": tuple(fault for report in reports for fault in report.simulated_faults),
    }
    return first.model_copy(update=update)


def compare_nodes(before: NodeReport, after: NodeReport) -> Comparison:
    """Return what changed from `before` to `after`. Devices are matched by UUID or serial number, else by name."""
    lines = [*_settings(before, after), *_versions(before.versions, after.versions)]
    old, new = _by_identity(before), _by_identity(after)
    new_faults, less_tested = 0, 0
    for key in [key for key in old if key not in new]:
        lines.append(f"{old[key].device}: gone ({_named(old[key])})")
        less_tested += 1
    for key, device in new.items():
        earlier = old.get(key)
        if earlier is None:
            lines.append(f"{device.device}: new ({_named(device)}), {device.verdict}")
        changes, appeared, lost = _device_changes(earlier, device)
        lines += [f"{device.device}: {change}" for change in changes]
        new_faults += appeared
        less_tested += lost
    changes, appeared, lost = _collective_changes(before.collectives, after.collectives)
    lines += [f"collectives: {change}" for change in changes]
    new_faults += appeared
    less_tested += lost
    return Comparison(tuple(lines), new_faults, less_tested)


def _settings(before: NodeReport, after: NodeReport) -> Iterator[str]:
    for name in _SETTINGS:
        if getattr(before, name) != getattr(after, name):
            yield f"{name}: {getattr(before, name)} -> {getattr(after, name)}"


def _versions(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name) or 'unknown'} -> {after.get(name) or 'unknown'}"


def _device_changes(before: DeviceReport | None, after: DeviceReport) -> tuple[list[str], int, int]:
    """Return (changes in words, number of new faults, 1 if less was tested than before else 0)."""
    old = _by_place(before) if before else {}
    new = _by_place(after)
    appeared = [fault for place, fault in new.items() if place not in old]
    changes = [f"new fault: {_fault(fault)}" for fault in appeared]
    if before is None:
        return changes, len(appeared), 0
    changes += [f"fault gone: {_fault(fault)}" for place, fault in old.items() if place not in new]
    changes += [
        f"fault changed: {_fault(old[place])} -> {_fault(new[place])}"
        for place in old.keys() & new.keys()
        if _fault(old[place]) != _fault(new[place])
    ]
    if before.verdict != after.verdict:
        reason = "" if after.verdict in ("healthy", "fault") else f" ({after.reason})"
        changes.insert(0, f"{before.verdict} -> {after.verdict}{reason}")
    skipped, skips = _untested(before), _untested(after)
    untested = [part for part in skips if part not in skipped]
    if untested:
        changes.append(f"no longer tested: {', '.join(untested)}")
    tested = [part for part in skipped if part not in skips]
    if tested:
        changes.append(f"now tested: {', '.join(tested)}")
    changes += _versions(_parts(before), _parts(after))
    lost = bool(untested) or (before.verdict in _DECIDED and after.verdict not in _DECIDED)
    return changes, len(appeared), int(lost)


def _collective_changes(before: Collectives | None, after: Collectives | None) -> tuple[list[str], int, int]:
    """Return what `_device_changes` does. A fault is the same if collective and rank are."""
    old, new = (
        {(fault.collective, fault.rank): fault for fault in part.faults} if part else {} for part in (before, after)
    )
    appeared = [f"new fault: {fault.in_words}" for place, fault in new.items() if place not in old]
    gone = [f"fault gone: {fault.in_words}" for place, fault in old.items() if place not in new]
    earlier, now = (part.verdict if part else None for part in (before, after))
    changed = [f"{earlier or 'not tested'} -> {now or 'not tested'}"] if earlier != now else []
    return changed + appeared + gone, len(appeared), int(earlier in _DECIDED and now not in _DECIDED)


def _by_identity(report: NodeReport) -> dict[str, DeviceReport]:
    found: dict[str, DeviceReport] = {}
    for device in report.devices:
        parts = device.hardware
        key = (parts.uuid or parts.serial if parts else None) or device.device
        # Two processes of one CPU are the first and the second of the same name.
        number = sum(other.partition("#")[0] == key for other in found)
        found[f"{key}#{number}"] = device
    return found


def _by_place(device: DeviceReport) -> dict[tuple[int | None, str], LocatedFault]:
    return {(fault.layer, fault.site): fault for fault in device.faults}


def _untested(device: DeviceReport) -> list[str]:
    """Return the untested parts with their layers. A new reason for an old gap is no change, so none is included."""
    parts = (
        f"{item.part} (layers {', '.join(map(str, item.layers))})" if item.layers else item.part
        for item in device.untested
    )
    return list(dict.fromkeys(parts))


def _fault(fault: LocatedFault) -> str:
    outside = "whole device, " if fault.scope == "device" else ""
    place = outside if fault.layer is None else f"layer {fault.layer}, "
    channels = "" if fault.num_faulty_channels is None else f", {fault.num_faulty_channels} channels"
    return f"{place}{fault.site}: {fault.type}{channels}"


def _named(device: DeviceReport) -> str:
    return device.hardware.name if device.hardware else "unknown device"


def _parts(device: DeviceReport) -> dict[str, str | None]:
    return {name: getattr(device.hardware, name, None) for name in _PARTS} if device.hardware else {}
