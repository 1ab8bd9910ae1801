"""Statistics of single decoder layers for the scans, collected over layers and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.capture import LayerInput, NonFiniteOutputError, capture_layer_inputs, inference, run_layer
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.seeding import keyed_generator

_NEIGHBOURS = 8
"""Number of distinct magnitudes on either side from which the expected count of a magnitude is estimated."""

_LOWEST_KURTOSIS = -2.0
"""The lowest possible Fisher kurtosis, used in place of the undefined 0/0 of a constant output."""


@dataclass(frozen=True)
class LayerSample:
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


_COUNTS = ("zeros", "ties_at_maximum", "elements", "calls")


def measure(model: nn.Module, prompt_ids: Sequence[Tensor], config: DiagnosisConfig) -> Measurements:
    """Measure every decoder layer on every prompt [tokens]; ModelError for empty prompts or NaN outputs.

    One forward equivalent is one prompt through the whole model: a capture counts 1, a run of a layer 1/num_layers.
    """
    if not prompt_ids or any(ids.numel() == 0 for ids in prompt_ids):
        raise ModelError("the diagnosis has no prompt or an empty prompt, expected at least one token in each")
    num_layers = len(decoder_layers(model))
    samples: list[list[LayerSample]] = []
    dtype = torch.float32
    with inference(model):
        # The number of a prompt keys its random numbers, so each diagnosis has others.
        for prompt, ids in enumerate([*prompt_ids] * config.num_diagnoses):
            inputs = capture_layer_inputs(model, ids.unsqueeze(0))
            dtype = inputs[0].hidden.dtype
            if not inputs[0].hidden.isfinite().all():
                raise NonFiniteOutputError(None, model)
            samples.append([sample_layer(model, i, inputs[i], config, prompt) for i in range(num_layers)])
    runs_per_prompt = config.num_repeats + config.gain_trials
    columns = {
        field.name: np.array([[getattr(sample, field.name) for sample in row] for row in samples], dtype=np.float64)
        for field in fields(LayerSample)
    }
    return Measurements(
        **{name: values.sum(0) if name in _COUNTS else values.mean(0) for name, values in columns.items()},
        eps=torch.finfo(dtype).eps,
        forward_equivalents=float(len(samples) * (1 + runs_per_prompt)),
    )


def sample_layer(
    model: nn.Module, index: int, layer_input: LayerInput, config: DiagnosisConfig, prompt: int
) -> LayerSample:
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
    return LayerSample(
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
