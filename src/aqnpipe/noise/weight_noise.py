"""AQN: noise on the RMSNorm weights of the rollout copy, measured, and taken away bit for bit."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import WeightNoise
from aqnpipe.errors import ConfigError
from aqnpipe.noise.layout import layer_of, rms_norms, weight_of
from aqnpipe.noise.receipt import WeightSync
from aqnpipe.noise.recorder import ReceiptRecorder
from aqnpipe.seeding import keyed_generator


def norm_factors(model: nn.Module, noise: WeightNoise, layer_factors: Mapping[int, float] | None) -> dict[str, float]:
    """Return for every targeted norm its factor on the schedule's sigma; 1 everywhere when `layer_factors` is None.

    Norms outside the decoder layers have factor 1. Raises ConfigError when factors and layers do not match one to one.
    """
    norms = rms_norms(model, noise.targets)
    if layer_factors is None:
        return dict.fromkeys(norms, 1.0)
    layers = {layer for name in norms if (layer := layer_of(name)) is not None}
    if layers != set(layer_factors):
        raise ConfigError(
            f"layer sigmas: found layers {sorted(layer_factors)}, the model's norms lie in layers {sorted(layers)}"
        )
    return {name: 1.0 if (layer := layer_of(name)) is None else layer_factors[layer] for name in norms}


@contextmanager
def noised_norm_weights(
    model: nn.Module,
    recorder: ReceiptRecorder,
    factors: Mapping[str, float],
    *,
    sigma: float,
    seed: int,
    step: int,
) -> Iterator[None]:
    """Add `N(0, (sigma*factor)^2)` to the weights of the norms in `factors` while the body runs.

    The noise is keyed by (seed, step, norm). On every way out the clean values are put back; the hashes of the clean
    weights before and after, and the sigma that was really added, go into the receipt.
    """
    weights: dict[str, Tensor] = {name: weight_of(model.get_submodule(name)) for name in factors}
    clean = {name: weight.detach().clone() for name, weight in weights.items()}
    hash_before = _sha256(weights)
    try:
        asked_squares, squares, ratio_squares, elements = 0.0, 0.0, 0.0, 0
        with torch.no_grad():
            for index, (name, weight) in enumerate(weights.items()):
                norm_sigma = sigma * factors[name]
                if norm_sigma > 0:
                    _add_gaussian_(weight, norm_sigma, seed, step, index)
                added = (weight - clean[name]).double().square().sum().item()
                squares += added
                asked_squares += norm_sigma**2 * weight.numel()
                elements += weight.numel()
                if norm_sigma > 0:
                    ratio_squares += added / norm_sigma**2
                    recorder.measure_weight_factor(layer_of(name), added / sigma**2, weight.numel())
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(clean[name])
        recorder.add_weight_sync(
            WeightSync(
                step=step,
                sigma_scheduled=sigma,
                sigma_asked=(asked_squares / elements) ** 0.5,
                sigma_measured=(squares / elements) ** 0.5,
                norms=len(weights),
                elements=elements,
                squared_error_ratio=ratio_squares / elements if sigma > 0 else 1.0,
                clean_sha256_before=hash_before,
                clean_sha256_after=_sha256(weights),
            )
        )


def _add_gaussian_(weight: Tensor, sigma: float, seed: int, step: int, index: int) -> None:
    generator = keyed_generator(weight.device, seed, "aqn", step, index)
    noise = torch.empty_like(weight, dtype=torch.float32).normal_(generator=generator)
    weight.add_(noise.mul_(sigma).to(weight.dtype))


def _sha256(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
