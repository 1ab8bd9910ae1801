"""The few figures that describe the error of an operator.

Its mean is a straight line over the results, and its variance is `absolute^2 + (per_input*x)^2 + (per_result*y)^2` with
figures that are not negative. Both are fitted with weights from the variance, in a few rounds, because the rows with
the largest values would decide them alone otherwise: their errors are the most scattered ones.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aqnpipe.config.measured_noise import ErrorFigures

_FloatArray = npt.NDArray[np.float64]
_STEPS = 200
_ROUNDS_OF_LINE = 3
_MOST_ELEMENTS = 10_000
"""Elements that the variance is fitted on, drawn at random: its figures are then known to one or two percent."""
_SMALLEST_SHARE = 1e-12
"""Smallest variance, as a share of the mean: exact zeros have no error at all."""


def error_figures(results: Tensor, errors: Tensor, input_rms: Tensor | None) -> tuple[ErrorFigures, float]:
    """Return the figures of `errors` [rows, channels], and their root mean square by the figures.

    `results` has the same shape, `input_rms` [rows] is the root mean square of each row's input; None: the error shall
    not depend on it. All must be finite.
    """
    y, error = results.double().numpy(), errors.double().numpy()
    if not error.any():
        return ErrorFigures(), 0.0
    rows = np.zeros(y.shape) if input_rms is None else np.broadcast_to(input_rms.double().numpy()[:, None], y.shape)
    columns = np.stack([np.ones(y.size), np.square(rows).ravel(), np.square(y).ravel()])
    chosen = _sampled(y.size)
    drawn = columns[:, chosen]
    weights = np.ones(y.shape)
    for turn in range(_ROUNDS_OF_LINE):
        bias, gain = _line(y, error, weights)
        squares = np.square(error - bias - gain * y).ravel()
        factors = _factors(drawn, squares[chosen])
        if turn < _ROUNDS_OF_LINE - 1:
            weights = 1 / np.maximum(factors @ columns, _SMALLEST_SHARE * squares.mean() or 1.0).reshape(y.shape)
    absolute, per_input, per_result = np.sqrt(factors)
    figures = ErrorFigures(
        bias=bias,
        gain=gain,
        absolute=float(absolute),
        per_input=float(per_input),
        per_result=float(per_result),
    )
    mean_square = float(np.square(bias + gain * y).mean() + (factors @ columns).mean())
    return figures, mean_square**0.5


@lru_cache(maxsize=64)
def _sampled(count: int) -> npt.NDArray[np.int64]:
    """Return the elements that the variance is fitted on; the same array each time, not to be written to."""
    if count <= _MOST_ELEMENTS:
        return np.arange(count)
    return np.random.default_rng(0).choice(count, _MOST_ELEMENTS, replace=False)


def _line(y: _FloatArray, error: _FloatArray, weights: _FloatArray) -> tuple[float, float]:
    """Return intercept and slope of the error over the results, by weighted least squares."""
    weights = weights / weights.sum()
    centred = y - (weights * y).sum()
    spread = float((weights * np.square(centred)).sum())
    gain = float((weights * centred * error).sum() / spread) if spread > 0 else 0.0
    return float((weights * (error - gain * y)).sum()), gain


def _factors(columns: _FloatArray, squares: _FloatArray) -> _FloatArray:
    """Return the factors, not negative, with which `columns` [3, n] add up to the expected `squares` [n].

    They maximise the likelihood of normal errors with these variances. Each step is that of Fevotte and Idier,
    "Algorithms for nonnegative matrix factorization with the beta-divergence" (2011), which never lowers it.
    """
    means = columns.mean(1)
    factors = np.where(means > 0, squares.mean() / (len(means) * np.where(means > 0, means, 1.0)), 0.0)
    if not squares.any():
        return np.zeros(len(means))
    smallest = _SMALLEST_SHARE * squares.mean()
    variances, ratios = np.empty_like(squares), np.empty_like(squares)
    for _ in range(_STEPS):
        # In place: new arrays would cost as much as the arithmetic.
        np.maximum(np.matmul(factors, columns, out=variances), smallest, out=variances)
        wanted = columns @ np.divide(squares, np.square(variances, out=ratios), out=ratios)
        found = columns @ np.divide(1.0, variances, out=ratios)
        factors = factors * np.sqrt(wanted / np.where(found > 0, found, 1.0))
    return np.asarray(factors)
