"""AQN on the rollout policy: noise on its norm weights, removed bit for bit afterwards, or on its hidden states."""

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from aqnpipe.config.noise import AdaptiveNoise, Phase
from aqnpipe.errors import ConfigError
from aqnpipe.models.layout import decoder_layers, layer_of, norms_sha256, rms_norms, weight_of
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_absolute_gaussian_
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import AQN, SYNC, Row
from aqnpipe.proof.comparison import wrong_weights
from aqnpipe.proof.random_numbers import derived_key
from aqnpipe.seeding import derive_seed


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
    # What is compared, and with which numbers, does not depend on what was put on.
    due, rng = recorder.position(seed, step), np.random.default_rng(derived_key(seed, "audit.aqn", step))
    try:
        seen = Row("rollout")
        with torch.no_grad():
            for index, (name, weight) in enumerate(weights.items()):
                norm_sigma, count = sigma * factors[name], weight.numel()
                if norm_sigma > 0:
                    source = NoiseStream(derive_seed(seed, "aqn", step), index)
                    add_absolute_gaussian_(weight.detach(), norm_sigma, source)
                added, drawn = (weight - clean[name]).double().square().sum().item(), count * norm_sigma**2
                of_norm = Row("rollout", elements=count, squares=added, drawn_squares=drawn)
                if norm_sigma > 0:
                    wrong = wrong_weights(clean[name], weight.detach(), norm_sigma, *due, index, rng)
                    of_norm.add(recomputed=len(wrong), wrong=int(wrong.sum()))
                    _record(recorder, "rollout", of_norm, layer_of(name), sigma)
                seen.include([of_norm])
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(clean[name])
        _note_sync(recorder, step, seen, sigma, len(weights), {hash_before, norms_sha256(model)})


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
        found = _settled(recorder, "rollout", sigmas, sigma)
        # All layers have the same size. A layer without noise was not measured and counts as 0.
        seen = Row("rollout").include(found.values(), ("recomputed", "wrong"))
        squares = [row.squares / row.elements for row in found.values()]
        drawn = [layer_sigma**2 for layer_sigma in sigmas.values()]
        seen.add(elements=len(sigmas), squares=sum(squares), drawn_squares=sum(drawn))
        _note_sync(recorder, step, seen, sigma, len(sigmas), {hash_before, norms_sha256(model)})


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
    _settled(recorder, "actor_forward", sigmas, sigma)


def _settled(recorder: ReceiptRecorder, phase: Phase, sigmas: Mapping[int, float], sigma: float) -> dict[int, Row]:
    """Record the noise on hidden states that was measured since, and return it by layer."""
    found, recorder.hidden = {layer: row for layer, row in recorder.hidden.items() if row.elements}, {}
    for layer, row in found.items():
        row.add(drawn_squares=row.elements * sigmas[layer] ** 2)
        _record(recorder, phase, row, layer, sigma)
    return found


def _record(recorder: ReceiptRecorder, phase: Phase, row: Row, layer: int | None, sigma: float) -> None:
    """Add what was seen of noise on a target to its layer, with squares in units of sigma^2."""
    squares = {name: getattr(row, name) / sigma**2 for name in ("squares", "drawn_squares")}
    counts = {name: getattr(row, name) for name in ("elements", "recomputed", "wrong")}
    recorder.row(phase, None, layer, AQN).add(**counts, **squares)


def _note_sync(recorder: ReceiptRecorder, step: int, seen: Row, sigma: float, targets: int, digests: set[str]) -> None:
    """Record a redraw. `digests`: of the norm weights before and after."""
    row = recorder.row("rollout", step, None, SYNC).include([seen])
    row.add(calls=1, sigma=sigma, targets=targets, digests=digests)
