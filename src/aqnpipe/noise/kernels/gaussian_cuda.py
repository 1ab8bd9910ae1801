"""The noise of `gaussian.py` on a GPU: one Triton kernel reads a tensor, draws noise in registers and writes it back.

Counters, rounds, element numbering and polynomials are those of the CPU kernel. The Philox words are therefore equal
bit for bit, and normals differ only by the order of rounding (below `CPU_AGREEMENT`). Needs the package triton, which
the CUDA build of torch includes. `gaussian.py` imports this module on first use on a CUDA device.

A captured CUDA graph replays the arguments of its kernels, so a key passed by value would repeat its noise.
`DeviceKeys` holds the keys in device memory instead:

    keys = DeviceKeys(num_layers, device)
    keys.refresh(keys_of_first_token)
    with torch.cuda.graph(graph):       # after one warm-up outside, which compiles the kernels
        for layer in range(num_layers):
            y = ...
            apply_gaussian_(y.view(-1), scale, keys.stream(layer, call=0), relative=True)
    for keys_of_token in ...:
        keys.refresh(keys_of_token)     # outside the graph, on the stream that replays it
        graph.replay()
"""

# Triton compiles the annotations of a kernel too, so kernels have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.kernels.stream import GROUP, ROUNDS, NoiseStream

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    raise AqnpipeError(
        "noise on a CUDA device needs the package triton, which is not installed; the CUDA build of torch includes it "
        "(a CPU build was installed), or: pip install triton"
    ) from error

CPU_AGREEMENT = 1e-5
"""Bound on |z on a GPU - z on the CPU|, z up to 6.7: float32 with and without fused multiply-add."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_ROUNDS = tl.constexpr(ROUNDS)
_GROUP = tl.constexpr(GROUP)
_QUARTER = tl.constexpr(GROUP // 4)
_GROUPS_PER_PROGRAM = 4


class DeviceNoiseStream(NamedTuple):
    """A `NoiseStream` whose key is read when the kernel runs: `key` is an int64 tensor of one element on the GPU."""

    key: Tensor
    call: int = 0
    stream: int = 0


class DeviceKeys:
    """Noise keys in device memory, for example one slot per layer: kernels of a CUDA graph use the latest keys."""

    def __init__(self, num_slots: int, device: torch.device | str) -> None:
        self._keys = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def refresh(self, keys: Sequence[int]) -> None:
        """Write a 63-bit key into every slot, in place and in the order of the current CUDA stream.

        Raises ValueError unless there is one key per slot.
        """
        if len(keys) != self._keys.numel():
            raise ValueError(f"{len(keys)} keys for {self._keys.numel()} slots")
        self._keys.copy_(torch.tensor(keys, dtype=torch.int64))

    def stream(self, slot: int, call: int = 0, stream: int = 0) -> DeviceNoiseStream:
        """Return a source with the key that `slot` has when the kernel runs."""
        return DeviceNoiseStream(self._keys[slot], call, stream)


def apply_gaussian_(flat: Tensor, scale: float, source: NoiseStream | DeviceNoiseStream, *, relative: bool) -> None:
    """Multiply `flat` (one dimension, contiguous) by `1 + scale*z` in place, or add `scale*z` to it.

    z and the factor are float32; a low-precision product is rounded once. Raises AqnpipeError for a dtype that is not
    in `DTYPES`.
    """
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"apply_gaussian_ takes a flat contiguous tensor, found {tuple(flat.shape)}, {flat.stride()}")
    if flat.dtype not in DTYPES:
        raise AqnpipeError(f"noise on a CUDA device: found {flat.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    if flat.numel() == 0:
        return
    key, key_in_memory = key_argument(source, flat.device)
    programs = triton.cdiv(flat.numel(), _GROUPS_PER_PROGRAM * GROUP)
    with torch.cuda.device_of(flat):
        _apply_kernel[(programs,)](
            flat,
            flat.numel(),
            scale,
            key,
            source.call,
            source.stream,
            KEY_IN_MEMORY=key_in_memory,
            RELATIVE=relative,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=4,
        )


def key_argument(source: NoiseStream | DeviceNoiseStream, device: torch.device) -> tuple[int | Tensor, bool]:
    """Return a kernel's key argument, and whether it is a pointer. Raises ValueError for an unreadable key."""
    if isinstance(source, NoiseStream):
        return source.key, False
    if source.key.dtype != torch.int64 or source.key.numel() != 1 or source.key.device != device:
        raise ValueError(
            f"a key in memory is one int64 on {device}, found {source.key.numel()} x {source.key.dtype} on "
            f"{source.key.device}"
        )
    return source.key, True


# -- the kernel. Key and counters change per call and must not trigger a new compilation; names in capitals do. --------


@triton.jit(do_not_specialize=["key", "call", "stream"])
def _apply_kernel(
    values,
    numel,
    scale,
    key,
    call,
    stream,
    KEY_IN_MEMORY: tl.constexpr,  # noqa: N803
    RELATIVE: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    j = tl.arange(0, _QUARTER)[None, :]
    counter = (group * _QUARTER + j).to(tl.uint32)
    w0, w1, w2, w3 = philox(counter, key, call, stream, KEY_IN_MEMORY)
    z0, z1 = _gaussian_pair(w0, w1)
    z2, z3 = _gaussian_pair(w2, w3)
    first = group * _GROUP + j
    _apply_quarter(values, first, numel, scale, z0, RELATIVE)
    _apply_quarter(values, first + _QUARTER, numel, scale, z1, RELATIVE)
    _apply_quarter(values, first + 2 * _QUARTER, numel, scale, z2, RELATIVE)
    _apply_quarter(values, first + 3 * _QUARTER, numel, scale, z3, RELATIVE)


@triton.jit
def _apply_quarter(values, element, numel, scale, z, RELATIVE: tl.constexpr):  # noqa: N803
    inside = element < numel
    value = tl.load(values + element, mask=inside)
    # Low precision is computed in float32, float64 in itself; the store rounds.
    wide = value if value.dtype == tl.float64 else value.to(tl.float32)
    noised = wide * (1.0 + scale * z) if RELATIVE else wide + scale * z
    tl.store(values + element, noised.to(value.dtype), mask=inside)


@triton.jit
def normal_of_element(element, key, call, stream, KEY_IN_MEMORY: tl.constexpr):  # noqa: N803
    """Return the normal of each single element (uint32, any shape): four times the Philox work of `_apply_kernel`."""
    w0, w1, w2, w3 = philox(element // _GROUP * _QUARTER + element % _QUARTER, key, call, stream, KEY_IN_MEMORY)
    quarter = element // _QUARTER % 4
    second_pair = quarter >= 2
    radius, cosine_angle, sine_angle = _polar(tl.where(second_pair, w2, w0), tl.where(second_pair, w3, w1))
    is_sine = quarter % 2 == 1
    return radius * _sin_pi(tl.where(is_sine, sine_angle, cosine_angle))


@triton.jit
def philox(counter, key, call, stream, KEY_IN_MEMORY: tl.constexpr):  # noqa: N803
    """Return the four Philox words of each counter (uint32) as uint32."""
    bits = tl.load(key) if KEY_IN_MEMORY else key
    bits = bits.to(tl.int64)
    key_0, key_1 = (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
    zeros = counter * 0
    return tl.philox_impl(
        counter, zeros + call.to(tl.uint32), zeros + stream.to(tl.uint32), zeros, key_0, key_1, n_rounds=_ROUNDS
    )


@triton.jit
def _gaussian_pair(word_0, word_1):
    """Box-Muller: two independent N(0, 1) from two uniform words."""
    radius, cosine_angle, sine_angle = _polar(word_0, word_1)
    return radius * _sin_pi(cosine_angle), radius * _sin_pi(sine_angle)


@triton.jit
def _polar(word_0, word_1):
    """Return the radius, and x and y with |x|, |y| <= 1/2, sin(pi*x) = cos(angle) and sin(pi*y) = sin(angle)."""
    turned = word_1.to(tl.int32, bitcast=True)
    cosine_angle = 0.5 - tl.abs(turned.to(tl.float32)) * 4.656612873077393e-10  # 2^-31: word 1 is -1 to 1 half turns
    sine_angle = (0.5 - tl.abs(cosine_angle)).to(tl.int32, bitcast=True) | (turned & -0x80000000)
    return tl.sqrt(_minus_two_log(word_0)), cosine_angle, sine_angle.to(tl.float32, bitcast=True)


@triton.jit
def _minus_two_log(word):
    """-2 ln((word + 1/2) / 2^32), at least 0: the polynomial of the CPU kernel."""
    uniform = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33
    bits = uniform.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = -0.17344366014003754
    p = p * x + 0.2875801622867584
    p = p * x - 0.29955989122390747
    p = p * x + 0.33128851652145386
    p = p * x - 0.3990975022315979
    p = p * x + 0.500033974647522
    p = p * x - 0.6666833162307739
    return x * x * (x * p + 1.0) + (exponent.to(tl.float32) * -1.3862943611198906 - (x + x))


@triton.jit
def _sin_pi(x):
    """sin(pi*x) for |x| <= 1/2: minimax odd polynomial of degree 9."""
    y = x * x
    p = 0.0772201287851013
    p = p * y - 0.5980451740286139
    p = p * y + 2.5500313772632137
    p = p * y - 5.167706878925217
    p = p * y + 3.141592580044703
    return x * p
