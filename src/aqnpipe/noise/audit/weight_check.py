"""Compares the norm weights that a forward reads with the clean ones and the noise that AQN adds to them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aqnpipe.config.noise import AbsoluteGaussian, Phase
from aqnpipe.models.layout import rms_norms, weight_of
from aqnpipe.noise.audit.expected_values import deviations, expected_values
from aqnpipe.noise.audit.random_numbers import Draws, Position, key_at_step
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row

_STREAM = "aqn"
_SAMPLED_ELEMENTS = 64


def wrong_weights(
    clean: Tensor, weight: Tensor, sigma: float, seed: int, step: int, call: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return which sampled elements of a norm's weight are not the clean ones with the noise of `step`.

    `call`: number of the norm among the targets of AQN; `sigma`: 0 where it must be clean.
    """
    elements = rng.integers(weight.numel(), size=min(weight.numel(), _SAMPLED_ELEMENTS))
    index = torch.from_numpy(elements)
    used, before = (values.flatten()[index.to(values.device)].double().cpu().numpy() for values in (weight, clean))
    if sigma == 0:
        return used != before
    draws = Draws.of(key_at_step(seed, _STREAM, step), call, 0)
    expected, allowed = expected_values(before, AbsoluteGaussian(scale=sigma), weight.dtype, draws, elements)
    return deviations(before, used, expected, allowed, weight.dtype) > 1


def compare_norms(
    model: nn.Module,
    phase: Phase,
    position: Position,
    recorder: ReceiptRecorder,
    row: Row,
    rng: np.random.Generator,
    sigma_of: Callable[[str], float],
) -> None:
    """Compare sampled weights of every RMSNorm with what they should be in this phase, at this step.

    In a rollout AQN's targets have the noise of the step, the same in all forwards of the rollout. Everywhere else they
    are clean. `row` gets what was found; `sigma_of` returns the requested sigma of a norm, by name. Nothing is compared
    if the recorder does not know the clean weights.
    """
    clean_weights = recorder.clean_norm_weights
    if not clean_weights or phase == "reference":
        return
    aqn = recorder.requested.aqn
    noised = (
        list(rms_norms(model, aqn.targets))
        if aqn is not None and aqn.targets != "hidden_states" and phase == "rollout"
        else []
    )
    for name, module in model.named_modules():
        if name not in clean_weights:
            continue
        weight, before = weight_of(module).detach(), clean_weights[name]
        call = noised.index(name) if name in noised else 0
        sigma = sigma_of(name) if name in noised else 0.0
        wrong = wrong_weights(before, weight, sigma, position.seed, position.step, call, rng)
        row.recomputed += len(wrong) if sigma else 0
        if wrong.any():
            requested = f"the noise of step {position.step}" if sigma else "clean weights"
            what = f"AQN: {name}: {wrong.mean():.0%} of the sampled weights are not as requested: {requested}"
            row.add(contradictions={what: 1})
