"""Compares recomputed elements of a result with the ones that a program got."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.measured_noise import OperatorError
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    AppliedError,
    FakeQuantization,
    RelativeGaussian,
    TensorError,
    is_fixed,
    requested_size,
)
from aqnpipe.noise.audit.expected_values import deviations, expected_values, measured_size
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray
from aqnpipe.proof.recompute import Sampled

Columns = dict[str, Any]
"""What was seen of elements: columns of a row of a receipt."""

_TINY = 1e-300
_NEXT_TO_NOTHING = 0.1


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
