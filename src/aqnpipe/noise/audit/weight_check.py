"""Compares the norm weights that a forward reads with the clean ones and the noise that AQN adds to them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from aqnpipe.config.noise import AbsoluteGaussian, Phase
from aqnpipe.models.layout import rms_norms, weight_of
from aqnpipe.noise.audit.expected_values import deviations, expected_values
from aqnpipe.noise.audit.random_numbers import Draws, Position, key_at_step
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row

_STREAM = "aqn"
_SAMPLED_ELEMENTS = 64


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
    key = key_at_step(position.seed, _STREAM, position.step)
    for name, module in model.named_modules():
        if name not in clean_weights:
            continue
        weight, before = weight_of(module).detach(), clean_weights[name]
        elements = rng.integers(weight.numel(), size=min(weight.numel(), _SAMPLED_ELEMENTS))
        index = torch.from_numpy(elements)
        used, clean = (tensor.flatten()[index.to(tensor.device)].double().cpu().numpy() for tensor in (weight, before))
        call = noised.index(name) if name in noised else None
        sigma = sigma_of(name) if call is not None else 0.0
        if call is None or sigma == 0:
            wrong = used != clean
        else:
            draws = Draws.of(key, call, 0)
            expected, allowed = expected_values(clean, AbsoluteGaussian(scale=sigma), weight.dtype, draws, elements)
            wrong = deviations(clean, used, expected, allowed, weight.dtype) > 1
            row.recomputed += len(elements)
        if wrong.any():
            requested = f"the noise of step {position.step}" if sigma else "clean weights"
            what = f"AQN: {name}: {wrong.mean():.0%} of the sampled weights are not as requested: {requested}"
            row.add(contradictions={what: 1})
