"""Compares elements of results with the values that were requested: exact ones with an error, computed a second time.

The function of a user's own error model is the same, for its definition is all there is. Everything else is derived
anew: the keys, the normal numbers (in numpy) and the elements, which the function gets apart from the tensor that they
belong to. A function that keeps a state, draws numbers of its own, or mixes elements gives other values here.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aqnpipe.config.custom_code import CustomError, as_config_error, unchanged_function
from aqnpipe.config.measured_noise import ErrorFigures, OperatorError
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    AppliedError,
    FakeQuantization,
    MantissaTruncation,
    RelativeGaussian,
    SystematicBias,
    TensorError,
    is_fixed,
    requested_size,
)
from aqnpipe.proof.random_numbers import Draws, FloatArray, IntArray, derived_key, normals
from aqnpipe.proof.recompute import Sampled

Columns = dict[str, Any]
"""What was seen of elements: columns of a row of a receipt."""

_TINY = 1e-300
_NEXT_TO_NOTHING = 0.1

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

_SAMPLED_WEIGHTS = 64


def compare(sampled: Sampled, error: AppliedError, draws: Draws, dtype: torch.dtype) -> Columns:
    """Compare sampled elements of a result of `dtype` with what `error` makes of the exact values."""
    if sampled.expected is not None or isinstance(error, FakeQuantization):
        return _compare_expected(sampled, sampled.exact if sampled.expected is None else sampled.expected)
    if is_fixed(error):
        draws = draws._replace(operands=sampled.digests(dtype))
    is_random = isinstance(error, RelativeGaussian | AbsoluteGaussian | CustomError | OperatorError)
    exact, slack, found = sampled.exact, sampled.slack, sampled.found
    usable = np.isfinite(exact) & np.isfinite(found)
    low, expected, high, allowed = _expected_around(sampled, error, dtype, draws)
    spread = np.maximum(np.abs(low - expected), np.abs(high - expected))
    tolerance = allowed + spread + sampled.after
    if sampled.row:
        expected, tolerance = _as_distributions(expected, tolerance, sampled.row, dtype)
    deviation = deviations(exact, found, expected, tolerance, dtype)[usable]
    # Elements with much rounding say little; without this one large element would outweigh all others.
    is_relative = isinstance(error, RelativeGaussian) or (
        isinstance(error, CustomError) and error.quantity == "relative"
    )
    scale = requested_size(error) if is_relative else None
    unit = (np.abs(exact) + (slack + sampled.after) / scale + _TINY)[usable] if scale else 1.0
    if isinstance(error, OperatorError):
        size = error.multiple * measured_size(error.figures, exact, sampled.input_rms)[usable]
        unit = size + (slack + sampled.after)[usable] + _TINY
    # Of a sum that is exact in 16 bits (one key has all the weight) rounding hides small errors, and leaves no trace;
    # so it does of results below the smallest normal number, as gradients in float16 may be.
    limits = torch.finfo(dtype)
    rounding = limits.eps / 12**0.5 * np.maximum(np.abs(exact), limits.tiny)[usable] / unit * (dtype.itemsize == 2)
    if dtype.itemsize == 2 and not np.any(slack) and not np.any(sampled.after):
        rounding = np.zeros(1)
        # Of an exact operand the rounded result is known, and with it how much of an error the format keeps.
        expected = torch.as_tensor(expected).to(dtype).double().numpy()
    if isinstance(error, CustomError):
        # The function computes in float32; the rounding of its argument is no error.
        expected = np.where(np.abs(expected - exact) <= 2.0**-22 * np.abs(exact), exact, expected)
    requested, seen = (expected - exact)[usable] / unit, (found - exact)[usable] / unit
    if not is_random:
        # Rounding hides the size; the values are bounded above.
        requested = np.zeros_like(requested)
    columns = _columns(deviation, requested, seen) | {"hidden_squares": float((rounding * rounding).sum())}
    if isinstance(error, CustomError):
        # In the quantity of its announced size.
        whole = np.where(exact == 0, np.inf, exact) if is_relative else np.ones_like(exact)
        columns["own_squares"] = float((((expected - exact) / whole)[usable] ** 2).sum())
    return columns


def _columns(deviation: FloatArray, requested: FloatArray, seen: FloatArray) -> Columns:
    """Return the columns of errors that were requested and seen; a `deviation` above 1 is a wrong value."""
    return {
        "recomputed": len(deviation),
        "wrong": int((deviation > 1).sum()),
        "largest_deviation": float(deviation.max(initial=0.0)),
        "found_expected": float((seen * requested).sum()),
        "requested_squares": float((requested * requested).sum()),
        "found_squares": float((seen * seen).sum()),
    }


def best_explained(tried: Iterable[Columns]) -> Columns:
    """Return the comparison with the random numbers that explain a result, of those with several ones.

    That is the first without a wrong value in which the requested error leaves next to nothing of the one found; else,
    of those without a wrong value, the one in which it leaves the least (results near 0 in float16 fit many), or the
    first of all.
    """
    seen_so_far: list[Columns] = []
    for seen in tried:
        is_explained = _left(seen) <= _NEXT_TO_NOTHING * seen["requested_squares"] or not seen["requested_squares"]
        if is_explained and not seen["wrong"]:
            return seen
        seen_so_far.append(seen)
    fitting = [seen for seen in seen_so_far if not seen["wrong"]]
    return min(fitting, key=_left) if fitting else seen_so_far[0]


def _left(seen: Columns) -> float:
    """Return the sum of squares of the error found less the requested one."""
    return float(seen["found_squares"] - 2 * seen["found_expected"] + seen["requested_squares"])


def compare_exact(sampled: Sampled) -> Columns:
    """Compare elements of a result of which no error was requested with the exact values."""
    usable = np.isfinite(sampled.exact) & np.isfinite(sampled.found)
    difference = np.abs(sampled.found - sampled.exact)[usable]
    is_wrong = difference > (sampled.slack + sampled.after + _TINY)[usable]
    return {
        "compared": int(usable.sum()),
        "wrong": int(is_wrong.sum()),
        "largest_difference": float(difference[is_wrong].max(initial=0.0)),
    }


def _expected_around(
    sampled: Sampled, error: TensorError, dtype: torch.dtype, draws: Draws
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return what an error makes of the exact values less their slack, as they are, and with it; and what rounding
    allows.
    """
    changes = np.stack((-sampled.slack, np.zeros_like(sampled.slack), sampled.slack))
    if isinstance(error, CustomError):
        # A user's function gets elements of one dimension.
        each = [expected_values(sampled.exact + change, error, dtype, draws, sampled.numbers) for change in changes]
        return each[0][0], each[1][0], each[2][0], each[1][1]
    found, allowed = expected_values(sampled.exact + changes, error, dtype, draws, sampled.numbers, sampled.input_rms)
    return found[0], found[1], found[2], allowed[1]


def _as_distributions(
    expected: FloatArray, tolerance: FloatArray, length: int, dtype: torch.dtype
) -> tuple[FloatArray, FloatArray]:
    """Return rows of a softmax with an error as distributions: no negative values, and the sum 1."""
    values, slack = np.maximum(expected, 0.0).reshape(-1, length), tolerance.reshape(-1, length)
    total = np.maximum(values.sum(-1, keepdims=True), torch.finfo(dtype).tiny)
    shares = values / total
    slack = (slack + shares * slack.sum(-1, keepdims=True)) / total + 2 * torch.finfo(dtype).eps * shares
    return shares.reshape(-1), slack.reshape(-1)


def _compare_expected(sampled: Sampled, expected: FloatArray) -> Columns:
    """Compare with values that are known, in units of what rounding explains."""
    unit = sampled.slack + sampled.after + _TINY
    usable = np.isfinite(expected) & np.isfinite(sampled.found)
    deviation = (np.abs(sampled.found - expected) / unit)[usable]
    requested, seen = ((values - sampled.exact)[usable] / unit[usable] for values in (expected, sampled.found))
    return _columns(deviation, requested, seen)


# -- the values that errors give --------------------------------------------------------------------------------------


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
    draws = Draws.of(derived_key(seed, "aqn", step), call, 0)
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
