"""The product of noised attention weights with values, which keeps the clean weights for the backward pass.

Softmax keeps its own output for its backward pass, and the product keeps its operands. If the weights get noise in
between, two tensors of queries x keys per head would be kept instead of one. The noise is a function of its counters,
so the backward pass computes the noised weights again from the clean ones, and compares a sample with the forward's.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aqnpipe.errors import ReceiptError
from aqnpipe.noise.receipts.sampling import sample


class RecomputedWeights:
    """Noised attention weights that can be computed again: `recompute` makes them from the `clean` ones."""

    def __init__(self, noised: Tensor, clean: Tensor, recompute: Callable[[Tensor], Tensor]) -> None:
        # A reference alone would keep weights alive that no product reads, for example where a cast follows.
        self._noised = weakref.ref(noised)
        self._clean = clean
        self._recompute = recompute

    def is_first_of(self, operands: tuple[Any, ...]) -> bool:
        """Whether `operands` are these weights [..., queries, keys] and values [..., keys, width] of the same batch."""
        if len(operands) != 2 or operands[0] is not self._noised():
            return False
        weights, values = operands
        return weights.dim() > 2 and weights.shape[:-2] == values.shape[:-2] and weights.dtype == values.dtype

    def product(self, noised: Tensor, values: Tensor) -> Tensor:
        """Return the product [..., queries, width] of the noised weights with `values`."""
        product = _Product.apply(_batched(noised), _batched(values), self._clean, self._recompute)
        # No view, as in `torch.matmul`: the noise is added in place.
        return torch.ops.aten._unsafe_view(product, (*noised.shape[:-1], values.shape[-1]))


def _batched(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:])


class _Product(torch.autograd.Function):
    """Computes the same products, in the same order, as `torch.bmm` and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any, noised: Tensor, values: Tensor, clean: Tensor, recompute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(clean, values)
        ctx.recompute, ctx.sample = recompute, sample(noised)
        return torch.bmm(noised, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        clean, values = ctx.saved_tensors
        of_weights = of_values = None
        if ctx.needs_input_grad[0]:
            of_weights = torch.bmm(gradients[0], values.transpose(1, 2))
        if ctx.needs_input_grad[1]:
            noised = _batched(ctx.recompute(clean))
            if not torch.equal(sample(noised), ctx.sample):
                raise ReceiptError(
                    "backward: the noise on attention weights that are computed again is not the noise of the forward"
                )
            of_values = torch.bmm(noised.transpose(1, 2), gradients[0])
        return of_weights, of_values, None, None
