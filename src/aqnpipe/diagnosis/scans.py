"""The published statistical scans (SRDD), which report beside the exact probes and do not decide.

Every decoder layer is run by itself on the input it received in one ordinary forward. The cost is therefore linear in
the number of layers, and an error of one layer does not enter the statistics of later layers (except through their
captured inputs).

The z-scores compare the layers of one model by the published thresholds, so they need many similar layers. In shallow
models the gain and the kurtosis of healthy layers change with depth, and healthy layers exceed a threshold of 2.

- ambient: instability; the FIRST layer whose increase over the previous layer has z > ambient_jump_z. The published
  scan runs the whole model, in which noise spreads downstream and only the first increase counts. Here instability is
  local: a fault raises it in one layer, and it falls again in the next. The increase of the first layer is relative to
  the median of all layers.
- gain: response to input noise; the lowest layer if z < -gain_drop_z (a dead zone suppresses small changes).
- kurtosis: the first drop of log-kurtosis with z < -kurtosis_drop_z, from first_kurtosis_layer on (clamped outliers).
- kurtosis_rise (not published): the opposite direction (spikes, or a bias on few channels).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import Finding, LayerTable, LocatedFault
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import LayerInput, NonFiniteOutputError, capture_layer_inputs, inference, run_layer
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.seeding import keyed_generator

_Floats = NDArray[np.float64]
_MAD_TO_SIGMA = 1.4826
_RELATIVE_FLOOR = 0.01
_ABSOLUTE_FLOOR = 1e-6

_LOWEST_KURTOSIS = -2.0
"""The lowest possible Fisher kurtosis, used in place of the undefined 0/0 of a constant output."""


@dataclass(frozen=True)
class Measurements:
    """Arrays over layers: means of the statistics over prompts."""

    instability: _Floats
    gain: _Floats
    kurtosis: _Floats
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
    return layer_table(measured, scores), published_findings(scores, config), measured.forward_equivalents


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
    jumps, drops = scores.instability_jump_z, scores.log_kurtosis_drop_z
    lowest = int(np.argmin(scores.gain_z))
    found: tuple[tuple[str, str, int | None, _Floats], ...] = (
        ("ambient", "noise_or_spike", first_below(-jumps, -config.ambient_jump_z), jumps),
        ("gain", "dead_zone", lowest if scores.gain_z[lowest] < -config.gain_drop_z else None, scores.gain_z),
        *(
            (scan, kind, first_below(sign * drops, -config.kurtosis_drop_z, config.first_kurtosis_layer), drops)
            for scan, kind, sign in (("kurtosis", "saturation", 1), ("kurtosis_rise", "bias_or_spike", -1))
        ),
    )
    return [
        Finding.model_validate({"scan": scan, "layer": layer, "type": kind, "z": z[layer]})
        for scan, kind, layer, z in found
        if layer is not None
    ]


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


def with_roles(table: pl.DataFrame, faults: Sequence[LocatedFault]) -> pl.DataFrame:
    """Return the LayerTable with the roles of layers around the first that clamps; a kurtosis drop is not enough."""
    clamping = [fault.layer for fault in faults if fault.type == "saturation" and fault.layer is not None]
    roles = saturation_roles(table["kurtosis"].to_numpy(), min(clamping, default=None))
    return LayerTable.validate(table.with_columns(role=pl.Series(roles)))


def layer_table(measured: Measurements, scores: LayerScores) -> pl.DataFrame:
    """Return the LayerTable, with all layers healthy; see `with_roles`."""
    table = pl.DataFrame(
        {
            "layer": np.arange(len(measured.gain)),
            "instability": measured.instability,
            "instability_jump_z": scores.instability_jump_z,
            "gain": measured.gain,
            "gain_z": scores.gain_z,
            "kurtosis": measured.kurtosis,
            "log_kurtosis_drop_z": scores.log_kurtosis_drop_z,
            # Measured on texts, not by the scans: see `with_sensitivity`.
            "sensitivity": pl.Series([None] * len(measured.gain), dtype=pl.Float64),
            "role": ["healthy"] * len(measured.gain),
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
    samples: list[list[tuple[float, float, float]]] = []
    with inference(model):
        # The number of a prompt keys its random numbers, so each diagnosis has others.
        for prompt, ids in enumerate([*prompt_ids] * config.num_diagnoses):
            inputs = capture_layer_inputs(model, ids.unsqueeze(0))
            if not inputs[0].hidden.isfinite().all():
                raise NonFiniteOutputError(None, model)
            samples.append([_sample_layer(model, i, inputs[i], config, prompt) for i in range(num_layers)])
    runs_per_prompt = config.num_repeats + config.gain_trials
    instability, gain, kurtosis = np.array(samples, dtype=np.float64).mean(axis=0).T
    return Measurements(instability, gain, kurtosis, float(len(samples) * (1 + runs_per_prompt)))


def _sample_layer(
    model: nn.Module, index: int, layer_input: LayerInput, config: DiagnosisConfig, prompt: int
) -> tuple[float, float, float]:
    """Run layer `index` num_repeats times on the same input and gain_trials times on noisy inputs.

    Return its instability, gain and kurtosis.
    """
    hidden, kwargs = layer_input.hidden, layer_input.kwargs
    reference, *repeats = (run_layer(model, index, hidden, kwargs) for _ in range(config.num_repeats))
    instability = float(np.mean([_std(repeat - reference) for repeat in repeats]))
    gains = []
    for trial in range(config.gain_trials):
        generator = keyed_generator("cpu", config.seed, "diagnosis.gain", prompt, index, trial)
        noised = add_input_noise(hidden, config.gain_noise_scale, generator)
        output = run_layer(model, index, noised, kwargs)
        gains.append(_std(output - reference) / _std((noised - hidden).float().cpu()))
    return instability, float(np.mean(gains)), fisher_kurtosis(reference)


def add_input_noise(hidden: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Return `hidden + z*scale*std(hidden)`; std is 1 for a constant input (after a layer that outputs only 0)."""
    sigma = scale * (_std(hidden.float().cpu()) or 1.0)
    noise = torch.randn(hidden.shape, generator=generator) * sigma
    return hidden + noise.to(hidden.device, hidden.dtype)


def fisher_kurtosis(output: Tensor) -> float:
    """Return the excess kurtosis of all values (biased, scipy's default); its minimum, -2, for a constant output."""
    values = output.double().flatten().numpy()
    return float(stats.kurtosis(values)) if values.min() < values.max() else _LOWEST_KURTOSIS


def _std(values: Tensor) -> float:
    """Return the population standard deviation of all values, in float64."""
    return float(values.double().std(correction=0))
