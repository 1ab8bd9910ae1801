"""The published statistical scans (SRDD), and four counts of traces that faults leave in the output of a layer.

Every decoder layer is run by itself on the input it received in one ordinary forward. The cost is therefore linear in
the number of layers, and an error of one layer does not enter the statistics of later layers (except through their
captured inputs).

Published scans, with the published thresholds. Their z-scores compare the layers of one model, so they need many
similar layers. In shallow models the gain and the kurtosis of healthy layers change with depth, and healthy layers
exceed a threshold of 2. These findings are therefore reported but do not decide.

- ambient: instability; the FIRST layer whose increase over the previous layer has z > ambient_jump_z. The published
  scan runs the whole model, in which noise spreads downstream and only the first increase counts. Here instability is
  local: a fault raises it in one layer, and it falls again in the next. The increase of the first layer is relative to
  the median of all layers.
- gain: response to input noise; the lowest layer if z < -gain_drop_z (a dead zone suppresses small changes).
- kurtosis: the first drop of log-kurtosis with z < -kurtosis_drop_z, from first_kurtosis_layer on (clamped outliers).
- kurtosis_rise (not published): the opposite direction (spikes, or a bias on few channels).

Traces, which healthy layers almost never show. They decide if no exact probe ran:

- repeat: equal inputs give different outputs, far more than in other layers.
- zeros: more values are exactly 0 than cancellation explains.
- clamp: more values equal the maximum exactly than coincidence explains.
- pile_up: more values share a magnitude inside the range than its neighbours explain.

Not detected: a bias (it repeats and leaves no trace); a clamp reached by only one value of a call (small magnitude,
sparse channels); a dead zone below the smallest values; a spike rarer than one in the number of values tested; a fault
that is equal in all layers; most faults inside a layer. The exact probes detect these (diagnosis/exact.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import Finding, LayerTable
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.measure import Measurements, measure
from aqnpipe.diagnosis.robust import Floats, first_below, robust_z

REPEAT_RATIO = 10.0
"""A layer is unrepeatable if its relative instability is this multiple of the median (which is 0 without noise)."""

NOISE_SHARE = 0.5
"""Above this share of changed values in affected channels the fault is noise, below it spikes (at most 1 %)."""

FALSE_ALARM = 1e-6
"""Poisson tail probability below which a count is an excess."""

HEALTHY_RATIO = 3.0
"""Allowed multiple of the median count, because healthy layers differ by more than a Poisson distribution."""


@dataclass(frozen=True)
class LayerScores:
    """Robust z-scores over layers; NaN for a layer without a score."""

    instability_jump_z: Floats
    gain_z: Floats
    log_kurtosis_drop_z: Floats


def run_scans(
    model: nn.Module, prompt_ids: Sequence[Tensor], config: DiagnosisConfig
) -> tuple[pl.DataFrame, list[Finding], float]:
    """Scan `model` on prompts [tokens]; return (LayerTable, findings, forward equivalents).

    One forward equivalent is one prompt through the whole model. Raises ModelError on NaN or infinite outputs.
    """
    measured = measure(model, prompt_ids, config)
    scores = score(measured)
    findings = [*published_findings(scores, config), *trace_findings(measured)]
    return layer_table(measured, scores, findings), findings, measured.forward_equivalents


def score(measured: Measurements) -> LayerScores:
    """Return robust z-scores of instability increases, gains and log-kurtosis steps.

    The logarithm is of Pearson's kurtosis (Fisher's + 3), because Fisher's can be negative. At the published values of
    about 3500 the difference is negligible.
    """
    jumps = np.diff(measured.instability, prepend=np.median(measured.instability))
    log_kurtosis_steps = np.diff(np.log(measured.kurtosis + 3))
    drop_z = robust_z(log_kurtosis_steps) if len(log_kurtosis_steps) else log_kurtosis_steps
    return LayerScores(robust_z(jumps), robust_z(measured.gain), np.concatenate([[np.nan], drop_z]))


def published_findings(scores: LayerScores, config: DiagnosisConfig) -> list[Finding]:
    """Return the findings of the scans that compare layers, at most one each."""
    findings = []
    ambient = first_below(-scores.instability_jump_z, -config.ambient_jump_z)
    if ambient is not None:
        z = float(scores.instability_jump_z[ambient])
        findings.append(Finding(scan="ambient", layer=ambient, type="noise_or_spike", z=z))
    lowest = int(np.argmin(scores.gain_z))
    if scores.gain_z[lowest] < -config.gain_drop_z:
        findings.append(Finding(scan="gain", layer=lowest, type="dead_zone", z=float(scores.gain_z[lowest])))
    drop = first_below(scores.log_kurtosis_drop_z, -config.kurtosis_drop_z, config.first_kurtosis_layer)
    if drop is not None:
        z = float(scores.log_kurtosis_drop_z[drop])
        findings.append(Finding(scan="kurtosis", layer=drop, type="saturation", z=z))
    rise = first_below(-scores.log_kurtosis_drop_z, -config.kurtosis_drop_z, config.first_kurtosis_layer)
    if rise is not None:
        z = float(scores.log_kurtosis_drop_z[rise])
        findings.append(Finding(scan="kurtosis_rise", layer=rise, type="bias_or_spike", z=z))
    return findings


def trace_findings(measured: Measurements) -> list[Finding]:
    """Return a finding for every layer with an excess of a trace; z is the robust z-score of the trace over layers.

    Expected counts without a fault: a share eps of the values cancels to exactly 0, and a share 20*eps of the calls has
    a tie at the maximum (about four spacings of numbers in a tail of the distribution 0.2 sigma wide); at least 0.01.
    """
    repeat = measured.relative_instability
    unrepeatable = repeat > REPEAT_RATIO * np.median(repeat)
    zeros = is_excess(measured.zeros, measured.eps * measured.elements)
    clamped = is_excess(measured.ties_at_maximum, 20 * measured.eps * measured.calls)
    findings = []
    for layer in np.flatnonzero(unrepeatable):
        kind = "noise" if measured.changed_share[layer] > NOISE_SHARE else "spike"
        z = float(robust_z(repeat)[layer])
        findings.append(Finding(scan="repeat", layer=int(layer), type=kind, z=z))
    zero_z = robust_z(measured.zeros / measured.elements)
    findings += [
        Finding(scan="zeros", layer=int(i), type="dead_zone", z=float(zero_z[i])) for i in np.flatnonzero(zeros)
    ]
    tie_z = robust_z(measured.ties_at_maximum / measured.calls)
    findings += [
        Finding(scan="clamp", layer=int(i), type="saturation", z=float(tie_z[i])) for i in np.flatnonzero(clamped)
    ]
    piled = measured.pile_up > np.maximum(-np.log10(FALSE_ALARM), HEALTHY_RATIO * np.median(measured.pile_up))
    pile_z = robust_z(measured.pile_up)
    findings += [
        Finding(scan="pile_up", layer=int(i), type="saturation", z=float(pile_z[i])) for i in np.flatnonzero(piled)
    ]
    return findings


def is_excess(counts: Floats, by_chance: Floats) -> NDArray[np.bool_]:
    """Return for each layer whether its count exceeds chance and HEALTHY_RATIO times the median count."""
    expected = np.maximum(np.maximum(by_chance, 0.01), HEALTHY_RATIO * np.median(counts))
    return np.asarray(stats.poisson.sf(counts - 1, expected) < FALSE_ALARM)


def saturation_roles(kurtosis: Floats, source: int | None) -> list[str]:
    """Return the role of each layer: the source, and sat_prop for the consecutive layers after it with low kurtosis.

    Low means a log-kurtosis in the lower half of the drop from the layer before the source to the source. If there is
    no source, or its kurtosis did not drop, no layer is sat_prop.
    """
    roles = ["healthy"] * len(kurtosis)
    if source is None:
        return roles
    roles[source] = "source"
    logs = np.log(kurtosis + 3)
    if source == 0 or logs[source] >= logs[source - 1]:
        return roles
    half_way = (logs[source - 1] + logs[source]) / 2
    for layer in range(source + 1, len(kurtosis)):
        if logs[layer] > half_way:
            break
        roles[layer] = "sat_prop"
    return roles


def layer_table(measured: Measurements, scores: LayerScores, findings: Sequence[Finding]) -> pl.DataFrame:
    """Return the LayerTable. A saturation source needs a trace of a clamp; a kurtosis drop is not enough."""
    clamped = [finding.layer for finding in findings if finding.scan in ("clamp", "pile_up")]
    table = pl.DataFrame(
        {
            "layer": np.arange(len(measured.gain)),
            "instability": measured.instability,
            "instability_jump_z": scores.instability_jump_z,
            "gain": measured.gain,
            "gain_z": scores.gain_z,
            "kurtosis": measured.kurtosis,
            "log_kurtosis_drop_z": scores.log_kurtosis_drop_z,
            "changed_share": measured.changed_share,
            "zero_share": measured.zeros / measured.elements,
            "values_at_maximum": 1 + measured.ties_at_maximum / measured.calls,
            "pile_up": measured.pile_up,
            # Measured on texts, not by the scans: see `with_sensitivity`.
            "sensitivity": pl.Series([None] * len(measured.gain), dtype=pl.Float64),
            "role": saturation_roles(measured.kurtosis, min(clamped, default=None)),
        },
    ).with_columns(pl.col("log_kurtosis_drop_z").fill_nan(None))
    return LayerTable.validate(table)
