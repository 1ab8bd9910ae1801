"""Forward error bounds: how far two correct computations of one sum may be from each other.

A device chooses the order of a sum: split-K, stream-K and atomics add the same products in another order, possibly a
different one in every call. With unit roundoff u, a sum of n terms in any order is within gamma_n * sum |x||w| of the
exact one, gamma_n = n*u / (1 - n*u) (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5 and
section 4.2). Devices add products of 16-bit numbers in float32, and kernels that split a sum may round its parts to
16 bits (torch allows it by default: `allow_bf16_reduced_precision_reduction`). The bound therefore has one rounding of
sum |x||w| to the dtype, which covers the roundings of the parts, and one of the result.
"""

import torch
from torch import Tensor

FLOAT32_ROUNDOFF = 2.0**-24
"""Unit roundoff of the accumulators."""

TWO_ROUNDINGS = 1.0625
"""Two roundings to a dtype, half an epsilon each, and 1/16 for the terms of second order."""


def gamma(num_terms: int, roundoff: float = FLOAT32_ROUNDOFF) -> float:
    """Return n*u / (1 - n*u), the relative error bound of a sum of `num_terms` terms in any order."""
    total = num_terms * roundoff
    if total >= 1:
        raise ValueError(f"no bound for {num_terms} terms of roundoff {roundoff:g}, expected n*u < 1")
    return total / (1 - total)


def sum_bound(magnitudes: Tensor, num_terms: int, dtype: torch.dtype) -> Tensor:
    """Return how far one correct result of `dtype` may be from the exact sum, float64 in the shape of `magnitudes`.

    `magnitudes`: sum |x||w| of every element. The result itself is no larger, so its rounding is included.
    """
    parts = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    result = torch.finfo(dtype).eps / 2
    return magnitudes.double() * (gamma(num_terms) + parts + result) + torch.finfo(dtype).tiny


def linear_bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `sum_bound` of a linear of `x` [..., in] and `weight` [out, in]; one product of the magnitudes."""
    constant = None if bias is None else bias.abs().float()
    magnitudes = torch.nn.functional.linear(x.abs().float(), weight.abs().float(), constant)
    return sum_bound(magnitudes.cpu(), weight.shape[-1] + 1, x.dtype)


def few_roundings(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the deviation allowed for a norm or a core with a known answer, float64 in the shape of `expected`.

    In float32 units of 2^-24: division by the number of channels and epsilon (1 each, halved by the root), a reciprocal
    root or exponential and a reciprocal (2 each), two products (1 each): 7, which 4 epsilon (8 units) bound. In 16 bits
    the normalised value and its product with the gain are rounded too: one epsilon of the dtype, and 1/16 for the terms
    of second order.
    """
    own = 0.0 if dtype not in (torch.bfloat16, torch.float16) else TWO_ROUNDINGS * torch.finfo(dtype).eps
    return expected.detach().cpu().double().abs() * (4 * 2.0**-23 + own) + torch.finfo(dtype).tiny
