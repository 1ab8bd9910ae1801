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

    def gap(self, temperature: float | None = None, top: int | None = None) -> float:
        """Return the distance of the token to the best one, of the `top` most probable ones, in units of rounding."""
        if not self.logits.isfinite().all():
            return 0.0  # The guard of the run ends it at the loss.
        temperature = temperature or self.temperature
        # argmax p/e is argmax (log p - log e), and the normaliser of p does not matter.
        scores = self.logits / temperature - self.draws
        if top is not None:
            scores = scores.masked_fill(self.logits < self.logits.topk(min(top, len(scores))).values[-1], -torch.inf)
        rounding = 8 * torch.finfo(torch.float32).eps * float(self.logits.abs().max()) / temperature
        return float(scores.max() - scores[self.token]) / (_DRAW_ERROR + rounding)

    @property
    def rank(self) -> int:
        """1 for the most probable token."""
        return int((self.logits > self.logits[self.token]).sum()) + 1


def cause_of(draws: Sequence[Draw], temperature: float) -> str:
    """Return what explains tokens that are not the study's draws."""
    ranks = [draw.rank for draw in draws]
    if max(ranks) == 1:
        return "the most probable one, as all are: decoded greedily"
    fitting = [value / 20 for value in range(2, 61) if all(draw.gap(value / 20) <= 1 for draw in draws)]
    if fitting:
        return f"sampled at temperature {fitting[0]:g} to {fitting[-1]:g}"
    if all(draw.gap(temperature, max(ranks)) <= 1 for draw in draws):
        return f"another sample: only the {max(ranks)} most probable tokens can be chosen (top-k or top-p)"
    return "another sample: of another seed, or of a distribution that was changed (top-p, a penalty)"
