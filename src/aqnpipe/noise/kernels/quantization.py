"""Deterministic number-format errors: mantissa truncation, fake quantization to MXFP4, NVFP4 and FP8, caches.

Pure tensor functions of float32, bfloat16 and float16 (truncation: float64 too). They return values of the number
format in the dtype of their input. Their gradient ignores the rounding (straight-through). They compute in float32 with
operations that IEEE 754 defines bit for bit, so all devices give the same result.

Elements of MXFP4 and NVFP4 are E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign (OCP Microscaling Formats v1.0, section
5.3.3), those of FP8 are E4M3 (torch.float8_e4m3fn). A block of neighbours along the last dimension, which a linear
layer contracts, shares one scale; FP8 has one for the whole tensor, or for blocks too.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from aqnpipe.config.noise import CacheFormat, NumberFormat
from aqnpipe.errors import ConfigError, ModelError

MANTISSA_BITS: dict[torch.dtype, int] = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Explicit mantissa bits of the formats that can be truncated."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
INT8_MAX = 127.0
MXFP4_BLOCK_SIZE = 32
NVFP4_BLOCK_SIZE = 16
FP8_BLOCK_SIZE = 128

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FAKE_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT32_EXPONENT = 0x7F800000
_E2M1_MAX_POWER_OF_TWO = 4.0
_E8M0_MIN = 2.0**-127
# An infinity's exponent field reads as 2^128; divided by 4 this is the largest scale.
_MXFP4_MAX_SCALE = 2.0**126
# Smallest tensor scale of NVFP4 whose reciprocal, divided by the smallest block scale (2^-6), is still finite.
_MIN_TENSOR_SCALE = 2.0**-121
_MIN_FP8_SCALE = 2.0**-126
_MIN_INT8_SCALE = 1e-6


def truncate_mantissa_(tensor: Tensor, mantissa_bits: int) -> Tensor:
    """Truncate toward zero in place: clear all but the `mantissa_bits` leading explicit mantissa bits; return `tensor`.

    A normal number with leading bit 2^e loses less than 2^(e - mantissa_bits). A subnormal keeps the leading bits of
    its field: it loses less than the smallest normal number would, and may become a zero of its sign. Infinities, NaN
    and the sign of zero stay. For autograd it is the identity. Raises ConfigError unless 0 <= mantissa_bits < the
    number of the dtype, ModelError for a dtype that is not in `MANTISSA_BITS`.
    """
    if tensor.dtype not in MANTISSA_BITS:
        raise ModelError(f"mantissa truncation of {tensor.dtype}, expected one of {_names(MANTISSA_BITS)}")
    own_bits = MANTISSA_BITS[tensor.dtype]
    if not 0 <= mantissa_bits < own_bits:
        raise ConfigError(
            f"mantissa_bits is {mantissa_bits}, expected 0 to {own_bits - 1} ({tensor.dtype} has {own_bits})"
        )
    values = tensor.detach()
    # A NaN whose set mantissa bits are all cleared would read as infinity.
    is_nan = values.isnan()
    values.view(_INTEGERS[tensor.dtype.itemsize]).bitwise_and_(-(1 << (own_bits - mantissa_bits)))
    values.masked_fill_(is_nan, torch.nan)
    return tensor


def round_to_e2m1(values: Tensor) -> Tensor:
    """Round float32 `values` to the nearest of +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, ties to even mantissa, beyond 6 to 6.

    Signs of zeros and NaN stay; infinities become 6. No gradient is defined.
    """
    # The format's spacing is 0.5 below 2, 1 below 4, 2 above. On each such grid an even multiple has an even mantissa.
    spacing = _power_of_two_below(values.abs().clamp_(1, E2M1_MAX)).mul_(0.5)
    return values.clamp(-E2M1_MAX, E2M1_MAX).div_(spacing).round_().mul_(spacing)


def fake_quantize(
    tensor: Tensor, number_format: NumberFormat, *, of_each_matrix: bool = False, is_weight: bool = False
) -> Tensor:
    """Round to `number_format` and back, in blocks along the last dimension. Straight-through gradient.

    `of_each_matrix`: what the format has once per tensor, each matrix of a batch [..., rows, columns] has. `is_weight`:
    the blocks are those of a weight, where the format has others for it. A last block with fewer elements has a scale
    of its own. Zeros keep their signs. Raises ModelError if the dtype is not supported.

    - mxfp4: E2M1 elements, blocks of 32 with a shared power-of-two scale, 2^(floor(log2(max|x|)) - 2), at least 2^-127
      (E8M0's smallest), so elements beyond 6 scales saturate (OCP Microscaling Formats v1.0, section 6.3). A NaN makes
      its block NaN; an infinity stays and gives its block the scale 2^126. Every result is exact in the dtype.
    - nvfp4: E2M1 elements, blocks of 16 with an E4M3 scale, a float32 scale for the whole tensor, max|tensor| / (448 *
      6), so it depends on the whole tensor of this call; a block's scale is max|block| / 6 in units of that, rounded to
      E4M3 and at least 2^-6 (its smallest normal number). A NaN or an infinity anywhere makes all of the tensor NaN.
    - fp8: E4M3 elements, a float32 scale for the whole tensor, max|tensor| / 448, at least 2^-126. A NaN or an infinity
      anywhere makes all of the tensor NaN. In a 16-bit dtype the product with the scale is rounded to that dtype.
    - fp8_block: as fp8, with a scale for every 128 neighbours along the last dimension, and for every 128 x 128
      elements of a weight, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
    """
    of_whole = (-3, -2, -1) if of_each_matrix else ()
    match number_format:
        case "mxfp4":
            return _StraightThrough.apply(tensor, _to_mxfp4, "MXFP4", MXFP4_BLOCK_SIZE)
        case "nvfp4":
            return _StraightThrough.apply(tensor, partial(_to_nvfp4, dim=of_whole), "NVFP4", NVFP4_BLOCK_SIZE)
        case "fp8":
            return _StraightThrough.apply(tensor, partial(_to_fp8, dim=of_whole), "FP8", 1)
        case "fp8_block":
            round_blocks = _to_fp8_tiles if is_weight else partial(_to_fp8, dim=(-1,))
            return _StraightThrough.apply(tensor, round_blocks, "FP8", FP8_BLOCK_SIZE)
        case _:
            expected = ", ".join(get_args(NumberFormat))
            raise ConfigError(f"unknown number format {number_format!r}, expected one of {expected}")


def round_as_cached(tensor: Tensor, number_format: CacheFormat) -> Tensor:
    """Round keys or values [..., tokens, channels] to the format of a cache and back. Straight-through gradient.

    fp8: E4M3 with scale 1, beyond 448 to 448; every result is exact in the dtype. int8: round(x / scale), ties away
    from 0, with a float32 scale for the channels of each token and head, max|x| / 127 and at least 1e-6; in a 16-bit
    dtype the product with the scale is rounded to that dtype. NaN stay, and make their int8 channels NaN. ModelError
    for other dtypes.
    """
    return _StraightThrough.apply(tensor, _CACHED[number_format], f"{number_format} cache", tensor.shape[-1])


class _StraightThrough(torch.autograd.Function):
    """Rounding of blocks along the last dimension, with the identity as gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, round_blocks: Callable[[Tensor], Tensor], name: str, block_size: int
    ) -> Tensor:
        if tensor.dtype not in _FAKE_QUANTIZED:
            raise ModelError(f"{name} quantization of {tensor.dtype}, expected one of {_names(_FAKE_QUANTIZED)}")
        if tensor.ndim == 0:
            raise ModelError(f"{name} quantization of a tensor without dimensions, expected blocks along its last one")
        if tensor.numel() == 0:
            return tensor.clone()
        width = tensor.shape[-1]
        padded = functional.pad(tensor.float(), (0, -width % block_size))
        rounded = round_blocks(padded.unflatten(-1, (-1, block_size))).flatten(-2)
        return rounded[..., :width].to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None


def _to_mxfp4(blocks: Tensor) -> Tensor:
    block_max = blocks.abs().amax(-1, keepdim=True)
    scale = _power_of_two_below(block_max).div_(_E2M1_MAX_POWER_OF_TWO).clamp_(_E8M0_MIN, _MXFP4_MAX_SCALE)
    scale = torch.where(block_max.isnan(), block_max, scale)
    return round_to_e2m1(blocks * scale.reciprocal()).mul_(scale)


def _to_nvfp4(blocks: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Round blocks [..., rows, blocks of a row, size]; `dim`: the dimensions that share the scale of a tensor."""
    block_max = blocks.abs().amax(-1, keepdim=True)
    tensor_scale = _divided(block_max.amax(dim, keepdim=True), E4M3_MAX * E2M1_MAX).clamp_min(_MIN_TENSOR_SCALE)
    block_scale = (_divided(block_max, E2M1_MAX) / tensor_scale).clamp(E4M3_MIN_NORMAL, E4M3_MAX)
    block_scale = block_scale.to(torch.float8_e4m3fn).float()
    # Products with the reciprocal, in this order, as in NVIDIA's kernels and torchao.
    elements = round_to_e2m1(blocks * (tensor_scale.reciprocal() / block_scale))
    return elements.mul_(tensor_scale * block_scale)


def _to_fp8_tiles(blocks: Tensor) -> Tensor:
    """Round blocks [..., rows, blocks of a row, size] with a scale for as many rows as a block has elements."""
    rows = blocks.shape[-3]
    padded = functional.pad(blocks, (0, 0, 0, 0, 0, -rows % FP8_BLOCK_SIZE))
    tiles = padded.unflatten(-3, (-1, FP8_BLOCK_SIZE))
    return _to_fp8(tiles, dim=(-3, -1)).flatten(-4, -3)[..., :rows, :, :]


def _to_fp8(blocks: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Round blocks [..., rows, blocks of a row, size]; `dim`: the dimensions that share a scale."""
    scale = _divided(blocks.abs().amax(dim, keepdim=True), E4M3_MAX).clamp_min(_MIN_FP8_SCALE)
    # Beyond 448 by a rounding of the scale, float8_e4m3fn would be NaN.
    elements = (blocks * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX)
    return elements.to(torch.float8_e4m3fn).float().mul_(scale)


def _to_cached_int8(blocks: Tensor) -> Tensor:
    """Round the channels of each token and head as vLLM's kernel for int8_per_token_head."""
    scale = _divided(blocks.abs().amax(-1, keepdim=True), INT8_MAX).clamp_min(_MIN_INT8_SCALE)
    scaled = blocks * scale.reciprocal()
    stored = (scaled + scaled.sign() * 0.5).clamp_(-INT8_MAX - 1, INT8_MAX).to(torch.int8)
    return stored.float().mul_(scale)


_CACHED: dict[CacheFormat, Callable[[Tensor], Tensor]] = {
    "fp8": lambda x: x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float(),
    "int8": _to_cached_int8,
}


def _power_of_two_below(magnitudes: Tensor) -> Tensor:
    """Return 2^floor(log2 x) of float32 `magnitudes` by their exponent field: 0 if subnormal, inf if not finite."""
    return (magnitudes.view(torch.int32) & _FLOAT32_EXPONENT).view(torch.float32)


def _divided(tensor: Tensor, divisor: float) -> Tensor:
    # By a tensor: torch on CUDA multiplies by the reciprocal of a Python number instead, which rounds differently.
    return tensor / torch.full_like(tensor, divisor)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
