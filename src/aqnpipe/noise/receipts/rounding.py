"""Expected size of Gaussian noise after rounding to a number format.

A 16-bit tensor contains y + noise, rounded to its format. The measured error is therefore not the error that was drawn:
its mean square is larger by about spacing^2/12, and where the noise is smaller than the spacing, most elements do not
change at all. Both effects can be computed exactly, because y itself is a number of the format. A receipt that ignored
rounding would refuse correct long runs: its acceptance band shrinks with the number of elements, but the effect of
rounding does not.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import erfc
from torch import Tensor

FloatArray = npt.NDArray[np.float64]

ROUNDED_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""Number formats whose rounding is visible in measured noise. The effect of float32 is below every acceptance band."""

_WIDE = 2.0
"""If sigma is at least this multiple of the spacing, rounding is independent of the noise to within 1e-17."""
_STEPS = np.arange(1, 20, dtype=np.float64)


_HALF_A_STEP = math.sqrt(3)
"""Half the distance between neighbouring numbers, in standard deviations of rounding to them."""


def left_by_rounding(size: float, rounding: float | None) -> float:
    """Return the least root mean square that rounding leaves of errors of `size`, as it moves none by over half a step.

    `rounding`: standard deviation of the rounding. An error below half a step may be lost as a whole: this is what a
    number format does to it, and no mistake.
    """
    return max(size - _HALF_A_STEP * (rounding or 0.0), 0.0)


def spacing_of(tensor: Tensor) -> tuple[FloatArray, FloatArray]:
    """Return the distances of each element of a flat tensor from the next number away from 0 and toward it.

    They differ only at powers of two, where the spacing of the number format halves toward 0.
    """
    limits = torch.finfo(tensor.dtype)
    mantissa, exponent = np.frexp(np.abs(tensor.double().cpu().numpy()))
    smallest = math.frexp(limits.smallest_normal)[1]
    outward = np.ldexp(limits.eps, np.maximum(exponent, smallest) - 1).astype(np.float64)
    return outward, np.where((mantissa == 0.5) & (exponent > smallest), outward / 2, outward)


def noised_moments(clean: Tensor, sigma: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of the square of (clean + N(0, sigma^2), rounded) - clean, for a flat 16-bit tensor."""
    outward, inward = spacing_of(clean)
    (second, fourth), (second_inward, fourth_inward) = _moments(sigma, outward), _moments(sigma, inward)
    mean = (second + second_inward) / 2
    return mean, (fourth + fourth_inward) / 2 - mean**2


def _moments(sigma: FloatArray, spacing: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return E[X^2] and E[X^4] of X = N(0, sigma^2) rounded to multiples of `spacing`, element by element.

    With t = sigma/spacing and Q the tail of the standard normal distribution: E[k^2] = 2 sum_k (2k - 1) Q((k - 1/2)/t)
    and E[k^4] = 2 sum_k (k^4 - (k-1)^4) Q((k - 1/2)/t) in units of the spacing; for large t the sums of independent
    noise and uniform rounding, t^2 + 1/12 and 3 t^4 + t^2/2 + 1/80.
    """
    steps = sigma / spacing
    second, fourth = steps**2 + 1 / 12, 3 * steps**4 + steps**2 / 2 + 1 / 80
    narrow = steps < _WIDE
    if narrow.any():
        tails = 0.5 * erfc((_STEPS - 0.5) / (math.sqrt(2) * np.maximum(steps[narrow], 1e-12)[:, None]))
        second[narrow] = 2 * tails @ (2 * _STEPS - 1)
        fourth[narrow] = 2 * tails @ (_STEPS**4 - (_STEPS - 1) ** 4)
    return second * spacing**2, fourth * spacing**4
