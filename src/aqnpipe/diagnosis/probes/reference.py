"""Common parts of known answers that are computed in float64 on the host: operands, and roundings of devices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FLOAT32_EPS = 2.0**-23
"""Normalisations, softmax and sums of 16-bit models are computed in float32."""

PRODUCT_BITS = 11
"""Significant bits of operands whose product is exact in float32, also after rounding to TF32."""

LEAST_ROWS = 513
"""More rows than a large tile of matrix units has; a fault of the rows behind them shows in no smaller batch."""

FEW_ROWS = (1, 4, 8)
"""Rows of a decode of one to eight sequences; kernels are chosen by their number."""

_MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_ALLOWED_BITS = {"highest": 24, "high": 11, "medium": 8}
"""Bits of float32 operands that products keep, by torch.get_float32_matmul_precision: IEEE, TF32, bfloat16."""


@contextmanager
def on_host() -> Iterator[None]:
    """Run the body without function modes of torch, for references within the forward of a module.

    A default device (`torch.set_default_device`) is such a mode and would take a reference to the device under test.
    """
    with torch._C.DisableTorchFunction():
        yield


def opening_of(dtype: torch.dtype) -> float:
    """Return a gate at which silu and gelu return their input exactly, because the sigmoid rounds to 1 in `dtype`."""
    return 16.0 if dtype == torch.float16 else 128.0


def gradients_of(run: Callable[[], Tensor], leaves: Sequence[Tensor], given: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of `leaves` for the gradient `given` of the output of `run`; None where a graph is cut.

    The graph is kept, because a hook that keeps earlier outputs may have made it a part of a later one.
    """
    with torch.enable_grad():
        output = run()
        if not output.requires_grad:
            return (None,) * len(leaves)
        return torch.autograd.grad(output, leaves, given.to(output), retain_graph=True, allow_unused=True)


def mantissa_bits(dtype: torch.dtype) -> int:
    """Return the significant bits of `dtype`, with the leading one."""
    return _MANTISSA_BITS[dtype]


def full_mantissas(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Return signed numbers with `bits` random significant bits, magnitudes in [1, 2), float64 on the CPU."""
    low = 2 ** (bits - 1)
    drawn = torch.randint(-low, low, shape, generator=generator).double()
    return torch.where(drawn < 0, drawn + (1 - low), drawn + low) / low


def operand_bits(dtype: torch.dtype) -> int:
    """Return the significant bits that products of `dtype` must keep under the settings of torch."""
    bits = _MANTISSA_BITS.get(dtype, 24)
    return min(bits, _ALLOWED_BITS[torch.get_float32_matmul_precision()]) if dtype == torch.float32 else bits


@contextmanager
def substituted(replacements: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace the data of each parameter by its tensor while the body runs.

    Only the reference to the storage is exchanged. The original values are never written, so no exception or interrupt
    can leave them changed, and the only extra memory is that of the test tensors.
    """
    pairs = list(replacements)
    own = [(parameter, parameter.data) for parameter, _ in pairs]
    try:
        for parameter, tensor in pairs:
            parameter.data = tensor
        yield
    finally:
        for parameter, tensor in own:
            parameter.data = tensor


def zero_bias(module: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the replacement of the bias of a linear by zeros, if it has one."""
    if module.bias is not None:
        yield module.bias, torch.zeros_like(module.bias)
