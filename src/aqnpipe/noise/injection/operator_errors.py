"""Runs an operator of a noised layer, with an error on its output and on the gradients of its operands."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from aqnpipe.config.measured_noise import LayerErrors, OperatorError
from aqnpipe.config.noise import FakeQuantization, OutputErrorModel
from aqnpipe.errors import ModelError
from aqnpipe.noise.injection.measured_operators import MeasuredOperators
from aqnpipe.noise.injection.operators import (
    KEEPS_ITS_OUTPUT,
    PRODUCT_OF_SUM,
    GradientError,
    TorchFunction,
    is_contraction,
    linear_arguments,
    straight_through,
    sum_arguments,
)
from aqnpipe.noise.injection.phase_state import PhaseState
from aqnpipe.noise.injection.quantized_operands import QuantizedOperands
from aqnpipe.noise.injection.recomputed_weights import RecomputedWeights
from aqnpipe.noise.kernels.error_models import apply_error_, renormalise
from aqnpipe.noise.kernels.measured import root_mean_squares
from aqnpipe.noise.kernels.stream import NoiseStream

# Stream numbers under one layer's key: outputs of operators, gradients of operands. Other parts use other numbers.
_OUTPUT, _FIRST_GRADIENT = 0, 1

_NO_OPERANDS = ("attn_mask", "out")


class OperatorErrors:
    """The errors of operators in one phase; `noises_gradients` adds those of the backward pass."""

    def __init__(self, state: PhaseState, noises_gradients: bool) -> None:
        self._state = state
        self._noises_gradients = noises_gradients
        self._quantized = QuantizedOperands(state)
        self._softmax: RecomputedWeights | None = None
        self._measured = MeasuredOperators(state)

    def call(self, operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run `function` with the current layer's error on its output, and on its operands' gradients if requested."""
        if not is_contraction(function, args):
            # Its output may be a view of an operand, which noise in place would change for good.
            return function(*args, **kwargs)
        observer = self._state.audit.observer
        if observer is None:
            return self._call(operator, function, args, kwargs)
        with observer.noised_call(self._state.place.error):
            return self._call(operator, function, args, kwargs)

    def _call(self, operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]) -> Any:
        error = self._state.place.error
        if error is None:
            raise RuntimeError("an operator was called outside a noised layer; this is a bug")
        # Exact type: isinstance on a pydantic class is slow (its metaclass overrides it), and this runs per operator.
        if type(error) is FakeQuantization:
            return self._quantized.call(operator, function, error, args, kwargs)
        if type(error) is LayerErrors:
            return self._measured_call(function, operator, error, args, kwargs)
        return self._noised_call(function, operator, cast(OutputErrorModel, error), args, kwargs)

    def escaping_call(self, operator: str, function: TorchFunction, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run `function` and count it as a matrix product that the noise cannot reach."""
        if not self._state.recomputing:
            self._state.recorder.count_escape(self._state.phase, operator)
        observer = self._state.audit.observer
        with observer.known_escape() if observer is not None else nullcontext():
            return function(*args, **kwargs)

    def before_norm(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Add the error to the gradients of an RMSNorm's operands (forward pre-hook)."""
        if self._state.place.error is not None and self._noises_gradients and torch.is_grad_enabled():
            return self._wrap_operands("rms_norm", args, {})[0]
        return None

    def after_norm(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Add the error to an RMSNorm's output (forward hook)."""
        error = self._state.place.error
        if error is not None and not isinstance(error, FakeQuantization | LayerErrors):
            self._noise_output("rms_norm", error, output)

    def after_measured_norm(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        """Add the measured error of the norm called `name` to its output (forward hook); gradients stay exact."""
        place = self._state.place
        if type(place.error) is not LayerErrors:
            return
        error = self._measured_error(place.error, name)
        place.calls += 1
        place.norms += 1
        source = NoiseStream(place.key, place.calls, _OUTPUT)
        self._state.put_error(self._state.phase, f"norm.{name}", place.layer, error, source, output, repeats=True)

    def _noised_call(
        self, function: TorchFunction, operator: str, error: OutputErrorModel, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        bias = None
        if operator == "linear":
            # The error belongs to the product, so the bias is added after it.
            inputs, weight, bias = linear_arguments(*args, **kwargs)
            args, kwargs = (inputs, weight), {}
        elif function is not PRODUCT_OF_SUM.get(operator, function):
            # First the product with its error, by a call of this method; then the sum.
            added, first, second, beta, alpha, out = sum_arguments(*args, **kwargs)
            product = self._noised_call(PRODUCT_OF_SUM[operator], operator, error, (first, second), {})
            product = product if alpha == 1 else product * alpha
            if beta:
                return torch.add(product, added, alpha=beta, out=out)
            return product if out is None else out.copy_(product)
        if self._softmax is not None and function is torch.matmul and self._softmax.is_first_of(args):
            # It takes operands only: they may get wrapped below.
            function, self._softmax = self._softmax.product, None
        if self._noises_gradients and torch.is_grad_enabled():
            args, kwargs = self._wrap_operands(operator, args, kwargs)
        output = function(*args, **kwargs)
        if not output.is_floating_point() and not output.is_complex():
            # Noise needs fractions, so a product of quantized integers cannot have it.
            what = f"{operator} of integers in {self._state.place.name}"
            self._state.recorder.count_escape(self._state.phase, what)
            return output
        if operator in KEEPS_ITS_OUTPUT:
            noised = output.detach().clone()
            self._noise_output(operator, error, noised)
            if operator == "softmax":
                return self._noised_softmax(error, output, noised, kwargs["dim"] if "dim" in kwargs else args[1])
            return straight_through(output, noised)
        self._noise_output(operator, error, output)
        return output if bias is None else output.add_(bias)

    def _measured_call(
        self, function: TorchFunction, operator: str, errors: LayerErrors, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run `function` with the error that was measured of it. It includes the bias, as the measurement did."""
        place, name = self._state.place, self._measured.name_of(operator, args, kwargs)
        error = self._measured_error(errors, name)
        output = function(*args, **kwargs)
        input_rms = None
        if error.figures.per_input:
            input_rms = root_mean_squares(linear_arguments(*args, **kwargs)[0])
        keeps = operator in KEEPS_ITS_OUTPUT
        noised = output.detach().clone() if keeps else output
        place.calls += 1
        source = NoiseStream(place.key, place.calls, _OUTPUT)
        cell = f"{operator}.{name}"
        self._state.put_error(
            self._state.phase, cell, place.layer, error, source, noised, repeats=True, input_rms=input_rms
        )
        return straight_through(output, noised) if keeps else noised

    def _measured_error(self, errors: LayerErrors, name: str) -> OperatorError:
        """Return the measured error of the operator called `name`; ModelError if the parity has none."""
        error, layer = errors.operators.get(name), self._state.place.layer
        if error is None:
            place = "outside the layers" if layer is None else f"layer {layer}"
            raise ModelError(
                f"{place}: the parity of the measured error has no operator {name}, found {', '.join(errors.operators)}"
            )
        return error

    def _noised_softmax(self, error: OutputErrorModel, output: Tensor, noised: Tensor, dim: int) -> Tensor:
        """Return the noised `output` as a distribution, and remember how to compute it again from `output`."""
        result = straight_through(output, renormalise(noised, dim))
        if output.requires_grad:
            place = self._state.place
            source = NoiseStream(place.key, place.calls, _OUTPUT)
            self._softmax = RecomputedWeights(result, output.detach(), partial(self._softmax_again, error, source, dim))
        return result

    def _softmax_again(self, error: OutputErrorModel, source: NoiseStream, dim: int, clean: Tensor) -> Tensor:
        observer = self._state.audit.observer
        with observer.unobserved() if observer is not None else nullcontext():
            return renormalise(apply_error_(clean.clone(), error, source), dim)

    def _noise_output(self, operator: str, error: OutputErrorModel, output: Tensor) -> None:
        """Put the forward error on `output` in place; gradients pass straight through."""
        place = self._state.place
        place.calls += 1
        source = NoiseStream(place.key, place.calls, _OUTPUT)
        self._state.put_error(self._state.phase, operator, place.layer, error, source, output, repeats=True)

    def _wrap_operands(
        self, operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the operands; those with a gradient are wrapped so that the gradient gets an error.

        Operands may be named, or in a list. They are numbered as they are passed.
        """
        others = {name: value for name, value in kwargs.items() if name in _NO_OPERANDS}
        named = {name: value for name, value in kwargs.items() if name not in _NO_OPERANDS}
        operands, structure = tree_flatten((args, named))
        positions = [position for position, operand in enumerate(operands) if _needs_gradient(operand)]
        place = self._state.place
        error = place.error
        if not positions or error is None or isinstance(error, FakeQuantization | LayerErrors):
            return args, kwargs
        # Layer and key are bound now: by the time of the backward pass `place` belongs to another layer.
        layer, key, call = place.layer, place.key, place.calls + 1

        def add_error_(index: int, gradient: Tensor) -> None:
            position = positions[index]
            source = NoiseStream(key, call, _FIRST_GRADIENT + position)
            name = f"{operator}.gradient_{position}"
            self._state.put_error("backward", name, layer, error, source, gradient, repeats=False)

        wrapped = GradientError.apply(add_error_, *(operands[position] for position in positions))
        for position, operand in zip(positions, wrapped, strict=True):
            operands[position] = operand
        args, named = tree_unflatten(operands, structure)
        return args, {**named, **others}


def _needs_gradient(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.requires_grad and operand.is_floating_point()
