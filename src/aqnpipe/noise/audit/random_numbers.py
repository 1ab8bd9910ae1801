"""Keys and random numbers of the noise, derived a second time.

The definition is shared with the kernels, the code is not: a key is a BLAKE2b digest of seed, stream name and counters;
a number comes from Philox4x32 with 7 rounds and the Box-Muller transform, here in numpy and in double precision.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_GROUP = 1024
_LANE = 256
_ROUNDS = 7
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


class Position(NamedTuple):
    """Where in a run a forward pass is: the facts that its keys must depend on."""

    seed: int
    step: int
    micro_step: int
    rank: int
    forward: int


def key_at(position: Position, stream: str, *counters: int) -> int:
    """Return the 63-bit key of `stream` at `position`: BLAKE2b-64 of the little-endian fields, shifted right by one."""
    return derived_key(position.seed, stream, *position[1:], *counters)


def key_at_step(seed: int, stream: str, step: int) -> int:
    """Return the 63-bit key of `stream` at an optimiser step, for noise that a whole rollout shares."""
    return derived_key(seed, stream, step)


def derived_key(seed: int, stream: str, *fields: int) -> int:
    """Return the 63-bit key of (seed, stream, fields), derived by code that shares nothing with `aqnpipe.seeding`."""
    name = stream.encode("utf-8")
    message = seed.to_bytes(8, "little", signed=True) + len(name).to_bytes(4, "little") + name
    message += b"".join(field.to_bytes(8, "little", signed=True) for field in fields)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") // 2


class Draws(NamedTuple):
    """The random numbers of elements of tensors: arrays of the same length, or single values for all elements.

    `key` is the 63-bit key, `call` the number of the call, `stream` the stream within the call.
    """

    key: npt.NDArray[np.uint64]
    call: npt.NDArray[np.uint64]
    stream: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, key: int, call: int, stream: int) -> "Draws":
        """Return the random numbers of one tensor."""
        return cls(*(np.array(value, np.uint64) for value in (key, call, stream)))


def normals(elements: IntArray, draws: Draws) -> tuple[FloatArray, FloatArray]:
    """Return the standard normal numbers of `elements`, and a bound of the float32 kernels' error in each of them.

    Elements are numbered in groups of 1,024, and element `256*i + j` of a group is number i of its counter j. The
    kernels round the uniform number to float32, so their error grows near the centre: as 1/radius, for the radius of
    Box-Muller.
    """
    group, place = np.divmod(elements, _GROUP)
    lane, offset = np.divmod(place, _LANE)
    words = _philox((group * _LANE + offset).astype(np.uint64), draws)
    first = np.where(lane < 2, words[0], words[2]).astype(np.float64)
    angle = np.where(lane < 2, words[1], words[3]).astype(np.uint32).view(np.int32).astype(np.float64) * 2.0**-31
    radius = np.sqrt(-2.0 * np.log((first + 0.5) / 2.0**32))
    values = radius * np.where(lane % 2 == 0, np.cos(np.pi * angle), np.sin(np.pi * angle))
    return values, 5e-7 * (1 + radius) + 3e-7 / np.maximum(radius, 3e-4)


def _philox(counter: npt.NDArray[np.uint64], draws: Draws) -> tuple[npt.NDArray[np.uint64], ...]:
    c0, c1, c2, c3 = counter & _LOW, draws.call, draws.stream, np.zeros_like(counter)
    k0, k1 = draws.key & _LOW, draws.key >> _32
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product_1 >> _32) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _32) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
