"""Noise on one operator: tensor in, tensor out. Which torch functions count as operators, and how each is noised."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aqnpipe.config.noise import OperatorSet

TorchFunction = Callable[..., Any]

_LINEAR: dict[TorchFunction, str] = {F.linear: "linear"}
_MATMUL: dict[TorchFunction, str] = {
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    Tensor.__rmatmul__: "matmul",
    torch.mm: "matmul",
    Tensor.mm: "matmul",
    torch.einsum: "matmul",
    torch.bmm: "bmm",
    Tensor.bmm: "bmm",
}
_ELEMENTWISE: dict[TorchFunction, str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
    F.softmax: "softmax",
    torch.softmax: "softmax",
    Tensor.softmax: "softmax",
}

_CPU_BLOCK_ELEMENTS = 1 << 16

ESCAPING: dict[TorchFunction, str] = {
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    torch.addmm: "addmm",
    Tensor.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    Tensor.baddbmm: "baddbmm",
}
"""Functions that hold a matrix product inside, where noise on the product alone cannot be placed."""


def noised_functions(operators: OperatorSet) -> dict[TorchFunction, str]:
    """Return the torch functions of an operator set, each with the operator name that receipts use.

    RMSNorm is not among them: transformers writes it out as pow/mean/rsqrt, so "all" reaches it by module.
    """
    matmul = {**_LINEAR, **_MATMUL}
    return matmul if operators == "matmul" else {**matmul, **_ELEMENTWISE}


def add_relative_error_(output: Tensor, relative_scale: float, generator: torch.Generator) -> Tensor:
    """Scale `output` in place by `1 + s*z`, z ~ N(0, 1) per element; equal to `y + s*|y|*z` in distribution.

    Low-precision tensors are multiplied in float32 and rounded once, as an error of the hardware would be.
    """
    # On CPU one block of factors stays in the cache and is drawn anew for every block of the output. A device with
    # launch costs gets the whole tensor at once.
    whole = output.device.type != "cpu" or not output.is_contiguous()
    blocks = [output] if whole else output.view(-1).split(_CPU_BLOCK_ELEMENTS)
    dtype = torch.float32 if output.dtype.itemsize < 4 else output.dtype
    factors = torch.empty_like(blocks[0], dtype=dtype)
    for block in blocks:
        factor = factors if whole else factors[: block.numel()]
        factor.normal_(generator=generator).mul_(relative_scale).add_(1)
        if dtype == output.dtype:
            block.mul_(factor)
        else:
            block.copy_(factor.mul_(block))
    return output


def renormalise(probabilities: Tensor, dim: int) -> Tensor:
    """Return noised probabilities as a distribution again: no negative entry, sum 1 along `dim`."""
    positive = probabilities.clamp_min(0)
    return positive / positive.sum(dim, keepdim=True)


class RelativeError(torch.autograd.Function):
    """In-place forward error whose gradient ignores it (straight through), as in the seeds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, add_error_: Callable[[Tensor], None]) -> Tensor:
        """Apply `add_error_` to `output` in place."""
        ctx.mark_dirty(output)
        add_error_(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient through unchanged."""
        return gradients[0], None


class GradientError(torch.autograd.Function):
    """Identity whose gradient gets an error: placed on an operand, it noises that operand's exact gradient."""

    @staticmethod
    def forward(ctx: Any, operand: Tensor, add_error_: Callable[[Tensor], None]) -> Tensor:
        """Return `operand` unchanged and remember the error for the way back."""
        ctx.add_error_ = add_error_
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Add the error to the operator's own gradient of this operand."""
        # The operator behind this node made the gradient for it alone, so it may be changed in place; expanded
        # gradients share memory between elements and must be copied first.
        gradient = gradients[0].contiguous()
        ctx.add_error_(gradient)
        return gradient, None
