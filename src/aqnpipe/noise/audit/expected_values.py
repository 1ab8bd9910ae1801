"""The value that each error model gives to an element, computed a second time, and how far from it a kernel may be."""

import numpy as np
import torch

from aqnpipe.config.measured_noise import ErrorFigures, OperatorError
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    MantissaTruncation,
    RelativeGaussian,
    SystematicBias,
    TensorError,
)
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.audit.own_values import own_values
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray, normals

_SIGNIFICAND_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_SMALLEST_EXPONENT = {torch.float64: -1021, torch.float32: -125, torch.float16: -13, torch.bfloat16: -125}
_ARITHMETIC = 2.0**-22
"""Relative error of a result computed in float32 by two multiplications and an addition."""

_ROW_SUM = 2.0**-18
"""Relative error of the root mean square of an input row that is computed in float32."""

_NEARLY_LARGEST = 0.999
_LARGE = 0.5
_ROUNDED_ONCE = 0.5001
_FLOAT32_STEPS = 2.0


def expected_values(
    clean: FloatArray,
    error: TensorError,
    dtype: torch.dtype,
    draws: Draws,
    elements: IntArray,
    input_rms: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return the values that `error` makes of `clean`, and the largest difference that rounding explains.

    `clean` are values of a tensor of `dtype`, and `elements` their numbers in it. The result is rounded once to that
    dtype; the kernels compute in float32. `input_rms`: for a measured error, the root mean square of the input row of
    each element.
    """
    match error:
        case OperatorError(figures=figures, multiple=multiple):
            if figures.is_zero:
                return clean, np.zeros(clean.shape)
            z, z_error = normals(elements, draws)
            sigma = multiple * measured_sigma(figures, clean, input_rms)
            drift = multiple * (figures.bias + figures.gain * clean)
            expected = clean + drift + sigma * z
            slack = sigma * (z_error + (_ROW_SUM + 2 * _ARITHMETIC) * np.abs(z))
            slack += _ARITHMETIC * (np.abs(clean) + multiple * (abs(figures.bias) + np.abs(figures.gain * clean)))
        case RelativeGaussian(scale=scale):
            z, z_error = normals(elements, draws)
            expected = clean * (1 + scale * z)
            slack = np.abs(clean) * (scale * z_error + _ARITHMETIC * (1 + scale * np.abs(z)))
        case AbsoluteGaussian(scale=scale):
            z, z_error = normals(elements, draws)
            expected = clean + scale * z
            slack = scale * (z_error + _ARITHMETIC * np.abs(z)) + _ARITHMETIC * np.abs(clean)
        case SystematicBias(scale=scale):
            expected = clean + scale * np.sign(clean)
            # torch rounds the scale to the number format of the tensor before it adds.
            slack = spacing(np.full(clean.shape, scale), dtype)
        case OwnError():
            expected, slack = own_values(clean, error, dtype, draws, elements)
            slack += _ARITHMETIC * (np.abs(clean) + np.abs(expected))
        case MantissaTruncation(mantissa_bits=bits):
            exponent = np.maximum(np.frexp(clean)[1], _SMALLEST_EXPONENT[dtype])
            step = np.ldexp(1.0, exponent - 1 - bits)
            return np.trunc(clean / step) * step, np.zeros(clean.shape)
    steps = _ROUNDED_ONCE if dtype in (torch.float16, torch.bfloat16) else _FLOAT32_STEPS
    allowed = slack + steps * spacing(expected, dtype)
    # Near the largest number of the format a result may become infinite.
    return expected, np.where(np.abs(expected) >= _NEARLY_LARGEST * torch.finfo(dtype).max, np.inf, allowed)


def deviations(
    clean: FloatArray, used: FloatArray, expected: FloatArray, allowed: FloatArray, dtype: torch.dtype
) -> FloatArray:
    """Return the differences of `used` from `expected` as multiples of `allowed`: above 1 contradicts the request.

    Where `allowed` is infinite, `used` must be infinite or large too. Where `clean` is not finite there is nothing to
    compare.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        found = np.abs(used - expected) / allowed
        is_large = np.sign(expected) * used >= _LARGE * torch.finfo(dtype).max
    found = np.where(np.isinf(allowed), np.where(is_large, 0.0, np.inf), found)
    found[np.isnan(found)] = np.inf
    return np.where((used == expected) | ~np.isfinite(clean), 0.0, found)


def measured_sigma(figures: ErrorFigures, clean: FloatArray, input_rms: FloatArray | None) -> FloatArray:
    """Return the standard deviation of the random part of a measured error, at every value of `clean`."""
    rows = np.zeros(clean.shape) if input_rms is None else input_rms
    return np.hypot(np.hypot(figures.absolute, figures.per_input * rows), figures.per_result * clean)


def measured_size(figures: ErrorFigures, clean: FloatArray, input_rms: FloatArray | None) -> FloatArray:
    """Return the root mean square of a measured error at every value of `clean`."""
    return np.hypot(figures.bias + figures.gain * clean, measured_sigma(figures, clean, input_rms))


def spacing(values: FloatArray, dtype: torch.dtype) -> FloatArray:
    """Return the distance between neighbouring numbers of `dtype` at `values`."""
    exponent = np.where(values == 0, _SMALLEST_EXPONENT[dtype], np.frexp(values)[1])
    exponent = np.maximum(exponent, _SMALLEST_EXPONENT[dtype])
    return np.asarray(np.ldexp(1.0, exponent - _SIGNIFICAND_BITS[dtype]))
