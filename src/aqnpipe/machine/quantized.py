"""Operands of products with a weight, rounded to a 4-bit or 8-bit format as a device with such weights has them.

A weight is a parameter with two dimensions or more, or a view of one; a cast of one is a weight too. Blocks lie along
the dimension over which the forward pass sums. Autograd keeps the operands as they were, so a backward pass rounds them
again along the same dimension: weights are known, and other factors of such a product have a mark on their memory.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aqnpipe.config.noise import FakeQuantization
from aqnpipe.noise.kernels.quantization import fake_quantize

_SAMPLED_PER_DIM = 8


class _Cached(NamedTuple):
    version: int
    sample: Tensor
    quantized: Tensor


class QuantizedOperands:
    """Rounds operands. Weights are rounded again only when they change, where no gradients are computed."""

    def __init__(self) -> None:
        self._cached: list[weakref.ref[Any]] = []

    def of(
        self, error: FakeQuantization, first: Tensor, second: Tensor, is_gradient: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Return the operands of a product with a weight as `error` requests them; None for other products."""
        weights = [is_weight(first), is_weight(second)]
        operands = zip((first, second), weights, strict=True)
        factors = [not weight and (not is_gradient or _is_marked(operand)) for operand, weight in operands]
        if not any(weights) and not (is_gradient and any(factors)):
            return None
        found = []
        for operand, weight, factor, is_first in zip((first, second), weights, factors, (True, False), strict=True):
            # A forward pass sums over the last dimension of the first factor, and over the rows of the second.
            dim = operand.dim() - (1 if is_first != is_gradient or operand.dim() == 1 else 2)
            if weight and error.weights:
                operand = self._weight(error, operand, dim, is_cached=not is_gradient and not torch.is_grad_enabled())
            elif factor and error.activations:
                if not is_gradient and torch.is_grad_enabled():
                    operand.untyped_storage()._aqnpipe_factor = True  # type: ignore[attr-defined]
                operand = _rounded(error, operand, dim, 0, is_weight=False)
            found.append(operand)
        return found[0], found[1]

    def close(self) -> None:
        """Forget rounded weights."""
        for reference in self._cached:
            if (storage := reference()) is not None:
                del storage._aqnpipe_quantized
        self._cached.clear()

    def _weight(self, error: FakeQuantization, weight: Tensor, dim: int, *, is_cached: bool) -> Tensor:
        batch = weight.dim() - 2
        if not is_cached:
            return _rounded(error, weight, dim, batch, is_weight=True)
        storage: Any = weight.untyped_storage()
        views: dict[Any, _Cached] | None = getattr(storage, "_aqnpipe_quantized", None)
        if views is None:
            views = storage._aqnpipe_quantized = {}
            self._cached.append(weakref.ref(storage))
        view = (weight.shape, weight.stride(), weight.storage_offset(), dim, error.format)
        version, now = 0 if weight.is_inference() else weight._version, _sample(weight)
        cached = views.get(view)
        # Changes through `weight.data` leave the version as it is, but not a sample of the values.
        if cached is None or cached.version != version or not torch.equal(cached.sample, now):
            cached = views[view] = _Cached(version, now, _rounded(error, weight, dim, batch, is_weight=True))
        return cached.quantized


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight, a view of one, or a cast of one."""
    base = tensor if tensor._base is None else tensor._base
    is_parameter = isinstance(base, nn.Parameter) or hasattr(tensor.untyped_storage(), "_aqnpipe_weight")
    return is_parameter and tensor.dim() > 1


def mark_weights(module: nn.Module) -> None:
    """Mark the memory of the weights of a module: in inference mode views do not lead to their parameter."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.untyped_storage()._aqnpipe_weight = True  # type: ignore[attr-defined]


def mark_cast(weight: Tensor, cast: Tensor) -> None:
    """Note that `cast` is a weight in another number format."""
    if cast is not weight and is_weight(weight):
        cast.untyped_storage()._aqnpipe_weight = True  # type: ignore[attr-defined]


def _is_marked(tensor: Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), "_aqnpipe_factor")


def _sample(weight: Tensor) -> Tensor:
    return weight.detach()[tuple(slice(None, None, -(-size // _SAMPLED_PER_DIM)) for size in weight.shape)].clone()


def _rounded(error: FakeQuantization, tensor: Tensor, dim: int, batch: int, *, is_weight: bool) -> Tensor:
    """Round blocks along `dim`; each matrix of the first `batch` dimensions by itself."""
    rows = [axis for axis in range(batch, tensor.dim()) if axis != dim]
    order = [*range(batch), *rows, dim]
    turned = tensor.detach().permute(order)
    blocks = turned.reshape(turned.shape[:batch].numel(), -1 if tensor.numel() else 0, turned.shape[-1])
    quantized = fake_quantize(blocks, error.format, of_each_matrix=True, is_weight=is_weight).reshape(turned.shape)
    return quantized.permute([order.index(axis) for axis in range(tensor.dim())])
