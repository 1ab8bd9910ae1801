"""Gaussian noise of a fixed machine, which makes the same error whenever and wherever it multiplies the same operands.

An element of a product is a sum over a row of the first factor and a column of the second. Its number z ~ N(0, 1) is
drawn with a counter made of the digests of both, the smaller one first: a product and its transpose have the same
error. So neither the place in a program nor the other rows of a batch matter, and a layer that is computed again, or
computed by another engine from the same numbers, gets the same error.

The digest of a vector is the sum of its elements' bits, as signed integers of the width of their number format, times
the odd outputs of SplitMix64 (Steele et al., 2014), modulo 2^64. Zeros add nothing to it, as they add nothing to a sum.
"""

from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from aqnpipe.noise.kernels.gaussian import gaussian_pair, pair_by_torch, philox, philox_by_torch

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 0xFFFFFFFF
_AT_ONCE = 1 << 22
"""Elements that torch computes in one go: each takes 8 bytes in about ten intermediate results."""
_i64, _u32, _u64 = np.int64, np.uint32, np.uint64
_32, _LOW = _u64(32), _u64(_MASK)


def add_fixed_gaussian_(result: Tensor, scale: float, factors: tuple[Tensor, ...], key: int) -> Tensor:
    """Scale `result` [..., m, n] in place by `1 + scale*z`; z of an element is that of its operands on machine `key`.

    `factors`: [..., m, k] and [..., k, n]. Results of 16 bits are multiplied in float32 and rounded once.
    """
    first, second = factors
    factor = fixed_normals(first, second, key).mul_(scale).add_(1).reshape(result.shape)
    wide = result.dtype in (torch.float32, torch.float64)
    return result.mul_(factor) if wide else result.copy_(result.float().mul_(factor))


def fixed_normals(first: Tensor, second: Tensor, key: int) -> Tensor:
    """Return the numbers z [..., m, n] of all elements of a product, in float32."""
    rows, columns = digests(first), digests(second.transpose(-1, -2))
    if not rows.is_cpu:
        rows_at_once = max(_AT_ONCE // (columns.numel() or 1), 1)
        return torch.cat([_normals_by_torch(part, columns, key) for part in rows.split(rows_at_once, -1)], -2)
    shape = (*rows.shape, columns.shape[-1])
    found = torch.empty(shape, dtype=torch.float32)
    whole = rows.reshape(-1, rows.shape[-1]).numpy(), columns.reshape(-1, columns.shape[-1]).numpy()
    _normals(*whole, found.numpy().reshape(-1, *shape[-2:]), _u32(key & _MASK), _u32(key >> 32))
    return found


def digests(vectors: Tensor) -> Tensor:
    """Return the digests [...] of vectors [..., k] as int64."""
    bits = vectors.detach().contiguous().view(_BITS[vectors.element_size()])
    if not bits.is_cpu:
        return _digests_by_torch(bits)
    found = torch.empty(bits.shape[:-1], dtype=torch.int64)
    _digests(bits.reshape(-1, bits.shape[-1]).numpy(), _multipliers(bits.shape[-1]), found.numpy().reshape(-1))
    return found


@lru_cache(maxsize=64)
def _multipliers(length: int) -> Any:
    """Return the first outputs of SplitMix64 from state 0, made odd."""
    state = np.arange(1, length + 1, dtype=np.uint64) * _u64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> _u64(30))) * _u64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> _u64(27))) * _u64(0x94D049BB133111EB)
    return (state ^ (state >> _u64(31))) | _u64(1)


def _digests_by_torch(bits: Tensor) -> Tensor:
    multipliers = torch.from_numpy(_multipliers(bits.shape[-1]).view(np.int64)).to(bits.device)
    parts = bits.reshape(-1, bits.shape[-1]).split(max(_AT_ONCE // (bits.shape[-1] or 1), 1))
    return torch.cat([(part.to(torch.int64) * multipliers).sum(-1) for part in parts]).reshape(bits.shape[:-1])


def _normals_by_torch(rows: Tensor, columns: Tensor, key: int) -> Tensor:
    """Return the same numbers as the kernel of the CPU, by torch's integer arithmetic on any device."""
    of_rows, of_columns = torch.broadcast_tensors(rows.unsqueeze(-1), columns.unsqueeze(-2))
    low, high = torch.minimum(of_rows, of_columns), torch.maximum(of_rows, of_columns)
    words = philox_by_torch([low & _MASK, low >> 32 & _MASK, high & _MASK, high >> 32 & _MASK], key)
    return pair_by_torch(words[0], words[1])[0]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _digests(bits: Any, multipliers: Any, found: Any) -> None:
    for row in range(bits.shape[0]):
        total = _u64(0)
        for term in range(bits.shape[1]):
            total += _u64(_i64(bits[row, term])) * multipliers[term]
        found[row] = _i64(total)


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _normals(rows: Any, columns: Any, found: Any, key_0: Any, key_1: Any) -> None:
    for matrix in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            for j in range(columns.shape[1]):
                row, column = rows[matrix, i], columns[matrix, j]
                low, high = _u64(min(row, column)), _u64(max(row, column))
                w0, w1, _, _ = philox(low & _LOW, low >> _32, high & _LOW, high >> _32, key_0, key_1)
                found[matrix, i, j] = gaussian_pair(w0, w1)[0]
