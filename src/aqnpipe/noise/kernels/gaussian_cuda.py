"""The noise of `gaussian.py` on a GPU: one Triton kernel reads a tensor, draws noise in registers and writes it back.

Counters, rounds, element numbering and polynomials are those of the CPU kernel. The Philox words are therefore equal
bit for bit, and normals differ only by the order of rounding (below `CPU_AGREEMENT`). Needs the package triton, which
the CUDA build of torch includes. `gaussian.py` imports this module on first use on a CUDA device.

A captured CUDA graph would repeat its noise, because it replays the arguments of its kernels; receipts refuse one.
"""

# Triton compiles the annotations of a kernel too, so kernels have none.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
from torch import Tensor

from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.kernels.gaussian import GROUP, ROUNDS, NoiseStream

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


def apply_gaussian_(flat: Tensor, scale: float, source: NoiseStream, *, relative: bool) -> None:
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
    programs = triton.cdiv(flat.numel(), _GROUPS_PER_PROGRAM * GROUP)
    with torch.cuda.device_of(flat):
        _apply_kernel[(programs,)](
            flat,
            flat.numel(),
            scale,
            source.key,
            source.call,
            source.stream,
            RELATIVE=relative,
            GROUPS=_GROUPS_PER_PROGRAM,
            num_warps=4,
        )


# -- the kernel. Key and counters change per call and must not trigger a new compilation; names in capitals do. --------


@triton.jit(do_not_specialize=["key", "call", "stream"])
def _apply_kernel(
    values,
    numel,
    scale,
    key,
    call,
    stream,
    RELATIVE: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    j = tl.arange(0, _QUARTER)[None, :]
    counter = (group * _QUARTER + j).to(tl.uint32)
    w0, w1, w2, w3 = philox(counter, key, call, stream)
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
def philox(counter, key, call, stream):
    """Return the four Philox words of each counter (uint32) as uint32."""
    bits = key.to(tl.int64)
    key_0, key_1 = (bits & 0xFFFFFFFF).to(tl.uint32), (bits >> 32).to(tl.uint32)
    zeros = counter * 0
    return tl.philox_impl(
        counter, zeros + call.to(tl.uint32), zeros + stream.to(tl.uint32), zeros, key_0, key_1, n_rounds=_ROUNDS
    )


@triton.jit
def _gaussian_pair(word_0, word_1):
    """Box-Muller: two independent N(0, 1) from two uniform words."""
    radius, cosine_angle, sine_angle = polar(word_0, word_1)
    return radius * sin_pi(cosine_angle), radius * sin_pi(sine_angle)


@triton.jit
def polar(word_0, word_1):
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
def sin_pi(x):
    """sin(pi*x) for |x| <= 1/2: minimax odd polynomial of degree 9."""
    y = x * x
    p = 0.0772201287851013
    p = p * y - 0.5980451740286139
    p = p * y + 2.5500313772632137
    p = p * y - 5.167706878925217
    p = p * y + 3.141592580044703
    return x * p
