"""The value that each error model gives to an element, computed a second time, and how far from it a kernel may be.

The function of a user's own error model is the same, for its definition is all there is. Everything else is derived
anew: the keys, the normal numbers (in numpy) and the elements, which the function gets apart from the tensor that they
belong to. A function that keeps a state, draws numbers of its own, or mixes elements gives other values here.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aqnpipe.config.custom_code import CustomError, as_config_error, unchanged_function
from aqnpipe.config.measured_noise import ErrorFigures, OperatorError
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    MantissaTruncation,
    RelativeGaussian,
    SystematicBias,
    TensorError,
)
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray, derived_key, key_at_step, normals

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

_AQN = "aqn"
"""Stream of AQN's noise on weights."""

_SAMPLED_WEIGHTS = 64


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
        case CustomError():
            expected, slack = _custom_values(clean, error, dtype, draws, elements)
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


def wrong_weights(
    clean: Tensor, weight: Tensor, sigma: float, seed: int, step: int, call: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Return which sampled elements of a norm's weight are not the clean ones with the noise of `step`.

    `call`: number of the norm among the targets of AQN; `sigma`: 0 where it must be clean.
    """
    elements = rng.integers(weight.numel(), size=min(weight.numel(), _SAMPLED_WEIGHTS))
    index = torch.from_numpy(elements)
    used, before = (values.flatten()[index.to(values.device)].double().cpu().numpy() for values in (weight, clean))
    if sigma == 0:
        return used != before
    draws = Draws.of(key_at_step(seed, _AQN, step), call, 0)
    expected, allowed = expected_values(before, AbsoluteGaussian(scale=sigma), weight.dtype, draws, elements)
    return deviations(before, used, expected, allowed, weight.dtype) > 1


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


def _custom_values(
    clean: FloatArray, error: CustomError, dtype: torch.dtype, draws: Draws, elements: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return what the function of `error` makes of `clean`, and how far the kernels' normals may move each result.

    The kernels' numbers differ slightly from those in numpy. The second array is the sum over draws of the largest
    change of the result when a number is moved by that difference, so it also covers a step at exactly this number.
    Raises ConfigError if the function raises here.
    """
    drawn = [normals(elements, _of_draw(draws, number)) for number in range(error.draws)]
    numbers = np.stack([z for z, _ in drawn]) if drawn else np.zeros((0, *clean.shape))
    values = torch.from_numpy(clean).to(torch.float64 if dtype == torch.float64 else torch.float32)

    def of(changed: FloatArray) -> FloatArray:
        return _called(error, values, torch.from_numpy(changed).to(values.dtype, copy=True))

    expected, slack = of(numbers), np.zeros(clean.shape)
    for number, (_, difference) in enumerate(drawn):
        moved = []
        for sign in (-1, 1):
            shifted = numbers.copy()
            shifted[number] += sign * difference
            moved.append(np.abs(of(shifted) - expected))
        slack += np.maximum(*moved)
    # Numbers of the function's own would count as what moving the normals changes. NaN contradicts any value.
    return np.where(of(numbers) == expected, expected, np.nan), slack


def _of_draw(draws: Draws, number: int) -> Draws:
    """Return the random numbers of draw `number`: the first has the key itself, others have keys derived from it."""
    if number == 0:
        return draws
    keys, places = np.unique(draws.key, return_inverse=True)
    derived = np.array([derived_key(int(key), "own draw", number) for key in keys], np.uint64)
    return draws._replace(key=derived[places].reshape(draws.key.shape))


def _called(error: CustomError, values: Tensor, drawn: Tensor) -> FloatArray:
    call = unchanged_function(error.function, error.source_sha256 or "")
    with torch.no_grad(), as_config_error(error.function, f"for {values.numel()} values by themselves"):
        found = call(values.clone(), drawn, **error.settings)
    # Whatever is no tensor of these elements has none of the values that were used.
    if not isinstance(found, Tensor) or (found.shape, found.device) != (values.shape, values.device):
        return np.full(tuple(values.shape), np.nan)
    return np.asarray(found.detach().double().numpy())
