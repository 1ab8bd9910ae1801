"""The verdict of a diagnosis, derived from the results of exact probes and scans."""

from collections.abc import Sequence
from typing import Any

import polars as pl
import torch
from scipy import stats

from aqnpipe.artifacts.diagnoses import Finding, KernelFault, LocatedFault, Verdict
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS
from aqnpipe.diagnosis.exact_probes import ExactResult
from aqnpipe.diagnosis.probes.patterns import operand_bits

_MISSED_CALLS = 0.05
"""Probability of a miss for which the rate of calls is stated."""


def judge(
    exact: ExactResult,
    scans: tuple[pl.DataFrame, Sequence[Finding], float] | None,
    config: DiagnosisConfig,
    simulated_faults: Sequence[dict[str, object]] = (),
    kernels: Sequence[KernelFault] = (),
) -> Verdict:
    """Return the verdict on the exact result, with the scans (LayerTable, findings, forward equivalents) if they ran.

    Exact probes decide whatever the scans found: any output that differs from the known answer by more than the
    tolerance of its probe is a fault, and without one the machine is healthy in what was tested. `kernels`: those
    behind the exact result.
    """
    decided = _exact_verdict(exact, config, kernels)
    num_layers = len({check.layer for check in exact.checks if check.layer != OUTSIDE_LAYERS})
    findings: Sequence[Finding] = ()
    cost = 0.0
    if scans is not None:
        table, findings, cost = scans
        num_layers = table.height
        decided["reason"] += _comparative_findings(findings)
    return Verdict(
        **decided,
        method="exact" if scans is None else "all",
        findings=tuple(findings),
        num_layers=num_layers,
        simulated_faults=tuple(simulated_faults),
        statistical_forward_equivalents=cost,
        forward_equivalents=exact.forward_equivalents + cost,
    )


def _exact_verdict(exact: ExactResult, config: DiagnosisConfig, kernels: Sequence[KernelFault]) -> dict[str, Any]:
    miss = (1 - config.intermittent_rate) ** exact.elements_per_channel
    first = exact.faults[0] if exact.faults else None
    call_rate = 1 - _MISSED_CALLS ** (1 / exact.calls_per_site)
    if exact.faults:
        reason = _faults_in_words(exact.faults, kernels)
    else:
        reason = (
            "no wrong value at any site with a known answer; a fault of a tested linear, norm or sum (lm_head and the "
            "final norm included; not of the embedding, experts and routers) that changes a share "
            f"{config.intermittent_rate:g} of the values of one channel is missed with probability {miss:.1e}, one "
            f"that strikes {call_rate:.0%} of the calls with {_MISSED_CALLS:.0%}, a rarer one more often"
        )
    bound = false_alarm_bound(exact.device)
    return {
        "verdict": "fault" if exact.faults else "healthy",
        "reason": reason + _device_in_words(exact, bound),
        "layer": first.layer if first else None,
        "type": first.type if first else None,
        "site": first.site if first else None,
        "num_faulty_channels": first.num_faulty_channels if first else None,
        "faults": exact.faults,
        "kernels": tuple(kernels),
        "untested": exact.untested,
        "reordered_sites": exact.reordered,
        "elements_per_channel": exact.elements_per_channel,
        "calls_per_site": exact.calls_per_site,
        "detected_call_rate": call_rate,
        "intermittent_rate": config.intermittent_rate,
        "miss_probability": miss,
        "false_alarm_bound": bound,
        "exact_forward_equivalents": exact.forward_equivalents,
    }


def _device_in_words(exact: ExactResult, bound: float | None) -> str:
    """Return what the device does that is no fault, whether its rate of false alarms is known, and what is untested."""
    words = ""
    if exact.reordered:
        words += (
            f"; repeats of {', '.join(exact.reordered)} differ within the error bound of their sums, although "
            "deterministic algorithms were requested: this device adds in another order in every call"
        )
    if exact.float32_product_bits is not None:
        words += (
            f"; products keep {exact.float32_product_bits} of the 24 bits of a float32 number, torch asks for "
            f"{operand_bits(torch.float32)}"
        )
    if bound is None:
        words += f"; the rate of false alarms has not been measured on devices of class {exact.device}"
    if exact.untested:
        words += f"; not tested: {', '.join(dict.fromkeys(untested.part for untested in exact.untested))}"
    return words


def scanned_fault(layer: int | None, site: str, kind: str, scans: Sequence[str], evidence: str) -> LocatedFault:
    """Return a fault that scans have found: without channels or a magnitude, and outside the layers without a layer."""
    unknown = ("num_faulty_channels", "num_channels", "magnitude", "magnitude_low", "magnitude_high", "threshold")
    return LocatedFault.model_validate(
        {
            **dict.fromkeys(unknown),
            "layer": layer,
            "site": site,
            "scope": "model" if layer is None else "layer",
            "type": kind,
            "faulty_channel_indices": (),
            "probes": tuple(dict.fromkeys(scans)),
            "evidence": evidence,
        }
    )


def _faults_in_words(faults: Sequence[LocatedFault], kernels: Sequence[KernelFault]) -> str:
    """Return the kernels that err, and the faults; those that are the lanes of a kernel at several sites by site."""
    lines = [kernel.in_words for kernel in kernels]
    lanes = [kernel.wrong_columns for kernel in kernels]
    sites = [fault.site for fault in faults if fault.channels in [of(fault.num_channels or 0) for of in lanes]]
    # The lanes of the gradient of a weight are its input channels.
    sites += [site.replace(".input_", ".weight_") for site in sites if ".input_" in site]
    if len(sites) > 1:
        lines.append(f"seen at {', '.join(dict.fromkeys(fault.site for fault in faults if fault.site in sites))}")
        faults = [fault for fault in faults if fault.site not in sites]
    return "; ".join([*lines, *map(_fault_in_words, faults)])


def _fault_in_words(fault: LocatedFault) -> str:
    magnitude = "" if fault.magnitude is None else f" of magnitude {fault.magnitude:.3g}"
    if fault.magnitude_low is not None and fault.magnitude_high is not None:
        magnitude += f" ({fault.magnitude_low:.3g} to {fault.magnitude_high:.3g})"
    kind = fault.type.replace("_", " ")
    place = {"layer": f"layer {fault.layer}, ", "device": f"device-wide ({len(fault.layers)} layers), ", "model": ""}
    bits = f", {fault.bits.observed} instead of {fault.bits.expected}" if fault.bits else ""
    return f"{place[fault.scope]}{fault.site}: {kind}{magnitude}, {fault.evidence}{bits}"


def _comparative_findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ". The published scans flag no layer."
    flags = ", ".join(f"{finding.scan} layer {finding.layer} (z {finding.z:.3g})" for finding in findings)
    return f". Scans that compare layers flag {flags}; they do not decide, as healthy models exceed the thresholds too."


HEALTHY_RUNS, FALSE_ALARMS = 378, 0
"""Healthy runs of detection.md (benchmarks/README.md), all on a CPU, and those called faulty; a test compares them.

The CPU ran as it is, with other settings, and with emulated arithmetic of other devices, which differs more from the
reference.
"""


def false_alarm_bound(device: str) -> float | None:
    """Return the exact one-sided 95 % upper bound of the rate of false alarms (Clopper-Pearson) for a class of device.

    None where nothing was measured.
    """
    return float(stats.beta.ppf(0.95, FALSE_ALARMS + 1, HEALTHY_RUNS - FALSE_ALARMS)) if device == "cpu" else None
