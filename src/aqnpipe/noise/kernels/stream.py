"""Keys and counters of noise, shared by all kernels that draw it."""

from typing import NamedTuple

ROUNDS = 7
"""Rounds of Philox4x32."""

GROUP = 1024
"""Elements per group; each group uses a quarter as many Philox counters."""


class NoiseStream(NamedTuple):
    """Identifies the random numbers of one tensor: a 63-bit key and two counters below 2^32."""

    key: int
    call: int = 0
    stream: int = 0
