"""Two error models: log-normal variation of a device, and flipped bits."""

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_UPPER_BITS = 7
"""Bits of a mantissa that may flip: those that bfloat16 has too."""


def lognormal(values: Tensor, normals: Tensor, *, spread: float) -> Tensor:
    """Multiply by a log-normal factor of mean 1; the relative error has the size sqrt(exp(spread^2) - 1)."""
    return values * torch.exp(spread * normals[0] - spread**2 / 2)


def bit_flips(values: Tensor, normals: Tensor, *, probability: float) -> Tensor:
    """Flip one of the upper 7 bits of the mantissa, with a probability per value; normals: [2, *values.shape].

    Bit k changes a value with the mantissa m (1 <= m < 2) by 2^-k/m of itself, so the relative error has a size between
    sqrt(probability*mean(4^-k))/2 and twice that: for k = 1 to 7 between 0.109*sqrt(probability) and 0.219 of it.
    """
    chance, place = torch.special.ndtr(normals)  # uniform in (0, 1)
    bit = _MANTISSA_BITS - 1 - (place * _UPPER_BITS).to(torch.int32).clamp_max(_UPPER_BITS - 1)
    flipped = values.float().view(torch.int32) ^ (1 << bit)
    return torch.where(chance < probability, flipped.view(torch.float32).to(values.dtype), values)
