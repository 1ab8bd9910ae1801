"""Robust z-scores over the layers of a model."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MAD_TO_SIGMA = 1.4826
_RELATIVE_FLOOR = 0.01
_ABSOLUTE_FLOOR = 1e-6


def robust_z(values: Floats) -> Floats:
    """Return `(x - median)/(1.4826*max(MAD, .01*|median|, 1e-6))`, as published for SRDD.

    The floor prevents extreme scores when all layers are nearly equal. If all layers but one are exactly equal, the
    score of that layer is its distance in units of the floor and can be very large.
    """
    median = np.median(values)
    spread = np.median(np.abs(values - median))
    return (values - median) / (_MAD_TO_SIGMA * max(spread, _RELATIVE_FLOOR * abs(median), _ABSOLUTE_FLOOR))


def first_below(z: Floats, threshold: float, start: int = 0) -> int | None:
    """Return the first index, from `start` on, with z < threshold, or None. NaN is never below."""
    hits = np.flatnonzero(z[start:] < threshold)
    return int(hits[0]) + start if len(hits) else None
