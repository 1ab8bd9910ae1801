"""Matrix product with its relative error added to the accumulator, before the single rounding: no extra memory pass.

Elements are numbered as in the finished product, so a key draws the same z here and in `add_relative_gaussian_`; only
the rounding between product and noise is omitted. Each element computes its own Philox block, four times the work of
the separate kernel, because a tile rarely contains whole groups of 1,024. The injection does not call it:
docs/decisions/0004-noise-from-counters.md lists the measurements needed first.
"""

# Triton compiles the annotations of a kernel too, so kernels have none but constexpr, written as Triton's users do.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from aqnpipe.errors import AqnpipeError
from aqnpipe.noise.kernels.gaussian import GROUP, NoiseStream
from aqnpipe.noise.kernels.gaussian_cuda import philox, polar, sin_pi

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_GROUP = tl.constexpr(GROUP)
_QUARTER = tl.constexpr(GROUP // 4)


def _config(block_m: int, block_n: int, block_k: int, num_stages: int, num_warps: int) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "BAND": 8}
    return triton.Config(blocks, num_stages=num_stages, num_warps=num_warps)


CONFIGS = [
    _config(128, 128, 64, num_stages=3, num_warps=8),
    _config(128, 64, 64, num_stages=3, num_warps=8),
    _config(64, 128, 64, num_stages=3, num_warps=8),
    _config(64, 64, 64, num_stages=4, num_warps=4),
    _config(128, 64, 64, num_stages=4, num_warps=4),
    _config(16, 64, 128, num_stages=4, num_warps=4),
    _config(32, 32, 32, num_stages=3, num_warps=4),
]
"""Tiles for prefill and training down to decode, within an A100's shared memory (163 KiB); the last suits float32."""


def matmul_with_relative_error(a: Tensor, b: Tensor, scale: float, source: NoiseStream) -> Tensor:
    """Return `(a @ b) * (1 + scale*z)` in the dtype of the operands, accumulated and noised in float32, rounded once.

    `a` is (m, k), `b` (k, n), of any strides (`weight.t()` is fine) and one of `DTYPES`; float32 is multiplied as IEEE
    float32, not TF32. The result carries no gradient. The first product of a new shape is tuned, which a CUDA graph
    cannot capture. Raises AqnpipeError for other dtypes, ValueError for shapes that do not fit and for a result of 2^32
    elements or more, whose numbers leave 32 bits.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.device != b.device:
        raise ValueError(f"cannot multiply {tuple(a.shape)} on {a.device} and {tuple(b.shape)} on {b.device}")
    if a.dtype != b.dtype or a.dtype not in DTYPES:
        raise AqnpipeError(f"noisy product of {a.dtype} and {b.dtype}: expected two of {', '.join(map(str, DTYPES))}")
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    if m * n >= 1 << 32:
        raise ValueError(f"a product of {m} x {n} elements: 2^32 or more cannot be numbered")
    out = torch.empty((m, n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out

    def grid(tile: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)

    with torch.cuda.device_of(a):
        _matmul_kernel[grid](
            a, b, out, m, n, k, triton.next_power_of_2(m), *a.stride(), *b.stride(),
            scale, source.key, source.call, source.stream,
        )  # fmt: skip
    return out


# `rows` is m rounded up to a power of two, so that a new prompt length is not tuned anew.
@triton.autotune(configs=CONFIGS, key=["rows", "n", "k"])
@triton.jit(do_not_specialize=["rows", "key", "call", "stream"])
def _matmul_kernel(
    a,
    b,
    out,
    m,
    n,
    k,
    rows,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    scale,
    key,
    call,
    stream,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    row_tile, column_tile = _tile_of_program(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), BAND)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows of a large activation lie further apart than an int32 reaches.
    a_pointers = a + row[:, None].to(tl.int64) * stride_am + inner[None, :] * stride_ak
    b_pointers = b + inner[:, None] * stride_bk + column[None, :].to(tl.int64) * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        known = inner < k - start
        a_tile = tl.load(a_pointers, mask=(row < m)[:, None] & known[None, :], other=0.0)
        b_tile = tl.load(b_pointers, mask=known[:, None] & (column < n)[None, :], other=0.0)
        accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K * stride_ak
        b_pointers += BLOCK_K * stride_bk
    element = row[:, None].to(tl.uint32) * n + column[None, :].to(tl.uint32)
    noised = accumulator * (1.0 + scale * _normal_of_element(element, key, call, stream))
    out_pointers = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(out_pointers, noised.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def _normal_of_element(element, key, call, stream):
    """Return the normal of each single element (uint32, any shape): four times the Philox work of whole groups."""
    w0, w1, w2, w3 = philox(element // _GROUP * _QUARTER + element % _QUARTER, key, call, stream)
    quarter = element // _QUARTER % 4
    second_pair = quarter >= 2
    radius, cosine_angle, sine_angle = polar(tl.where(second_pair, w2, w0), tl.where(second_pair, w3, w1))
    is_sine = quarter % 2 == 1
    return radius * sin_pi(tl.where(is_sine, sine_angle, cosine_angle))


@triton.jit
def _tile_of_program(program, row_tiles, column_tiles, BAND: tl.constexpr):
    """Order the tiles in bands of BAND rows, whose operands stay in the L2 cache."""
    band = program // (BAND * column_tiles)
    rows_in_band = min(row_tiles - band * BAND, BAND)
    within = program % (BAND * column_tiles)
    return band * BAND + within % rows_in_band, within // rows_in_band
