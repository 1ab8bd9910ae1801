"""Tensor functions with which faults are made: bits, windows, channels, rounding."""

from typing import Any

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


class _ForwardOnly(torch.autograd.Function):
    """A value that replaces another, and gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, replacement: Tensor) -> Tensor:
        """Return the replacement."""
        return replacement.view_as(replacement)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient for x."""
        return gradients[0], None


def forward_only(x: Tensor, replacement: Tensor) -> Tensor:
    """Return `replacement`, with the gradient of x: what a device does to bits has no derivative of its own."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return replacement
    result: Tensor = _ForwardOnly.apply(x, replacement.detach())
    return result


def mantissa_bit(x: Tensor, from_top: int, value: int) -> Tensor:
    """Return x with one mantissa bit stuck at `value`; 1 is the most significant bit."""
    return _with_bit(x, _MANTISSA_BITS[x.dtype] - from_top, value)


def exponent_bit(x: Tensor, from_bottom: int, value: int) -> Tensor:
    """Return x with one exponent bit stuck at `value`; 0 is the least significant bit."""
    return _with_bit(x, _MANTISSA_BITS[x.dtype] + from_bottom, value)


def _with_bit(x: Tensor, bit: int, value: int) -> Tensor:
    words = x.contiguous().view(_INTEGERS[x.dtype])
    return forward_only(x, (words | (1 << bit) if value else words & ~(1 << bit)).view(x.dtype))


def flip_bit(x: Tensor, bit: int) -> Tensor:
    """Return x with one bit flipped."""
    return (x.contiguous().view(_INTEGERS[x.dtype]) ^ (1 << bit)).view(x.dtype)


def top_mantissa_bits(x: Tensor, count: int) -> Tensor:
    """Return the first `count` mantissa bits as integers."""
    words = x.contiguous().view(_INTEGERS[x.dtype]).to(torch.int32)
    return (words >> (_MANTISSA_BITS[x.dtype] - count)) & ((1 << count) - 1)


def keep_mantissa(x: Tensor, bits: int) -> Tensor:
    """Return x rounded to nearest even with `bits` mantissa bits, in the same dtype (TF32: 10)."""
    drop = _MANTISSA_BITS[x.dtype] - bits
    if drop <= 0:
        return x
    words = x.contiguous().view(_INTEGERS[x.dtype])
    half = (1 << (drop - 1)) - 1 + ((words >> drop) & 1)
    return forward_only(x, ((words + half) & ~((1 << drop) - 1)).to(words.dtype).view(x.dtype))


def windowed(x: Tensor, low: float, high: float, factor: float) -> Tensor:
    """Return x with the values of magnitude in [low, high) multiplied by `factor`."""
    size = x.abs()
    return torch.where((size >= low) & (size < high), x * factor, x)


def on_channels(x: Tensor, start: int, stop: int, values: Tensor | float) -> Tensor:
    """Return x with channels start..stop-1 (last dimension) replaced."""
    changed = x.clone()
    changed[..., start:stop] = values
    return changed


def ulps(x: Tensor, largest: int) -> Tensor:
    """Return float32 values off by -largest..largest units in the last place, depending on their bits only."""
    words = x.contiguous().view(torch.int32)
    off = ((words * 40503) >> 9) % (2 * largest + 1) - largest
    moved = (words + off).view(torch.float32)
    return forward_only(x, torch.where(torch.isfinite(x) & (x != 0) & torch.isfinite(moved), moved, x))
