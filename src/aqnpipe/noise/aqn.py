"""AQN on the rollout policy: noise on its norm weights, removed bit for bit afterwards, or on its hidden states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import AdaptiveNoise
from aqnpipe.errors import ConfigError
from aqnpipe.models.layout import decoder_layers, layer_of, norms_sha256, rms_norms, weight_of
from aqnpipe.noise.kernels.gaussian import add_absolute_gaussian_
from aqnpipe.noise.kernels.stream import NoiseStream
from aqnpipe.noise.receipts.receipt_content import WeightSync
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.seeding import derive_seed


def target_factors(
    model: nn.Module, noise: AdaptiveNoise, layer_factors: Mapping[int, float] | None
) -> dict[str, float]:
    """Return the factor of every target (norm or decoder layer) on the schedule's sigma, by qualified module name.

    The factor is 1 everywhere if `layer_factors` is None, and for norms outside the decoder layers. Raises ConfigError
    if factors and layers do not match one to one.
    """
    if noise.targets == "hidden_states":
        names = {module: name for name, module in model.named_modules()}
        layer_by_name: dict[str, int | None] = {
            names[layer]: index for index, layer in enumerate(decoder_layers(model))
        }
    else:
        layer_by_name = {name: layer_of(name) for name in rms_norms(model, noise.targets)}
    if layer_factors is None:
        return dict.fromkeys(layer_by_name, 1.0)
    layers = {layer for layer in layer_by_name.values() if layer is not None}
    if layers != set(layer_factors):
        raise ConfigError(
            f"layer sigmas: found layers {sorted(layer_factors)}, the noise has targets in layers {sorted(layers)}"
        )
    return {name: 1.0 if layer is None else layer_factors[layer] for name, layer in layer_by_name.items()}


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
        requested_squares, squares, ratio_squares, elements, drawn = 0.0, 0.0, 0.0, 0, 0
        with torch.no_grad():
            for index, (name, weight) in enumerate(weights.items()):
                norm_sigma = sigma * factors[name]
                if norm_sigma > 0:
                    source = NoiseStream(derive_seed(seed, "aqn", step), index)
                    add_absolute_gaussian_(weight.detach(), norm_sigma, source)
                added = (weight - clean[name]).double().square().sum().item()
                squares += added
                requested_squares += norm_sigma**2 * weight.numel()
                elements += weight.numel()
                if norm_sigma > 0:
                    ratio_squares += added / norm_sigma**2
                    drawn += weight.numel()
                    recorder.measure_sigma_factor(layer_of(name), added / sigma**2, weight.numel())
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(clean[name])
        recorder.add_weight_sync(
            WeightSync(
                step=step,
                sigma_scheduled=sigma,
                sigma_requested=(requested_squares / elements) ** 0.5,
                sigma_measured=(squares / elements) ** 0.5,
                targets=len(weights),
                elements=drawn,
                squared_error_ratio=ratio_squares / drawn if drawn else 1.0,
                clean_sha256_before=hash_before,
                clean_sha256_after=norms_sha256(model),
            )
        )


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
        measured = {layer: (squares, count) for layer, (squares, count) in recorder.settle_hidden().items() if count}
        for layer, (squares, count) in measured.items():
            recorder.measure_sigma_factor(layer, squares / sigma**2, count)
        drawn = sum(count for _, count in measured.values())
        ratio_squares = sum(squares / sigmas[layer] ** 2 for layer, (squares, _) in measured.items())
        recorder.add_weight_sync(
            WeightSync(
                step=step,
                sigma_scheduled=sigma,
                sigma_requested=_root_mean([layer_sigma**2 for layer_sigma in sigmas.values()]),
                # All layers have the same size. A layer without noise was not measured and counts as 0.
                sigma_measured=(sum(squares / count for squares, count in measured.values()) / len(sigmas)) ** 0.5,
                targets=len(sigmas),
                elements=drawn,
                squared_error_ratio=ratio_squares / drawn if drawn else 1.0,
                clean_sha256_before=hash_before,
                clean_sha256_after=norms_sha256(model),
            )
        )


def _root_mean(squares: list[float]) -> float:
    return float((sum(squares) / len(squares)) ** 0.5)
