"""How noise is numbered, for every kernel that draws it."""

from typing import NamedTuple

ROUNDS = 7
"""Rounds of Philox4x32."""

GROUP = 1024
"""Elements per group; a quarter of it are its Philox counters."""


class NoiseStream(NamedTuple):
    """Names one tensor's worth of numbers: a 63-bit key, and two counters below 2^32 under it."""

    key: int
    call: int = 0
    stream: int = 0
