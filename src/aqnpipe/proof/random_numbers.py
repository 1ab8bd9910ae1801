"""Keys and random numbers of the noise, derived a second time.

The definition is shared with the kernels, the code is not: a key is a BLAKE2b digest of seed, stream name and counters;
a number comes from Philox4x32 with 7 rounds and the Box-Muller transform, here in numpy and in double precision.
"""

import hashlib
from functools import lru_cache
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


def derived_key(seed: int, stream: str, *fields: int) -> int:
    """Return the 63-bit key of (seed, stream, fields), derived by code that shares nothing with `aqnpipe.seeding`."""
    name = stream.encode("utf-8")
    message = seed.to_bytes(8, "little", signed=True) + len(name).to_bytes(4, "little") + name
    message += b"".join(field.to_bytes(8, "little", signed=True) for field in fields)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") // 2


class Draws(NamedTuple):
    """The random numbers of elements of tensors: arrays of the same length, or single values for all elements.

    `key` is the 63-bit key, `call` the number of the call, `stream` the stream within the call. `operands`: digests of
    the row and column of each element, on a fixed machine, in place of its number, call and stream.
    """

    key: npt.NDArray[np.uint64]
    call: npt.NDArray[np.uint64]
    stream: npt.NDArray[np.uint64]
    operands: tuple[IntArray, IntArray] | None = None

    @classmethod
    def of(cls, key: int, call: int, stream: int) -> "Draws":
        """Return the random numbers of one tensor."""
        return cls(np.array(key, np.uint64), np.array(call, np.uint64), np.array(stream, np.uint64))


def normals(elements: IntArray, draws: Draws) -> tuple[FloatArray, FloatArray]:
    """Return the standard normal numbers of `elements`, and a bound of the float32 kernels' error in each of them.

    Elements are numbered in groups of 1,024, and element `256*i + j` of a group is number i of its counter j. The
    kernels round the uniform number to float32, so their error grows near the centre: as 1/radius, for the radius of
    Box-Muller.
    """
    if draws.operands is None:
        group, place = np.divmod(elements, _GROUP)
        lane, offset = np.divmod(place, _LANE)
        counter = (group * _LANE + offset).astype(np.uint64)
        words = _philox((counter & _LOW, draws.call, draws.stream, np.zeros_like(counter)), draws.key)
    else:
        low, high = np.sort(np.stack(draws.operands), axis=0).view(np.uint64)
        lane, words = np.zeros_like(elements), _philox((low & _LOW, low >> _32, high & _LOW, high >> _32), draws.key)
    first = np.where(lane < 2, words[0], words[2]).astype(np.float64)
    angle = np.where(lane < 2, words[1], words[3]).astype(np.uint32).view(np.int32).astype(np.float64) * 2.0**-31
    radius = np.sqrt(-2.0 * np.log((first + 0.5) / 2.0**32))
    values = radius * np.where(lane % 2 == 0, np.cos(np.pi * angle), np.sin(np.pi * angle))
    return values, 5e-7 * (1 + radius) + 3e-7 / np.maximum(radius, 3e-4)


def digests(vectors: FloatArray, width: int, fraction_bits: int) -> IntArray:
    """Return the digests of vectors [elements, terms], whose numbers are of a format of `width` bytes.

    The sum of bits, as signed integers, times the odd outputs of SplitMix64, modulo 2^64.
    """
    if (width, fraction_bits) == (2, 7):
        bits = (vectors.astype(np.float32).view(np.int32) >> 16).astype(np.int64)
    else:
        kind = {2: np.float16, 4: np.float32, 8: np.float64}[width]
        bits = np.ascontiguousarray(vectors, kind).view(f"i{width}").astype(np.int64)
    multipliers = np.array([_split_mix(number) | 1 for number in range(vectors.shape[-1])], np.uint64)
    return (bits.view(np.uint64) * multipliers).sum(-1, dtype=np.uint64).view(np.int64)


@lru_cache(maxsize=1 << 16)
def _split_mix(number: int) -> int:
    """Return output `number` of SplitMix64 with seed 0."""
    state = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def _philox(
    counter: tuple[npt.NDArray[np.uint64], ...], key: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key & _LOW, key >> _32
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
