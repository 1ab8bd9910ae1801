"""From findings to a verdict that claims no more than they show."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from aqnpipe.artifacts import Finding, Verdict

MIN_LAYERS = 4
"""With fewer layers no median of layers is robust against a fault in one of them."""

_EXACT_SCANS = ("repeat", "zeros", "clamp")


def judge(
    table: pl.DataFrame,
    findings: Sequence[Finding],
    forward_equivalents: float,
    simulated_fault: dict[str, object] | None = None,
) -> Verdict:
    """Return the verdict on a LayerTable and its findings.

    fault: exact traces in one layer. abstain: exact traces in several layers, or too few layers. healthy: no exact
    trace, whatever the published scans say; a fault that leaves none (bias) is healthy here.
    """
    exact = [finding for finding in findings if finding.scan in _EXACT_SCANS]
    layers = sorted({finding.layer for finding in exact})
    verdict, layer, kind = "healthy", None, None
    if table.height < MIN_LAYERS:
        verdict = "abstain"
        reason = (
            f"{table.height} layers are too few for robust statistics over layers, at least {MIN_LAYERS} are needed"
        )
    elif len(layers) > 1:
        verdict = "abstain"
        reason = (
            f"exact traces of faults in layers {', '.join(map(str, layers))}, expected in one at most: "
            + "; ".join(_evidence(finding, table) for finding in exact)
        )
    elif exact:
        verdict, layer, kind = "fault", exact[0].layer, exact[0].type
        reason = "; ".join(_evidence(finding, table) for finding in exact)
    else:
        reason = "no exact trace of a fault (a bias or a clamp of a lone maximum leaves none)" + _device_noise(table)
    return Verdict.model_validate(
        {
            "verdict": verdict,
            "reason": reason + _published_opinions(findings),
            "layer": layer,
            "type": kind,
            "findings": tuple(findings),
            "forward_equivalents": forward_equivalents,
            "num_layers": table.height,
            "simulated_fault": simulated_fault,
        }
    )


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


def _published_opinions(findings: Sequence[Finding]) -> str:
    published = [finding for finding in findings if finding.scan not in _EXACT_SCANS]
    if not published:
        return ". The published scans flag no layer."
    flags = ", ".join(f"{finding.scan} layer {finding.layer} (z {finding.z:.3g})" for finding in published)
    return (
        f". The published scans flag {flags}; healthy shallow models pass these thresholds too, so they do not decide."
    )
