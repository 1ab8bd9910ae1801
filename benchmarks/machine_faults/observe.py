"""What a fault does to the model, measured without any probe: logits of a prefill, of decoding, of a large batch.

The unit is the spread of healthy re-orderings: a fault counts as observable if it changes some logits by more than
twice what the arithmetic of healthy devices changes.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from machine_faults.healthy import DEVICES, DIFFERENTIABLE, REORDERINGS
from machine_faults.models import subject, tokens

PREFILL, DECODED, BATCH = 96, 16, 6
OBSERVABLE = 2.0


def outputs(model: nn.Module, *, gradients: bool = False) -> list[Tensor]:
    """Return the logits of 96 tokens, of 16 more decoded one by one with the cache, of 6 x 96 tokens in one
    batch, and of 5 tokens.

    With `gradients`, the gradients of the loss with respect to all weights instead.
    """
    if gradients:
        return _gradients(model)
    with torch.no_grad():
        ids = tokens(1, PREFILL + DECODED)
        first = model(input_ids=ids[:, :PREFILL], use_cache=True)
        cache, steps = first.past_key_values, []
        for position in range(PREFILL, PREFILL + DECODED):
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
        batch = model(input_ids=tokens(BATCH, PREFILL, 1), use_cache=False).logits
        short = model(input_ids=tokens(1, 5, 2), use_cache=False).logits
    return [first.logits.float(), torch.cat(steps, 1).float(), batch.float(), short.float()]


def _gradients(model: nn.Module) -> list[Tensor]:
    ids = tokens(2, 48)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: Any = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g.detach().float() for g in found if g is not None]


@cache
def clean(name: str, dtype: str, attention: str, gradients: bool) -> list[Tensor]:
    """Return the outputs of the healthy model on this CPU."""
    return outputs(subject(name, dtype, attention), gradients=gradients)


@cache
def spread(name: str, dtype: str, attention: str, gradients: bool) -> tuple[list[float], list[float]]:
    """Return the largest and the root mean square change of each output over the healthy re-orderings."""
    model, reference = subject(name, dtype, attention), clean(name, dtype, attention, gradients)
    largest, typical = [0.0] * len(reference), [0.0] * len(reference)
    for device in DIFFERENTIABLE if gradients else REORDERINGS:
        with DEVICES[device].put_in(model):
            found = outputs(model, gradients=gradients)
        for number, (a, b) in enumerate(zip(reference, found, strict=True)):
            largest[number] = max(largest[number], float((a - b).abs().max()))
            typical[number] = max(typical[number], float((a - b).square().mean().sqrt()))
    return largest, typical


def effect(name: str, dtype: str, attention: str, found: list[Tensor], *, gradients: bool = False) -> float:
    """Return the change of the outputs in units of the spread of healthy devices; inf for NaN."""
    reference = clean(name, dtype, attention, gradients)
    largest, typical = spread(name, dtype, attention, gradients)
    # Re-orderings that change nothing are no licence for less than one rounding of the largest output.
    rounding = torch.finfo(getattr(torch, dtype)).eps
    ratios = [0.0]
    for a, b, top, rms in zip(reference, found, largest, typical, strict=True):
        if not torch.isfinite(b).all():
            return float("inf")
        if not a.any():
            continue
        difference = (a - b).abs()
        ratios.append(float(difference.max()) / max(top, rounding * float(a.abs().max())))
        ratios.append(
            float(difference.square().mean().sqrt()) / max(rms, rounding * float(a.square().mean().sqrt()) / 4)
        )
    return max(ratios)
