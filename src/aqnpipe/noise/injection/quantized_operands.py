"""Quantizes the operands of products with a weight, as a device with 4-bit weights does; other products stay exact.

A weight is the second operand of a linear function, or a parameter with two dimensions or more, or a view of one: the
matrices of experts are slices or transposed views of a single parameter. Products of two activations, such as those of
attention, have no weight. Blocks lie along the dimension over which the product sums, whatever the parameter's layout.

A copy of a parameter, such as experts selected by an index, cannot be recognised here. The audit follows copies, and
refuses a product that reads one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from aqnpipe.config.noise import FakeQuantization
from aqnpipe.noise.injection.operators import TorchFunction, contracted_indices, linear_arguments, sum_arguments
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.kernels.quantization import fake_quantize
from aqnpipe.noise.receipts.sampling import sample

_FIRST, _SECOND = ("input", "mat_a"), ("other", "mat2", "mat_b")
"""Names of the operands of the products that are neither linear, sums nor einsums."""


@dataclass(frozen=True)
class _Factor:
    """An operand of a product; the product sums over its dimensions `contracted` and computes each of `batch` alone."""

    tensor: Tensor
    contracted: tuple[int, ...]
    batch: tuple[int, ...] = ()


@dataclass(frozen=True)
class _CachedWeight:
    version: int
    sample: Tensor
    quantized: Tensor


class QuantizedOperands:
    """The quantized operands of one phase. Without gradients, weights are quantized again only when they change."""

    def __init__(self, state: PhaseState) -> None:
        self._state = state
        # By parameter and view. Weak: offloaded and sharded weights are other tensors in every pass.
        self._cache = WeakTensorKeyDictionary()

    def call(
        self, operator: str, function: TorchFunction, error: FakeQuantization, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run `function`; if one of its operands is a weight, with operands quantized as `error` requests."""
        if operator == "scaled_dot_product_attention":
            return function(*args, **kwargs)
        factors, product = _factors(operator, function, args, kwargs)
        are_weights = [_parameter(factor.tensor) is not None for factor in factors]
        if operator == "linear":
            are_weights = [False, True]
        if not any(are_weights):
            return function(*args, **kwargs)
        used = []
        for factor, is_weight in zip(factors, are_weights, strict=True):
            tensor = factor.tensor
            if is_weight and error.weights:
                tensor = self._weight(operator, error, factor)
            elif not is_weight and error.activations:
                # The scale of an NVFP4 tensor belongs to all of an activation.
                tensor = self._rounded(f"{operator}.activation", error, _Factor(tensor, factor.contracted))
            used.append(tensor)
        self._state.place.is_noised = True
        return product(*used)

    def _weight(self, operator: str, error: FakeQuantization, factor: _Factor) -> Tensor:
        name, weight = f"{operator}.weight", factor.tensor
        parameter = _parameter(weight)
        if torch.is_grad_enabled() or parameter is None:
            return self._rounded(name, error, factor)
        # A rollout uses each weight once per token.
        views = self._cache.setdefault(parameter, {})
        view = (weight.shape, weight.stride(), weight.storage_offset(), factor.contracted, factor.batch)
        version = 0 if parameter.is_inference() else parameter._version
        cached, now = views.get(view), sample(weight)
        # Changes through `weight.data` leave the version as it is, but not a sample of the values.
        if cached is None or cached.version != version or not torch.equal(cached.sample, now):
            cached = views[view] = _CachedWeight(version, now, self._rounded(name, error, factor))
        elif self._state.audit.observer is not None:
            self._state.audit.observer.note_quantized()
        return cast(Tensor, cached.quantized)

    def _rounded(self, operand: str, error: FakeQuantization, factor: _Factor) -> Tensor:
        quantized = _quantized(factor, error)
        state = self._state
        cell = (state.phase, operand, state.place.layer)
        if state.audit.observer is not None:
            state.audit.observer.note_quantized()
        if not state.recomputing:
            state.recorder.count_call(*cell, error, quantized.numel())
            state.recorder.measure(*cell, sample(factor.tensor), sample(quantized))
        return quantized


def _quantized(factor: _Factor, error: FakeQuantization) -> Tensor:
    """Return `factor` in blocks along what the product sums over, with an NVFP4 scale for each matrix of a batch."""
    tensor = factor.tensor
    if not factor.batch and factor.contracted == (tensor.ndim - 1,):
        return fake_quantize(tensor, error.format)
    rows = [dim for dim in range(tensor.ndim) if dim not in factor.batch + factor.contracted]
    order = [*factor.batch, *rows, *factor.contracted]
    turned = tensor.permute(order)
    sizes = [turned.shape[: len(factor.batch)], turned.shape[tensor.ndim - len(factor.contracted) :]]
    blocks = turned.reshape(sizes[0].numel(), -1 if tensor.numel() else 0, sizes[1].numel())
    quantized = fake_quantize(blocks, error.format, of_each_matrix=True).reshape(turned.shape)
    return quantized.permute([order.index(dim) for dim in range(tensor.ndim)])


def _parameter(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that `tensor` is or shows, if it is a matrix or several; else None."""
    base = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    return base if isinstance(base, nn.Parameter) and tensor.ndim > 1 else None


def _factors(
    operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]
) -> tuple[list[_Factor], Callable[..., Any]]:
    """Return the factors of a product, and a function that computes it from other values of them."""
    if function is torch.einsum:
        operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
        return list(_einsum_factors(args[0], operands)), lambda *values: torch.einsum(args[0], *values)
    if operator == "linear":
        inputs, weight, bias = linear_arguments(*args, **kwargs)
        factors = [_Factor(tensor, (tensor.ndim - 1,)) for tensor in (inputs, weight)]
        return factors, lambda *values: function(*values, bias)
    if operator in ("addmm", "baddbmm"):
        added, first, second, beta, alpha, out = sum_arguments(*args, **kwargs)
        sums = getattr(torch, operator)
        return _pair(first, second), lambda *values: sums(added, *values, beta=beta, alpha=alpha, out=out)
    if function is Tensor.__rmatmul__:
        return _factors(operator, torch.matmul, (args[1], args[0]), {})
    named = [name for name in (*_FIRST, *_SECOND) if name in kwargs]
    others = {name: value for name, value in kwargs.items() if name not in named}
    first, second = [*args, *(kwargs[name] for name in named)][:2]
    return _pair(first, second), lambda *values: function(*values, *args[2:], **others)


def _pair(first: Tensor, second: Tensor) -> list[_Factor]:
    """Return the factors of a matrix product, whose leading dimensions are a batch of matrices."""
    row = max(second.ndim - 2, 0)
    return [
        _Factor(first, (first.ndim - 1,), tuple(range(first.ndim - 2))),
        _Factor(second, (row,), tuple(range(second.ndim - 2))),
    ]


def _einsum_factors(equation: str, operands: Sequence[Tensor]) -> Iterator[_Factor]:
    terms = equation.replace(" ", "").replace("...", ".").partition("->")[0].split(",")
    for term, contracted, tensor in zip(terms, contracted_indices(equation), operands, strict=True):
        dims: dict[str, tuple[int, ...]] = {}
        remaining = list(range(tensor.ndim))
        for index in term:
            # An ellipsis stands for the dimensions that have no letter.
            width = tensor.ndim - len(term.replace(".", "")) if index == "." else 1
            dims[index], remaining = tuple(remaining[:width]), remaining[width:]
        batch = [index for index in dims if index not in contracted and sum(index in other for other in terms) > 1]
        yield _Factor(
            tensor, *(tuple(dim for index in chosen for dim in dims[index]) for chosen in (contracted, batch))
        )
