"""Arithmetic that torch allows a device: narrower products of float32 numbers, sums in another order in every call."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_ALLOWED_BITS = {"highest": 24, "high": 11, "medium": 8}
"""Bits of float32 operands that products keep, by torch.get_float32_matmul_precision: IEEE, TF32, bfloat16."""


def operand_bits(dtype: torch.dtype) -> int:
    """Return the significant bits that products of `dtype` must keep under the settings of torch."""
    bits = _SIGNIFICANT_BITS.get(dtype, 24)
    return min(bits, _ALLOWED_BITS[torch.get_float32_matmul_precision()]) if dtype == torch.float32 else bits


@contextmanager
def determinism_requested() -> Iterator[None]:
    """Ask torch for deterministic algorithms in the body; operations without one run as they are, without a warning."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
