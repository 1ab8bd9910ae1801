"""From what probes and scans found to a verdict that claims no more than they show."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from aqnpipe.artifacts.diagnoses import Finding, LocatedFault, Verdict
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.calibration import EXACT, STATISTICAL
from aqnpipe.diagnosis.exact import ExactResult

MIN_LAYERS = 4
"""With fewer layers no median of layers is robust against a fault in one of them."""

_TRACES = ("repeat", "zeros", "clamp", "pile_up")


def judge(
    exact: ExactResult | None,
    scans: tuple[pl.DataFrame, Sequence[Finding], float] | None,
    config: DiagnosisConfig,
    simulated_faults: Sequence[dict[str, object]] = (),
) -> Verdict:
    """Return the verdict on the exact result, the scans (LayerTable, findings, forward equivalents), or both.

    Exact probes decide where they ran: an answer that differs from the only right one is a fault, whatever the scans
    say, and without one the machine is healthy. Raises ValueError if neither ran.
    """
    shared: dict[str, Any] = {"simulated_faults": tuple(simulated_faults)}
    if scans is not None:
        table, findings, cost = scans
        shared |= {"findings": tuple(findings), "statistical_forward_equivalents": cost, "num_layers": table.height}
    if exact is not None:
        decided = _exact_verdict(exact, config)
        if scans is not None:
            decided["reason"] += _opinions(scans[1])
        decided |= {"method": "exact" if scans is None else "all"}
        shared = {"findings": (), "num_layers": len({check.layer for check in exact.checks})} | shared
    elif scans is not None:
        decided = _statistical_verdict(scans[0], scans[1]) | {"method": "statistical"}
    else:
        raise ValueError("judge needs the result of exact probes, of scans, or both")
    costs = (exact.forward_equivalents if exact else 0.0) + (scans[2] if scans else 0.0)
    return Verdict.model_validate({**shared, **decided, "forward_equivalents": costs})


def _exact_verdict(exact: ExactResult, config: DiagnosisConfig) -> dict[str, Any]:
    miss = (1 - config.intermittent_rate) ** exact.elements_per_channel
    first = exact.faults[0] if exact.faults else None
    if exact.faults:
        verdict, reason = "fault", "; ".join(_fault_in_words(fault) for fault in exact.faults)
    elif exact.unfit:
        verdict, reason = "abstain", "no layer stands out"
    else:
        verdict = "healthy"
        reason = (
            "every site of every layer gave the right answer; a fault that strikes "
            f"{config.intermittent_rate:g} of the values of a single channel would be missed with probability {miss:.1e}"
        )
    if exact.unfit:
        worst = max(exact.unfit, key=lambda key: exact.unfit[key])
        reason += (
            f"; most layers deviate by more than rounding at {', '.join(sorted(exact.unfit))} (at {worst} by "
            f"{exact.unfit[worst]:.2g}): either most are faulty or the probe does not fit this model"
        )
    if exact.tolerance:
        bounds = ", ".join(f"{key} {bound:.2g}" for key, bound in sorted(exact.tolerance.items()))
        reason += f"; this device rounds at {bounds} (bound on the relative deviation, from its own layers)"
    if exact.uncovered:
        reason += f"; no known answer for {', '.join(exact.uncovered)}, which were repeated at most"
    return {
        "verdict": verdict,
        "reason": reason,
        "layer": first.layer if first else None,
        "type": first.type if first else None,
        "site": first.site if first else None,
        "num_faulty_channels": first.num_faulty_channels if first else None,
        "faults": exact.faults,
        "tolerance": exact.tolerance,
        "uncovered_sites": exact.uncovered,
        "elements_per_channel": exact.elements_per_channel,
        "intermittent_rate": config.intermittent_rate,
        "miss_probability": miss,
        "false_alarm_bound": EXACT.upper_bound,
        "exact_forward_equivalents": exact.forward_equivalents,
    }


def _statistical_verdict(table: pl.DataFrame, findings: Sequence[Finding]) -> dict[str, Any]:
    """fault: traces in one layer. abstain: traces in several, or too few layers. healthy: no trace.

    What leaves no trace (a bias) is healthy here, and the scans that compare layers do not decide.
    """
    traces = [finding for finding in findings if finding.scan in _TRACES]
    layers = sorted({finding.layer for finding in traces})
    verdict = "healthy"
    faults: tuple[LocatedFault, ...] = ()
    if table.height < MIN_LAYERS:
        verdict = "abstain"
        reason = (
            f"{table.height} layers are too few for robust statistics over layers, at least {MIN_LAYERS} are needed"
        )
    elif len(layers) > 1:
        verdict = "abstain"
        reason = f"traces of faults in layers {', '.join(map(str, layers))}, expected in one at most: " + "; ".join(
            _evidence(finding, table) for finding in traces
        )
    elif traces:
        verdict = "fault"
        reason = "; ".join(_evidence(finding, table) for finding in traces)
        faults = (_scanned_fault(traces, reason),)
    else:
        reason = "no trace of a fault (a bias or a clamp of a lone maximum leaves none)" + _device_noise(table)
    return {
        "verdict": verdict,
        "reason": reason + _opinions(findings),
        "layer": faults[0].layer if faults else None,
        "type": faults[0].type if faults else None,
        "site": faults[0].site if faults else None,
        "faults": faults,
        "false_alarm_bound": STATISTICAL.upper_bound,
    }


def _scanned_fault(traces: Sequence[Finding], reason: str) -> LocatedFault:
    return LocatedFault.model_validate(
        {
            "layer": traces[0].layer,
            "site": "layer",
            "type": traces[0].type,
            "num_faulty_channels": None,
            "faulty_channel_indices": (),
            "num_channels": None,
            "magnitude": None,
            "magnitude_low": None,
            "magnitude_high": None,
            "threshold": None,
            "probes": tuple(dict.fromkeys(finding.scan for finding in traces)),
            "evidence": reason,
        }
    )


def _fault_in_words(fault: LocatedFault) -> str:
    magnitude = "" if fault.magnitude is None else f" of magnitude {fault.magnitude:.3g}"
    if fault.magnitude_low is not None and fault.magnitude_high is not None:
        magnitude += f" ({fault.magnitude_low:.3g} to {fault.magnitude_high:.3g})"
    kind = fault.type.replace("_", " ")
    return f"layer {fault.layer}, {fault.site}: {kind}{magnitude}, {fault.evidence}"


def _evidence(finding: Finding, table: pl.DataFrame) -> str:
    layer = finding.layer
    match finding.scan:
        case "repeat":
            return (
                f"layer {layer} does not repeat: {table['changed_share'][layer]:.1%} of the values change in the "
                f"channels concerned, instability {_against_median(table, 'instability', layer, '.3g')}"
            )
        case "zeros":
            return f"layer {layer} puts out {_against_median(table, 'zero_share', layer, '.3%')} exact zeros"
        case "pile_up":
            return (
                f"layer {layer} heaps values on one magnitude: -log10 of the chance is "
                f"{_against_median(table, 'pile_up', layer, '.3g')}"
            )
        case _:
            return (
                f"layer {layer} clamps: {_against_median(table, 'values_at_maximum', layer, '.2f')} "
                "values per call are exactly as large as the largest"
            )


def _device_noise(table: pl.DataFrame) -> str:
    """Say what a noisy device hides."""
    if np.median(table["changed_share"].to_numpy()) == 0:
        return ""
    return "; most layers do not repeat, so a noise fault that is not far above the device's own noise stays unseen"


def _against_median(table: pl.DataFrame, column: str, layer: int, spec: str) -> str:
    values = table[column].to_numpy()
    return f"{values[layer]:{spec}} (median layer {np.median(values):{spec}})"


def _opinions(findings: Sequence[Finding]) -> str:
    compared = [finding for finding in findings if finding.scan not in _TRACES]
    if not compared:
        return ". The published scans flag no layer."
    flags = ", ".join(f"{finding.scan} layer {finding.layer} (z {finding.z:.3g})" for finding in compared)
    return (
        f". The scans that compare layers flag {flags}; healthy models pass their thresholds too: they do not decide."
    )
