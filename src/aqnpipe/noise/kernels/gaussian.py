"""Gaussian noise as a pure function of (key, call, stream, element): counter-based, so no noise is stored.

Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011: 7 rounds
pass BigCrush) and the Box-Muller transform in float32. Elements are numbered in memory order, in groups of 1,024:
counter `256*group + j` yields the elements j, j+256, j+512 and j+768 of its group. `gaussian_cuda.py` computes the same
numbers on a GPU. On other devices torch's integer arithmetic computes them, without a kernel.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import get_or_insert_function
from numba.core.types.misc import CPointer
from numba.extending import intrinsic
from torch import Tensor

ROUNDS = 7
"""Rounds of Philox4x32."""

GROUP = 1024
"""Elements per group; each group uses a quarter as many Philox counters."""

_QUARTER = GROUP // 4
_CPU_BLOCK_ELEMENTS = 64 * GROUP
_TORCH_BLOCK_ELEMENTS = 1024 * GROUP
_CACHE_LINE_BYTES = 64
_MASK = 0xFFFFFFFF


class NoiseStream(NamedTuple):
    """Identifies the random numbers of one tensor: a 63-bit key and two counters below 2^32."""

    key: int
    call: int = 0
    stream: int = 0


def _use_wide_vectors() -> None:
    """Make LLVM use 512-bit registers, which it avoids by default, because the kernel is bound by arithmetic."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and not numba.config.CPU_FEATURES:
        numba.config.CPU_NAME = llvm.get_host_cpu_name()
        numba.config.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"


_use_wide_vectors()

_u32, _u64, _i32, _f32 = np.uint32, np.uint64, np.int32, np.float32
_MULTIPLIER_0, _MULTIPLIER_1 = _u64(0xD2511F53), _u64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = _u32(0x9E3779B9), _u32(0xBB67AE85)
_32, _LOW = _u64(32), _u64(0xFFFFFFFF)


def add_relative_gaussian_(tensor: Tensor, scale: float, source: NoiseStream) -> Tensor:
    """Scale `tensor` in place by `1 + scale*z`, z ~ N(0, 1) per element; equal to `y + scale*|y|*z` in distribution.

    Low-precision tensors are multiplied in float32 and rounded once, like an error of the hardware.
    """
    return _apply_(tensor, scale, source, True)


def add_absolute_gaussian_(tensor: Tensor, sigma: float, source: NoiseStream) -> Tensor:
    """Add `sigma*z` to `tensor` in place, z ~ N(0, 1) per element; low-precision tensors are rounded once."""
    return _apply_(tensor, sigma, source, False)


def standard_normal(numel: int, source: NoiseStream, device: torch.device | str = "cpu") -> Tensor:
    """Return `numel` numbers ~ N(0, 1) in float32."""
    return add_absolute_gaussian_(torch.zeros(numel, device=device), 1.0, source)


def load_kernels() -> None:
    """Compile the kernels of the CPU, or load them from numba's cache; otherwise the first noise of a process does."""
    add_absolute_gaussian_(torch.zeros(2), 1.0, NoiseStream(0, 0, 0))


def _apply_(tensor: Tensor, scale: float, source: NoiseStream, relative: bool) -> Tensor:
    if tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous():
        # Calls on small tensors are very frequent, so the common case comes first.
        _add_gaussian(tensor.data_ptr(), tensor.numel(), False, scale, relative, 0, *source)
        return tensor
    flat = in_memory_order(tensor)
    if flat is None:
        # Elements with gaps are noised in a dense copy. If elements share memory, torch refuses to copy it back.
        dense = tensor.contiguous()
        _apply_(dense, scale, source, relative)
        return tensor.copy_(dense)
    if flat.is_cpu:
        _apply_cpu_(flat, scale, source, relative)
    elif flat.is_cuda:
        from aqnpipe.noise.kernels.gaussian_cuda import apply_gaussian_

        apply_gaussian_(flat, scale, source, relative=relative)
    else:
        _apply_by_torch_(flat, scale, source, relative)
    return tensor


def in_memory_order(tensor: Tensor) -> Tensor | None:
    """Return a flat view of the elements of `tensor` as they lie in memory, or None if they overlap or leave gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    permuted = tensor.permute(order)
    return permuted.view(-1) if permuted.is_contiguous() else None


def _apply_cpu_(flat: Tensor, scale: float, source: NoiseStream, relative: bool) -> None:
    values = flat.detach()
    if values.dtype in (torch.float32, torch.float64):
        is_double = values.dtype == torch.float64
        _add_gaussian(values.data_ptr(), values.numel(), is_double, scale, relative, 0, *source)
        return
    for block, part in enumerate(values.split(_CPU_BLOCK_ELEMENTS)):
        wide = part.float()
        first_counter = block * (_CPU_BLOCK_ELEMENTS // 4)
        _add_gaussian(wide.data_ptr(), wide.numel(), False, scale, relative, first_counter, *source)
        part.copy_(wide)


def _apply_by_torch_(flat: Tensor, scale: float, source: NoiseStream, relative: bool) -> None:
    """Put the same noise on a tensor of any device, by torch's own integer arithmetic; slower than a kernel."""
    values = flat.detach()
    for block, part in enumerate(values.split(_TORCH_BLOCK_ELEMENTS)):
        first_counter = block * (_TORCH_BLOCK_ELEMENTS // 4)
        noise = _normals_by_torch(part.numel(), first_counter, source, part.device).mul_(scale)
        part.copy_(noise.add_(1).mul_(part) if relative else noise.add_(part))


def _normals_by_torch(numel: int, first_counter: int, source: NoiseStream, device: torch.device) -> Tensor:
    """Return the numbers ~ N(0, 1) of `numel` elements, in float32."""
    groups = -(-numel // GROUP)
    counters = torch.arange(first_counter, first_counter + groups * _QUARTER, device=device)
    words = [counters & _MASK, *(torch.full_like(counters, word) for word in (source.call, source.stream, 0))]
    words = philox_by_torch(words, source.key)
    pairs = [pair_by_torch(words[0], words[1]), pair_by_torch(words[2], words[3])]
    normals = torch.stack([number.view(groups, _QUARTER) for pair in pairs for number in pair], 1)
    return normals.flatten()[:numel]


def philox_by_torch(words: list[Tensor], key: int) -> list[Tensor]:
    """Return the random words of counters of four 32-bit words, which are int64 tensors here."""
    key_0, key_1 = key & _MASK, key >> 32 & _MASK
    for _ in range(ROUNDS):
        # Products wrap around at 2^64; the mask after the shift removes the copies of the sign bit.
        product_0, product_1 = words[0] * int(_MULTIPLIER_0), words[2] * int(_MULTIPLIER_1)
        words = [
            (product_1 >> 32 & _MASK) ^ words[1] ^ key_0,
            product_1 & _MASK,
            (product_0 >> 32 & _MASK) ^ words[3] ^ key_1,
            product_0 & _MASK,
        ]
        key_0, key_1 = key_0 + int(_WEYL_0) & _MASK, key_1 + int(_WEYL_1) & _MASK
    return words


def pair_by_torch(word_0: Tensor, word_1: Tensor) -> tuple[Tensor, Tensor]:
    """Box-Muller: two independent N(0, 1) from two uniform words."""
    radius = (word_0.float() * 2.0**-32 + 2.0**-33).log_().mul_(-2).clamp_min_(0).sqrt_()
    angle = ((word_1 ^ 0x80000000) - 0x80000000).float() * (math.pi * 2.0**-31)
    return radius * angle.cos(), radius * angle.sin()


# -- the CPU kernel. LLVM vectorises the loops; functions are compiled once and cached on disk. ------------------------


@numba.njit(inline="always")
def philox(c0: Any, c1: Any, c2: Any, c3: Any, key_0: Any, key_1: Any) -> Any:
    """Return the four random words of a counter of four words."""
    c0, c1, c2, c3 = _u64(c0), _u64(c1), _u64(c2), _u64(c3)
    for _ in range(ROUNDS):
        product_0, product_1 = (c0 & _LOW) * _MULTIPLIER_0, (c2 & _LOW) * _MULTIPLIER_1
        c0, c2 = (product_1 >> _32) ^ c1 ^ _u64(key_0), (product_0 >> _32) ^ c3 ^ _u64(key_1)
        c1, c3 = product_1, product_0
        key_0, key_1 = _u32(key_0 + _WEYL_0), _u32(key_1 + _WEYL_1)
    return _u32(c0), _u32(c1), _u32(c2), _u32(c3)


@numba.njit(inline="always")
def _minus_two_log(word: Any) -> Any:
    """-2 ln((word + 1/2) / 2^32), at least 0: a minimax polynomial on [sqrt(1/2), sqrt(2)), error 1.4e-8."""
    uniform = _f32(_f32(word) * _f32(2.0**-32) + _f32(2.0**-33))
    bits = _f32(uniform).view(_i32)
    exponent = _i32(_i32(bits - _i32(0x3F3504F3)) >> _i32(23))
    x = _i32(bits - _i32(exponent << _i32(23))).view(_f32) - _f32(1)
    p = _f32(-0.17344366014003754)
    p = p * x + _f32(0.2875801622867584)
    p = p * x + _f32(-0.29955989122390747)
    p = p * x + _f32(0.33128851652145386)
    p = p * x + _f32(-0.3990975022315979)
    p = p * x + _f32(0.500033974647522)
    p = p * x + _f32(-0.6666833162307739)
    return x * x * (x * p + _f32(1)) + (_f32(exponent) * _f32(-1.3862943611198906) - (x + x))


@numba.njit(inline="always")
def _sin_pi(x: Any) -> Any:
    """sin(pi*x) for |x| <= 1/2: minimax odd polynomial of degree 9, error 3e-9, and 2e-7 in float32."""
    y = x * x
    p = _f32(0.0772201287851013)
    p = p * y + _f32(-0.5980451740286139)
    p = p * y + _f32(2.5500313772632137)
    p = p * y + _f32(-5.167706878925217)
    p = p * y + _f32(3.141592580044703)
    return x * p


@numba.njit(inline="always")
def gaussian_pair(word_0: Any, word_1: Any) -> Any:
    """Box-Muller: two independent N(0, 1) from two uniform words."""
    radius = np.sqrt(_minus_two_log(word_0))
    half_turns = _f32(_i32(word_1)) * _f32(2.0**-31)
    magnitude = abs(half_turns)
    cosine = _sin_pi(_f32(0.5) - magnitude)
    sine = np.copysign(_sin_pi(_f32(0.5) - abs(magnitude - _f32(0.5))), half_turns)
    return radius * cosine, radius * sine


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _change_group(
    group: Any, factor: Any, relative: Any, first: Any, call: Any, stream: Any, key_0: Any, key_1: Any
) -> None:
    """Put the noise on one whole group while drawing it, so that arithmetic hides the memory latency."""
    one = group.dtype.type(1)
    for j in range(_QUARTER):
        w0, w1, w2, w3 = philox(_u32(first + j), call, stream, _u32(0), key_0, key_1)
        z0, z1 = gaussian_pair(w0, w1)
        z2, z3 = gaussian_pair(w2, w3)
        if relative:
            group[j] *= one + factor * z0
            group[j + _QUARTER] *= one + factor * z1
            group[j + 2 * _QUARTER] *= one + factor * z2
            group[j + 3 * _QUARTER] *= one + factor * z3
        else:
            group[j] += factor * z0
            group[j + _QUARTER] += factor * z1
            group[j + 2 * _QUARTER] += factor * z2
            group[j + 3 * _QUARTER] += factor * z3


@intrinsic
def _float_pointer(typing: Any, address: Any) -> Any:
    return CPointer(types.float32)(types.int64), _pointer


@intrinsic
def _double_pointer(typing: Any, address: Any) -> Any:
    return CPointer(types.float64)(types.int64), _pointer


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line at `address`. Any address is safe."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # Options: for reading, into the second-level cache, as data.
        options = [ir.Constant(number, option) for option in (0, 2, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], pointer), *options])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _change(values: Any, address: Any, scale: Any, relative: Any, first_counter: Any, words: Any) -> None:
    factor = values.dtype.type(scale)
    whole = values.size - values.size % GROUP
    for start in range(0, whole, GROUP):
        # A group is about one page of memory, and the hardware prefetcher stops at page boundaries.
        next_group = address + (start + GROUP) * values.itemsize
        for offset in range(0, GROUP * values.itemsize, _CACHE_LINE_BYTES):
            _prefetch(next_group + offset)
        _change_group(values[start : start + GROUP], factor, relative, _u32(first_counter + start // 4), *words)
    if whole < values.size:
        rest = np.zeros(GROUP, values.dtype)
        rest[: values.size - whole] = values[whole:]
        _change_group(rest, factor, relative, _u32(first_counter + whole // 4), *words)
        values[whole:] = rest[: values.size - whole]


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def _add_gaussian(
    address: int,
    numel: int,
    is_double: bool,
    scale: float,
    relative: bool,
    first_counter: int,
    key: int,
    call: int,
    stream: int,
) -> None:
    """Put the noise on `numel` numbers at `address`. Making an array of a small tensor would take longer than this."""
    words = (_u32(call), _u32(stream), _u32(key), _u32(key >> 32))
    if is_double:
        doubles = numba.carray(_double_pointer(address), numel, np.float64)
        _change(doubles, address, scale, relative, first_counter, words)
    else:
        floats = numba.carray(_float_pointer(address), numel, np.float32)
        _change(floats, address, scale, relative, first_counter, words)
