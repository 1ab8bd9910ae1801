"""Reports on the devices of a node: repeated runs, and changes between two reports.

Every run of a device has new seeds and shapes; its report has the rates at which faults were seen. Two reports of a
node are compared by devices, verdicts, faults, versions and untested parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from aqnpipe.artifacts.diagnoses import (
    EXIT_CODES,
    Collectives,
    DeviceReport,
    DiagnosisFile,
    KernelFault,
    LocatedFault,
    NodeReport,
    Outcome,
    Rate,
    Repetition,
    RunRecord,
    SiteRate,
    Untested,
    worst,
)
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.seeding import derive_seed

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
    changed = [name for name in _SETTINGS if getattr(before, name) != getattr(after, name)]
    lines = [f"{name}: {getattr(before, name)} -> {getattr(after, name)}" for name in changed]
    lines += _versions(before.versions, after.versions)
    old, new = _by_identity(before), _by_identity(after)
    new_faults, less_tested = 0, 0
    for key in [key for key in old if key not in new]:
        lines.append(f"{old[key].device}: gone ({_named(old[key])})")
        less_tested += 1
    for key, device in new.items():
        if key not in old:
            lines.append(f"{device.device}: new ({_named(device)}), {device.verdict}")
        changes, appeared, lost = _device_changes(old.get(key), device)
        lines += [f"{device.device}: {change}" for change in changes]
        new_faults, less_tested = new_faults + appeared, less_tested + lost
    changes, appeared, lost = _collective_changes(before.collectives, after.collectives)
    lines += [f"collectives: {change}" for change in changes]
    new_faults, less_tested = new_faults + appeared, less_tested + lost
    return Comparison(tuple(lines), new_faults, less_tested)


def _versions(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name) or 'unknown'} -> {after.get(name) or 'unknown'}"


def _device_changes(before: DeviceReport | None, after: DeviceReport) -> tuple[list[str], int, int]:
    """Return (changes in words, number of new faults, 1 if less was tested than before else 0)."""
    old, new = (
        {(fault.layer, fault.site): _fault(fault) for fault in device.faults} if device else {}
        for device in (before, after)
    )
    changes, appeared = _fault_changes(old, new)
    if before is None:
        return changes, appeared, 0
    changes += [
        f"fault changed: {old[place]} -> {new[place]}" for place in old.keys() & new.keys() if old[place] != new[place]
    ]
    if before.verdict != after.verdict:
        reason = "" if after.verdict in _DECIDED else f" ({after.reason})"
        changes.insert(0, f"{before.verdict} -> {after.verdict}{reason}")
    skipped, skips = _untested(before), _untested(after)
    untested = [part for part in skips if part not in skipped]
    for words, parts in (("no longer", untested), ("now", [part for part in skipped if part not in skips])):
        if parts:
            changes.append(f"{words} tested: {', '.join(parts)}")
    changes += _versions(_parts(before), _parts(after))
    lost = bool(untested) or (before.verdict in _DECIDED and after.verdict not in _DECIDED)
    return changes, appeared, int(lost)


def _collective_changes(before: Collectives | None, after: Collectives | None) -> tuple[list[str], int, int]:
    """Return what `_device_changes` does. A fault is the same if collective and rank are."""
    old, new = (
        {(fault.collective, fault.rank): fault.in_words for fault in part.faults} if part else {}
        for part in (before, after)
    )
    changes, appeared = _fault_changes(old, new)
    earlier, now = (part.verdict if part else None for part in (before, after))
    if earlier != now:
        changes.insert(0, f"{earlier or 'not tested'} -> {now or 'not tested'}")
    return changes, appeared, int(earlier in _DECIDED and now not in _DECIDED)


def _fault_changes(old: Mapping[Any, str], new: Mapping[Any, str]) -> tuple[list[str], int]:
    """Return in words the faults that appeared and those that are gone, by place, and how many appeared."""
    appeared = [f"new fault: {fault}" for place, fault in new.items() if place not in old]
    return appeared + [f"fault gone: {fault}" for place, fault in old.items() if place not in new], len(appeared)


def _by_identity(report: NodeReport) -> dict[str, DeviceReport]:
    found: dict[str, DeviceReport] = {}
    for device in report.devices:
        parts = device.hardware
        key = (parts.uuid or parts.serial if parts else None) or device.device
        # Two processes of one CPU are the first and the second of the same name.
        number = sum(other.partition("#")[0] == key for other in found)
        found[f"{key}#{number}"] = device
    return found


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


MISS_PROBABILITIES = (1e-3, 1e-2, 1e-5, 1e-8)
"""Allowed probabilities of a miss, one run after the other: they set the number of rows of a probe."""

EXACT_REPEATS = (5, 3, 8)
NUM_PROMPTS = (5, 1, 8)
PROMPT_TOKENS = (64, 7, 200, 33, 128)
"""4, 3 and 5 entries: runs meet every combination of rows, repeats and lengths, because no two share a divisor."""

INTERRUPTED = "interrupted before a run was complete"
"""Reason for no verdict on a device that ran nothing to its end."""

_CONFIDENCE = 0.95


def config_of_run(config: DiagnosisConfig, run: int) -> DiagnosisConfig:
    """Return the settings of run number `run`: the first is as configured, later ones have new seeds and shapes."""
    if run == 0:
        return config
    return config.model_copy(
        update={
            # A derived seed has 63 bits, settings allow 62.
            "seed": derive_seed(config.seed, "diagnosis.run", run) >> 1,
            "miss_probability": MISS_PROBABILITIES[run % len(MISS_PROBABILITIES)],
            "exact_repeats": EXACT_REPEATS[run % len(EXACT_REPEATS)],
            "num_prompts": NUM_PROMPTS[run % len(NUM_PROMPTS)],
        }
    )


def prompt_tokens_of_run(run: int) -> int:
    """Return the number of tokens of the random prompts of run number `run`."""
    return PROMPT_TOKENS[run % len(PROMPT_TOKENS)]


def record_of(
    file: DiagnosisFile, config: DiagnosisConfig, prompt_tokens: int, temperature: float | None = None
) -> RunRecord:
    """Return what is kept of one run."""
    return RunRecord(
        time=file.time,
        seconds=file.seconds,
        seed=config.seed,
        num_prompts=config.num_prompts,
        prompt_tokens=prompt_tokens,
        elements_per_channel=file.elements_per_channel,
        forward_equivalents=file.forward_equivalents,
        verdict=file.verdict,
        faults=tuple((fault.layer, fault.site) for fault in file.faults),
        temperature_celsius=temperature,
    )


class RunsOfDevice:
    """The runs on one device so far, and their report. Of every faulty site the first fault is kept."""

    def __init__(self, device: str, hardware: Hardware, *, repeated: bool) -> None:
        self.hardware = hardware
        self._device = device
        self._repeated = repeated
        self._records: list[RunRecord] = []
        self._files: list[DiagnosisFile] = []
        self._faults: dict[tuple[int | None, str], LocatedFault] = {}
        self._kernels: tuple[KernelFault, ...] = ()
        self._untested: tuple[Untested, ...] = ()

    @property
    def count(self) -> int:
        """Number of runs so far."""
        return len(self._records)

    def add(self, file: DiagnosisFile, record: RunRecord) -> None:
        """Add a run."""
        self._files = [*self._files, file][:1]
        others = file.untested if not self._records else self._untested
        self._untested = tuple(part for part in file.untested if part in others)
        self._records.append(record)
        self._kernels = self._kernels or file.kernels
        for fault in file.faults:
            self._faults.setdefault((fault.layer, fault.site), fault)

    def report(self, *, interrupted: bool = False) -> DeviceReport:
        """Return the report of the runs so far."""
        verdict, reason = self._verdict()
        last = self._records[-1] if self._records else None
        return DeviceReport(
            device=self._device,
            hardware=self.hardware,
            verdict=verdict,
            reason=reason,
            faults=tuple(self._faults.values()),
            kernels=self._kernels,
            untested=self._untested,
            forward_equivalents=sum(record.forward_equivalents for record in self._records),
            seconds=sum(record.seconds for record in self._records),
            temperature_after_celsius=last.temperature_celsius if last else None,
            repetition=self._repetition(interrupted) if self._repeated and self._records else None,
        )

    def _verdict(self) -> tuple[Outcome, str]:
        verdicts = [record.verdict for record in self._records]
        if not verdicts:
            return "abstain", INTERRUPTED
        found = worst(verdicts)
        if not self._repeated:
            return found, self._files[0].reason
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
        return found, f"{len(verdicts)} runs: {counts}"

    def _repetition(self, interrupted: bool) -> Repetition:
        runs = self.count
        sites = [
            SiteRate(
                layer=layer,
                scope=fault.scope,
                site=site,
                type=fault.type,
                rate=rate_of(sum((layer, site) in record.faults for record in self._records), runs),
            )
            for (layer, site), fault in self._faults.items()
        ]
        return Repetition(
            faulty=rate_of(sum(record.verdict == "fault" for record in self._records), runs),
            sites=tuple(sorted(sites, key=lambda site: -site.rate.seen)),
            any_other_site=rate_of(0, runs),
            interrupted=interrupted,
            runs=tuple(self._records),
        )


def rate_of(seen: int, runs: int) -> Rate:
    """Return a rate with its exact 95 % interval (Clopper-Pearson).

    If nothing or everything was seen, the interval has one open end and its other end is the exact one-sided bound.
    The bounds hold if runs are independent, which a fault that depends on the time or on heat is not.
    """
    tail = (1 - _CONFIDENCE) / (1 if seen in (0, runs) else 2)
    low = float(stats.beta.ppf(tail, seen, runs - seen + 1)) if seen else 0.0
    high = float(stats.beta.ppf(1 - tail, seen + 1, runs - seen)) if seen < runs else 1.0
    return Rate(seen=seen, runs=runs, rate=seen / runs, low=low, high=high)
