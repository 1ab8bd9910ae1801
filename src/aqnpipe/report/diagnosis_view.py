"""The verdicts of the diagnosis, judged against the faults that were simulated."""

from collections.abc import Mapping, Sequence
from typing import Literal

from aqnpipe.artifacts.diagnoses import LocatedFault, Verdict
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Diagnosis, Run
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

Outcome = Literal["right", "false_alarm", "missed", "wrong_layer", "wrong_type", "abstained"]

_SHARED_NAMES = {"noise": "noise_or_spike", "spike": "noise_or_spike"}
"""Fault types that the published scans cannot distinguish, and their common name."""


def diagnosis_verdicts(diagnoses: Sequence[Diagnosis], words: Words) -> Table:
    """Return a row per machine: the simulated fault, the fault that was found, and whether that is right."""
    rows = tuple(
        Row(
            (
                diagnosis.machine,
                _simulated_faults(diagnosis.verdict, words),
                _found_faults(diagnosis.verdict, words),
                words(f"diagnosis.outcome.{outcome(diagnosis.verdict)}"),
                diagnosis.verdict.reason,
                f"{diagnosis.verdict.forward_equivalents:,.0f}",
            )
        )
        for diagnosis in diagnoses
    )
    headers = tuple(words(f"column.{name}") for name in ("machine", "fault", "found", "right", "reason", "forwards"))
    return Table("diagnosis-verdicts", words("diagnosis.verdicts"), headers, rows, 5)


def device_sentences(diagnoses: Sequence[Diagnosis], runs: Sequence[Run], words: Words) -> list[str]:
    """Return which machines were diagnosed on a device of their own, and on what arms were trained; else nothing."""
    named = [each for each in diagnoses if each.device]
    found = [words("diagnosis.on_device", machine=each.machine, device=each.device) for each in named]
    trained = sorted({run.record.device for run in runs})
    return [*found, words("diagnosis.trained_on", device="; ".join(trained))] if found and trained else found


def outcome(verdict: Verdict) -> Outcome:
    """Compare a verdict with the faults that were simulated."""
    if verdict.verdict == "abstain":
        return "abstained"
    if not verdict.simulated_faults:
        return "right" if verdict.verdict == "healthy" else "false_alarm"
    if verdict.verdict == "healthy":
        return "missed"
    in_layer = [fault for fault in verdict.simulated_faults if fault.get("layer") == verdict.layer]
    if not in_layer:
        return "wrong_layer"
    kinds = {str(fault.get("type")) for fault in in_layer}
    return "right" if verdict.type in kinds | {_SHARED_NAMES.get(kind) for kind in kinds} else "wrong_type"


def _simulated_faults(verdict: Verdict, words: Words) -> str:
    return "; ".join(_simulated_fault(fault) for fault in verdict.simulated_faults) or words("fault.none")


def _simulated_fault(fault: Mapping[str, object]) -> str:
    details = ", ".join(f"{key} {fault[key]}" for key in ("layer", "site", "magnitude", "sparsity") if key in fault)
    return f"{_spaced(str(fault.get('type', '')))} ({details})"


def _found_faults(verdict: Verdict, words: Words) -> str:
    if verdict.layer is None and not verdict.faults:
        return words(f"found.verdict.{verdict.verdict}")
    if not verdict.faults:
        return words("found.fault_in_layer", layer=verdict.layer, type=_spaced(verdict.type))
    return "; ".join(
        _found_place(fault, words)
        + (
            words("found.where", site=_spaced(fault.site), channels=fault.num_faulty_channels)
            if fault.num_faulty_channels
            else ""
        )
        for fault in verdict.faults
    )


def _found_place(fault: LocatedFault, words: Words) -> str:
    if fault.scope == "device":
        return words("found.fault_of_device", type=_spaced(fault.type))
    if fault.layer is None:
        return _spaced(fault.type)
    return words("found.fault_in_layer", layer=fault.layer, type=_spaced(fault.type))


def _spaced(name: str | None) -> str:
    return numbers.MISSING if name is None else name.replace("_", " ")
