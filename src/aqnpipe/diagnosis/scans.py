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
that is equal in all layers; most faults inside a layer. The exact probes detect these (diagnosis/exact_probes.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import Finding, LayerTable
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import LayerInput, NonFiniteOutputError, capture_layer_inputs, inference, run_layer
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.seeding import keyed_generator

REPEAT_RATIO = 10.0
"""A layer is unrepeatable if its relative instability is this multiple of the median (which is 0 without noise)."""

NOISE_SHARE = 0.5
"""Above this share of changed values in affected channels the fault is noise, below it spikes (at most 1 %)."""

FALSE_ALARM = 1e-6
"""Poisson tail probability below which a count is an excess."""

HEALTHY_RATIO = 3.0
"""Allowed multiple of the median count, because healthy layers differ by more than a Poisson distribution."""

_Floats = NDArray[np.float64]
_MAD_TO_SIGMA = 1.4826
_RELATIVE_FLOOR = 0.01
_ABSOLUTE_FLOOR = 1e-6

_NEIGHBOURS = 8
"""Number of distinct magnitudes on either side from which the expected count of a magnitude is estimated."""
_LOWEST_KURTOSIS = -2.0
"""The lowest possible Fisher kurtosis, used in place of the undefined 0/0 of a constant output."""


@dataclass(frozen=True)
class _LayerSample:
    """Statistics of one layer on one prompt. Traces of faults are counted in the outputs of the `calls` gain trials.

    The inputs of those trials have fresh noise on every value. Identical rows (a repeated token, a zeroed input) then
    give different outputs, so values that are exactly 0 or exactly equal were made so by the layer itself.
    """

    instability: float
    relative_instability: float
    changed_share: float
    gain: float
    kurtosis: float
    zeros: int
    ties_at_maximum: int
    pile_up: float
    elements: int
    calls: int


@dataclass(frozen=True)
class Measurements:
    """Arrays over layers: means of the statistics and sums of the counts over prompts; `eps` of the model's dtype."""

    instability: NDArray[np.float64]
    relative_instability: NDArray[np.float64]
    changed_share: NDArray[np.float64]
    gain: NDArray[np.float64]
    kurtosis: NDArray[np.float64]
    zeros: NDArray[np.float64]
    ties_at_maximum: NDArray[np.float64]
    pile_up: NDArray[np.float64]
    elements: NDArray[np.float64]
    calls: NDArray[np.float64]
    eps: float
    forward_equivalents: float


@dataclass(frozen=True)
class LayerScores:
    """Robust z-scores over layers; NaN for a layer without a score."""

    instability_jump_z: _Floats
    gain_z: _Floats
    log_kurtosis_drop_z: _Floats


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


def is_excess(counts: _Floats, by_chance: _Floats) -> NDArray[np.bool_]:
    """Return for each layer whether its count exceeds chance and HEALTHY_RATIO times the median count."""
    expected = np.maximum(np.maximum(by_chance, 0.01), HEALTHY_RATIO * np.median(counts))
    return np.asarray(stats.poisson.sf(counts - 1, expected) < FALSE_ALARM)


def saturation_roles(kurtosis: _Floats, source: int | None) -> list[str]:
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


def robust_z(values: _Floats) -> _Floats:
    """Return `(x - median)/(1.4826*max(MAD, .01*|median|, 1e-6))`, as published for SRDD.

    The floor prevents extreme scores when all layers are nearly equal. If all layers but one are exactly equal, the
    score of that layer is its distance in units of the floor and can be very large.
    """
    median = np.median(values)
    spread = np.median(np.abs(values - median))
    return (values - median) / (_MAD_TO_SIGMA * max(spread, _RELATIVE_FLOOR * abs(median), _ABSOLUTE_FLOOR))


def first_below(z: _Floats, threshold: float, start: int = 0) -> int | None:
    """Return the first index, from `start` on, with z < threshold, or None. NaN is never below."""
    hits = np.flatnonzero(z[start:] < threshold)
    return int(hits[0]) + start if len(hits) else None


def measure(model: nn.Module, prompt_ids: Sequence[Tensor], config: DiagnosisConfig) -> Measurements:
    """Measure every decoder layer on every prompt [tokens]; ModelError for empty prompts or NaN outputs.

    One forward equivalent is one prompt through the whole model: a capture counts 1, a run of a layer 1/num_layers.
    """
    if not prompt_ids or any(ids.numel() == 0 for ids in prompt_ids):
        raise ModelError("the diagnosis has no prompt or an empty prompt, expected at least one token in each")
    num_layers = len(decoder_layers(model))
    samples: list[list[_LayerSample]] = []
    dtype = torch.float32
    with inference(model):
        # The number of a prompt keys its random numbers, so each diagnosis has others.
        for prompt, ids in enumerate([*prompt_ids] * config.num_diagnoses):
            inputs = capture_layer_inputs(model, ids.unsqueeze(0))
            dtype = inputs[0].hidden.dtype
            if not inputs[0].hidden.isfinite().all():
                raise NonFiniteOutputError(None, model)
            samples.append([_sample_layer(model, i, inputs[i], config, prompt) for i in range(num_layers)])
    runs_per_prompt = config.num_repeats + config.gain_trials
    columns = {
        field.name: np.array([[getattr(sample, field.name) for sample in row] for row in samples], dtype=np.float64)
        for field in fields(_LayerSample)
    }
    return Measurements(
        **{name: values.sum(0) if name in _COUNTS else values.mean(0) for name, values in columns.items()},
        eps=torch.finfo(dtype).eps,
        forward_equivalents=float(len(samples) * (1 + runs_per_prompt)),
    )


def _sample_layer(
    model: nn.Module, index: int, layer_input: LayerInput, config: DiagnosisConfig, prompt: int
) -> _LayerSample:
    """Run layer `index` num_repeats times on the same input and gain_trials times on noisy inputs."""
    hidden, kwargs = layer_input.hidden, layer_input.kwargs
    reference, *repeats = (run_layer(model, index, hidden, kwargs) for _ in range(config.num_repeats))
    instability = float(np.mean([_std(repeat - reference) for repeat in repeats]))
    gains, piles, zeros, ties = [], [], 0, 0
    for trial in range(config.gain_trials):
        generator = keyed_generator("cpu", config.seed, "diagnosis.gain", prompt, index, trial)
        noised = add_input_noise(hidden, config.gain_noise_scale, generator)
        output = run_layer(model, index, noised, kwargs)
        gains.append(_std(output - reference) / _std((noised - hidden).float().cpu()))
        zeros += int((output == 0).sum())
        ties += ties_at_maximum(output)
        piles.append(pile_up(output))
    return _LayerSample(
        instability=instability,
        relative_instability=instability / _std(reference) if instability else 0.0,
        changed_share=float(np.mean([changed_share(reference, repeat) for repeat in repeats])),
        gain=float(np.mean(gains)),
        kurtosis=fisher_kurtosis(reference),
        zeros=zeros,
        ties_at_maximum=ties,
        pile_up=float(np.median(piles)),
        elements=config.gain_trials * reference.numel(),
        calls=config.gain_trials,
    )


def add_input_noise(hidden: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Return `hidden + z*scale*std(hidden)`; std is 1 for a constant input (after a layer that outputs only 0)."""
    sigma = scale * (_std(hidden.float().cpu()) or 1.0)
    noise = torch.randn(hidden.shape, generator=generator) * sigma
    return hidden + noise.to(hidden.device, hidden.dtype)


def ties_at_maximum(output: Tensor) -> int:
    """Return the number of values, minus one, whose magnitude is exactly max|output|; 0 if all values are 0."""
    magnitudes = output.abs()
    largest = magnitudes.max()
    return int((magnitudes == largest).sum()) - 1 if largest > 0 else 0


def pile_up(output: Tensor) -> float:
    """Return -log10 of the probability of the largest count of one magnitude inside the range, at least 0.

    A clamp puts many values on its limit, even if other channels exceed the limit. The count of a magnitude is expected
    to be Poisson with the mean of its 8 neighbours on the side with more values; the probability is multiplied by the
    number of distinct magnitudes (Bonferroni). Exact zeros and the maximum are counted by the other traces.
    """
    _, counts = torch.unique(output.abs().flatten(), return_counts=True)
    inner = counts.double().numpy()[1:-1]
    if len(inner) < 2 * _NEIGHBOURS:
        return 0.0
    sums = np.concatenate([[0.0], np.cumsum(inner)])
    index = np.arange(len(inner))
    below, above = np.maximum(index - _NEIGHBOURS, 0), np.minimum(index + 1 + _NEIGHBOURS, len(inner))
    left = (sums[index] - sums[below]) / np.maximum(index - below, 1)
    right = (sums[above] - sums[index + 1]) / np.maximum(above - index - 1, 1)
    log_chance = stats.poisson.logsf(inner - 1, np.maximum(np.maximum(left, right), 1.0)) + np.log(len(inner))
    return max(0.0, float(-log_chance.min() / np.log(10)))


def changed_share(reference: Tensor, repeat: Tensor) -> float:
    """Return the share of values [..., channels] that differ, among the channels with any difference; 0 if none."""
    changed = (reference != repeat).flatten(0, -2)
    affected = changed.any(0)
    return float(changed[:, affected].float().mean()) if affected.any() else 0.0


def fisher_kurtosis(output: Tensor) -> float:
    """Return the excess kurtosis of all values (biased, scipy's default); its minimum, -2, for a constant output."""
    values = output.double().flatten().numpy()
    return float(stats.kurtosis(values)) if values.min() < values.max() else _LOWEST_KURTOSIS


def _std(values: Tensor) -> float:
    """Return the population standard deviation of all values, in float64."""
    return float(values.double().std(correction=0))


_COUNTS = ("zeros", "ties_at_maximum", "elements", "calls")
