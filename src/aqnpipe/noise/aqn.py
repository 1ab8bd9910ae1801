"""AQN on the rollout policy: noise on its norm weights, removed bit for bit afterwards, or on its hidden states."""

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.noise import AdaptiveNoise, Phase
from aqnpipe.errors import ConfigError
from aqnpipe.models.layout import decoder_layers, layer_of, norms_sha256, rms_norms, weight_of
from aqnpipe.noise.kernels.gaussian import add_absolute_gaussian_
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.receipt_content import WeightSync
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.rounding import ROUNDED_DTYPES, noised_moments, spacing_of
from aqnpipe.noise.receipts.table import AQN, Row
from aqnpipe.seeding import derive_seed

_RARE_EVENTS = 2.5
"""The standard error of a sum covers at least this number of additional or missing changed elements."""


def target_factors(
    model: nn.Module, noise: AdaptiveNoise, layer_factors: Mapping[int, float] | None
) -> dict[str, float]:
    """Return the factor of every target (norm or decoder layer) on the schedule's sigma, by qualified module name.

    See `AdaptiveNoise.factor`. Raises ConfigError if factors and layers do not match one to one, if a named layer or an
    excluded norm does not exist, or if no target is left.
    """
    if noise.targets == "hidden_states":
        names = {module: name for name, module in model.named_modules()}
        layer_by_name: dict[str, int | None] = {
            names[layer]: index for index, layer in enumerate(decoder_layers(model))
        }
    else:
        layer_by_name = {name: layer_of(name) for name in rms_norms(model, noise.targets)}
    layers = {layer for layer in layer_by_name.values() if layer is not None}
    for key, named in (("target_layers", noise.target_layers), ("sigmas", noise.sigmas and noise.sigmas.layer_sigmas)):
        if named and not layers.issuperset(named):
            raise ConfigError(f"aqn.{key}: found layers {sorted(named)}, the noise has targets in {sorted(layers)}")
    for pattern in noise.exclude:
        if not fnmatch.filter(layer_by_name, pattern):
            raise ConfigError(f"aqn.exclude: found {pattern!r}, which matches none of {len(layer_by_name)} norms")
    if layer_factors is not None and layers != set(layer_factors):
        raise ConfigError(
            f"layer sigmas: found layers {sorted(layer_factors)}, the noise has targets in layers {sorted(layers)}"
        )
    factors = {name: noise.factor(layer, layer_factors, name) for name, layer in layer_by_name.items()}
    if not any(factors.values()) and (noise.exclude or noise.sigmas):
        raise ConfigError("aqn: no target has noise, expected sigmas above 0, or fewer patterns in exclude")
    return factors


@contextmanager
def noised_rollout(
    model: nn.Module,
    aqn: AdaptiveNoise | None,
    factors: Mapping[str, float],
    recorder: ReceiptRecorder,
    *,
    sigma: float,
    seed: int,
    step: int,
) -> Iterator[dict[int, float]]:
    """Apply `aqn` during the body, at `sigma` times each target's factor, and record it as one weight sync.

    Norm weights: adds `N(0, (sigma*factor)^2)`, keyed by (seed, step, norm), and restores the clean values on exit,
    also after an exception. Hashes of the clean weights before and after go into the receipt. Hidden states: yields
    sigma by decoder layer, for `phase_noise` to apply. Without AQN nothing is applied and no sync is recorded.
    """
    recorder.note_installed("AQN", aqn=aqn)
    if aqn is None:
        yield {}
    elif aqn.targets == "hidden_states":
        with _noised_hidden_states(model, recorder, factors, sigma, step) as sigmas:
            yield sigmas
    else:
        with _noised_norm_weights(model, recorder, factors, sigma, seed, step):
            yield {}


@contextmanager
def _noised_norm_weights(
    model: nn.Module, recorder: ReceiptRecorder, factors: Mapping[str, float], sigma: float, seed: int, step: int
) -> Iterator[None]:
    weights: dict[str, Tensor] = {name: weight_of(model.get_submodule(name)) for name in factors}
    clean = {name: weight.detach().clone() for name, weight in weights.items()}
    hash_before = norms_sha256(model)
    try:
        requested, squares, elements = 0.0, 0.0, 0
        ratios = Row("rollout")
        with torch.no_grad():
            for index, (name, weight) in enumerate(weights.items()):
                norm_sigma, count = sigma * factors[name], weight.numel()
                if norm_sigma > 0:
                    source = NoiseStream(derive_seed(seed, "aqn", step), index)
                    add_absolute_gaussian_(weight.detach(), norm_sigma, source)
                added, drawn = (weight - clean[name]).double().square().sum().item(), count * norm_sigma**2
                squares, requested, elements = squares + added, requested + drawn, elements + count
                if norm_sigma > 0:
                    sums = added, count, drawn, *_expected_sums(clean[name], norm_sigma)
                    ratios.add(**_scaled(*sums, norm_sigma))
                    recorder.add("rollout", None, layer_of(name), AQN, **_scaled(*sums, sigma))
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(clean[name])
        sigmas = sigma, (requested / elements) ** 0.5, (squares / elements) ** 0.5
        recorder.weight_syncs.append(_weight_sync(model, step, sigmas, len(weights), ratios, hash_before))


@contextmanager
def _noised_hidden_states(
    model: nn.Module, recorder: ReceiptRecorder, factors: Mapping[str, float], sigma: float, step: int
) -> Iterator[dict[int, float]]:
    sigmas = {layer: sigma * factor for layer, factor in enumerate(factors.values())}
    hash_before = norms_sha256(model)
    recorder.refuse_stray_hidden_noise()
    try:
        yield sigmas
    finally:
        measured, ratios = _settled(recorder, sigmas, sigma, "rollout")
        # All layers have the same size. A layer without noise was not measured and counts as 0.
        found = [measured.get(layer, 0.0) for layer in sigmas]
        of_rollout = sigma, _root_mean([layer_sigma**2 for layer_sigma in sigmas.values()]), _root_mean(found)
        recorder.weight_syncs.append(_weight_sync(model, step, of_rollout, len(sigmas), ratios, hash_before))


@contextmanager
def noised_actor(
    aqn: AdaptiveNoise | None, factors: Mapping[str, float], recorder: ReceiptRecorder, sigma: float
) -> Iterator[dict[int, float]]:
    """Yield sigma by decoder layer for a forward pass of training, and record its noise; nothing without such AQN."""
    if aqn is None or not aqn.actor_forward:
        yield {}
        return
    sigmas = {layer: sigma * factor for layer, factor in enumerate(factors.values())}
    yield sigmas
    _settled(recorder, sigmas, sigma, "actor_forward")


def _settled(
    recorder: ReceiptRecorder, sigmas: Mapping[int, float], sigma: float, phase: Phase
) -> tuple[dict[int, float], Row]:
    """Record the noise on hidden states by layer; return mean squares by layer, and all errors in units of sigma."""
    measured, ratios = {}, Row(phase)
    for layer in dict.fromkeys(layer for layer, _, _ in recorder.hidden):
        samples = [(before, after) for of_layer, before, after in recorder.hidden if of_layer == layer]
        squares, count, mean, variance = relative_sums(samples, sigmas[layer])
        if count:
            measured[layer], drawn = squares / count, count * sigmas[layer] ** 2
            recorder.add(phase, None, layer, AQN, **_scaled(squares, count, drawn, mean, variance, sigma))
            ratios.add(**_scaled(squares, count, drawn, mean, variance, sigmas[layer]))
    recorder.hidden.clear()
    return measured, ratios


def relative_sums(samples: list[tuple[Tensor, Tensor]], sigma: float) -> tuple[float, int, float, float]:
    """Return the sum of squares of relative errors, their number, the expected sum, and its variance.

    Errors of 16-bit tensors are of the noise and the rounding of the result (see `rounding`).
    """
    squares, count, rounded, mean, variance = 0.0, 0, 0, 0.0, 0.0
    for before, after in samples:
        # In numpy: on short samples its calls cost a fraction of torch's.
        clean, used = (values.double().cpu().numpy() for values in (before, after))
        known = clean != 0
        squares, count = (
            squares + float(np.square((used - clean)[known] / clean[known]).sum()),
            count + int(known.sum()),
        )
        if sigma and before.dtype in ROUNDED_DTYPES:
            means, variances = noised_moments(before, sigma * np.abs(clean))
            rounded += int(known.sum())
            mean += float((means[known] / clean[known] ** 2).sum())
            variance += float((variances[known] / clean[known] ** 4).sum())
    exact = count - rounded
    return squares, count, mean + exact * sigma**2, variance + 2 * exact * sigma**4


def _root_mean(squares: list[float]) -> float:
    return float((sum(squares) / len(squares)) ** 0.5)


def _expected_sums(clean: Tensor, sigma: float) -> tuple[float, float]:
    """Return the expected sum of squares of N(0, sigma^2) added to `clean` in its number format, and its variance."""
    if clean.dtype not in ROUNDED_DTYPES:
        return clean.numel() * sigma**2, 2 * clean.numel() * sigma**4
    mean, variance = noised_moments(clean.flatten(), np.full(clean.numel(), sigma))
    # Where the noise is smaller than the spacing, few elements change, each by one step: counts of rare events, which
    # scatter more than a normal distribution of the same variance.
    largest_step = float(spacing_of(clean.flatten())[0].max()) ** 2
    return float(mean.sum()), float(variance.sum()) + (_RARE_EVENTS * largest_step) ** 2


def _scaled(squares: float, elements: int, drawn: float, mean: float, variance: float, sigma: float) -> dict[str, Any]:
    """Return columns of squared noise in units of sigma^2."""
    return {
        "squares": squares / sigma**2,
        "elements": elements,
        "drawn_squares": drawn / sigma**2,
        "expected_squares": mean / sigma**2,
        "expected_variance": variance / sigma**4,
    }


def _weight_sync(
    model: nn.Module, step: int, sigmas: tuple[float, float, float], targets: int, ratios: Row, before: str
) -> WeightSync:
    """Return the record of a redraw. `sigmas`: scheduled, requested, measured; `before`: digest of clean weights."""
    count = ratios.elements
    return WeightSync(
        step=step,
        sigma_scheduled=sigmas[0],
        sigma_requested=sigmas[1],
        sigma_measured=sigmas[2],
        targets=targets,
        elements=count,
        squared_error_ratio=ratios.squares / count if count else 1.0,
        expected_ratio=ratios.expected_squares / count if count else 1.0,
        ratio_error=ratios.expected_variance**0.5 / count if count else 0.0,
        clean_sha256_before=before,
        clean_sha256_after=norms_sha256(model),
    )
