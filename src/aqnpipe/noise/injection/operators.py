"""The torch functions that count as operators, and two functions that noise on them needs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aqnpipe.config.noise import OperatorNoise

TorchFunction = Callable[..., Any]
AddError = Callable[[int, Tensor], None]

_PRODUCTS: dict[TorchFunction, str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    Tensor.__rmatmul__: "matmul",
    torch.mm: "matmul",
    Tensor.mm: "matmul",
    torch.einsum: "matmul",
    torch.bmm: "bmm",
    Tensor.bmm: "bmm",
    torch.addmm: "addmm",
    Tensor.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    Tensor.baddbmm: "baddbmm",
    F.grouped_mm: "grouped_mm",
    torch._grouped_mm: "grouped_mm",
}
_ELEMENTWISE: dict[TorchFunction, str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
    F.softmax: "softmax",
    torch.softmax: "softmax",
    Tensor.softmax: "softmax",
}
_ATTENTION: dict[TorchFunction, str] = {F.scaled_dot_product_attention: "scaled_dot_product_attention"}
PRODUCT_OF_SUM: dict[str, TorchFunction] = {"addmm": torch.mm, "baddbmm": torch.bmm}
"""The product inside operators that add a tensor to it. The noise belongs to the product alone."""

KEEPS_ITS_OUTPUT = frozenset({"softmax", "scaled_dot_product_attention"})
"""Operators whose backward pass uses their own output. It must stay unchanged, so the noise is added to a copy."""


def noised_functions(noise: OperatorNoise) -> dict[TorchFunction, str]:
    """Return the torch functions with noise, and for each the operator name used in receipts.

    RMSNorm is not among them: transformers computes it from pow, mean and rsqrt, so "all" adds its noise by module.
    """
    functions = dict(_PRODUCTS)
    if noise.operators == "all":
        functions |= _ELEMENTWISE
    if noise.attention == "fused":
        functions |= _ATTENTION
    return functions


def escaping_functions(noise: OperatorNoise) -> dict[TorchFunction, str]:
    """Return fused functions with a matrix product inside, where `noise` cannot be put on the product alone."""
    return {} if noise.attention == "fused" else _ATTENTION


def is_contraction(function: TorchFunction, args: tuple[Any, ...]) -> bool:
    """Return whether a call of an operator multiplies operands and sums over an index; an einsum need not.

    `einsum("ij->ji", x)` is a view of its operand, `einsum("i,j->ij", x, y)` multiplies elements.
    """
    return function is not torch.einsum or bool(set().union(*contracted_indices(args[0])))


def contracted_indices(equation: str) -> list[str]:
    """Return, per operand of an einsum, its indices in order that other operands have too and that are summed over.

    An ellipsis counts as one index, written as a point.
    """
    operands, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    terms = operands.split(",")
    if not arrow:
        output = "." + "".join(index for index in operands if operands.count(index) == 1)
    return [
        "".join(index for index in term if index not in output and sum(index in other for other in terms) > 1)
        for term in terms
    ]


def linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (input, weight, bias) of a call of `F.linear`."""
    return input, weight, bias


def sum_arguments(
    input: Tensor,
    *products: Tensor,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    **named: Tensor,
) -> tuple[Tensor, Tensor, Tensor, float, float, Tensor | None]:
    """Return (added, first factor, second factor, beta, alpha, out); the factors may be named, by number."""
    first, second = (*products, *(named[name] for name in sorted(named)))
    return input, first, second, beta, alpha, out


def straight_through(clean: Tensor, noised: Tensor) -> Tensor:
    """Return `noised` itself, with the gradient of `clean`. Nothing is saved for the backward pass."""
    return _StraightThrough.apply(clean, noised) if clean.requires_grad else noised


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, clean: Tensor, noised: Tensor) -> Tensor:
        ctx.mark_dirty(noised)
        return noised

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class GradientError(torch.autograd.Function):
    """Identity on operands that adds an error to their exact gradients; it saves no tensor for the backward pass."""

    @staticmethod
    def forward(ctx: Any, add_error_: AddError, *operands: Tensor) -> tuple[Tensor, ...]:
        """Return `operands` unchanged; the backward pass calls `add_error_(i, gradient)` for operand i."""
        ctx.add_error_ = add_error_
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Add the error to the operator's own gradients of these operands."""
        # The operator made these gradients for this node alone, so they may be changed in place. Expanded gradients
        # share memory between elements and are copied first.
        dense = [gradient.contiguous() for gradient in gradients]
        for position, gradient in enumerate(dense):
            ctx.add_error_(position, gradient)
        return (None, *dense)
