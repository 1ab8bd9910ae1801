"""Common parts of known answers that are computed in float64 on the host: operands, and roundings of devices."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

FLOAT32_EPS = 2.0**-23
"""Normalisations, softmax and sums of 16-bit models are computed in float32."""

PRODUCT_BITS = 11
"""Significant bits of operands whose product is exact in float32, also after rounding to TF32."""

LEAST_ROWS = 513
"""More rows than a large tile of matrix units has; a fault of the rows behind them shows in no smaller batch."""

FEW_ROWS = (1, 4, 8)
"""Rows of a decode of one to eight sequences; kernels are chosen by their number."""

_MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


@contextmanager
def on_host() -> Iterator[None]:
    """Run the body without function modes of torch, for references within the forward of a module.

    A default device (`torch.set_default_device`) is such a mode and would take a reference to the device under test.
    """
    with torch._C.DisableTorchFunction():
        yield


def mantissa_bits(dtype: torch.dtype) -> int:
    """Return the significant bits of `dtype`, with the leading one."""
    return _MANTISSA_BITS[dtype]


def full_mantissas(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Return signed numbers with `bits` random significant bits, magnitudes in [1, 2), float64 on the CPU."""
    low = 2 ** (bits - 1)
    values = torch.randint(low, 2 * low, shape, generator=generator).double() / low
    return values * (1 - 2 * torch.randint(0, 2, shape, generator=generator).double())
