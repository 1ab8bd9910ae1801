"""Draws of a sampler, repeated: argmax(log p - log e), and what explains tokens that are others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DRAW_ERROR = 2e-5
"""Logarithmic distance of a drawn token to the best one that rounding explains, beside the rounding of the logits."""


@dataclass(frozen=True)
class Draw:
    """One repeated draw; `logits` and `draws` (logarithms of the variates) are [vocabulary], in float64."""

    row: int
    step: int
    token: int
    logits: Tensor
    draws: Tensor
    temperature: float

    def gap(self, temperature: float | None = None) -> float:
        """Return the distance of the token to the best one, at another temperature if given, in units of rounding."""
        if not self.logits.isfinite().all():
            return 0.0  # The guard of the run ends it at the loss.
        temperature = temperature or self.temperature
        # argmax p/e is argmax (log p - log e), and the normaliser of p does not matter.
        scores = self.logits / temperature - self.draws
        rounding = 8 * torch.finfo(torch.float32).eps * float(self.logits.abs().max()) / temperature
        return float(scores.max() - scores[self.token]) / (_DRAW_ERROR + rounding)


def cause_of(draws: Sequence[Draw]) -> str:
    """Return what explains tokens that are not the study's draws."""
    if all(draw.logits[draw.token] == draw.logits.max() for draw in draws):
        return "the most probable one, as all are: decoded greedily"
    fitting = [value / 20 for value in range(2, 61) if all(draw.gap(value / 20) <= 1 for draw in draws)]
    if fitting:
        return f"sampled at temperature {fitting[0]:g} to {fitting[-1]:g}"
    return "another sample: of another seed, or of a distribution that was changed (top-k, top-p, a penalty)"
